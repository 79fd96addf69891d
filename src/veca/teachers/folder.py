"""Reading a model folder as the hub lays it out: config, weights, normalisation, licence."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

from veca._util.files import from_json
from veca.errors import shown
from veca.teachers.base import UNKNOWN_LICENCE, TeacherError
from veca.weights.hub import Repository
from veca.weights.store import file_hash

CONFIG, OPEN_CLIP_CONFIG = "config.json", "open_clip_config.json"
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
# Beside the weights in every repository; all are small.
SMALL_FILES = (CONFIG, OPEN_CLIP_CONFIG, *_PROCESSORS, "README.md")

# Weights by preference: only the first that a repository holds is fetched and hashed.
TRANSFORMERS_WEIGHTS = (
    ("model.safetensors",),
    ("model.safetensors.index.json", "model-*.safetensors"),
    ("pytorch_model.bin",),
    ("pytorch_model.bin.index.json", "pytorch_model-*.bin"),
)
OPEN_CLIP_WEIGHTS = (
    ("open_clip_model.safetensors",),
    ("open_clip_pytorch_model.bin",),
)


class ModelFolder:
    """A local folder, or a repository of the hub of which files are fetched as they are wanted."""

    def __init__(self, path: Path, repository: Repository | None = None, label: str = "") -> None:
        self.path = path
        self.repository = repository
        self.label = label or str(path)
        """What the user called it, for messages."""

    @classmethod
    def local(cls, path: Path) -> ModelFolder:
        return cls(path)

    @classmethod
    def from_hub(cls, repo: str) -> ModelFolder:
        repository = Repository(repo, TeacherError, "list_teachers() has the known ones")
        return cls(repository.fetch(SMALL_FILES), repository, repo)

    @property
    def revision(self) -> str | None:
        """The exact commit on the hub, if it came from there."""
        return self.repository.commit if self.repository else None

    def has(self, name: str) -> bool:
        """Whether a (small) file of this name is there."""
        return (self.path / name).is_file()

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object in the folder, or None when there is no such file."""
        path = self.path / name
        if not path.is_file():
            return None
        try:
            value = from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TeacherError(f"cannot read {path} ({error}); fetch it again.") from error
        if not isinstance(value, dict):
            raise TeacherError(f"{path} must hold a JSON object, got {type(value).__name__}.")
        return value

    def weights(self, groups: tuple[tuple[str, ...], ...]) -> list[Path]:
        """The weights files of the first of `groups` that is there, fetched if need be."""
        if self.repository is not None:
            group = self.repository.first(self.path, *groups)
            self.path = self.repository.fetch([*SMALL_FILES, *group])
        for group in groups:
            found = [sorted(self.path.glob(pattern)) for pattern in group]
            if all(found):
                return [path for paths in found for path in paths]
        wanted = ", ".join(group[0] for group in groups)
        raise TeacherError(
            f"the folder {self.label} holds no weights (looked for {wanted}); fetch them too."
        )

    def fetch_code(self) -> None:
        """Fetch the Python files of a repository. They are not run by this."""
        if self.repository is not None:
            self.path = self.repository.fetch([*SMALL_FILES, "*.py"])

    def normalisation(self) -> tuple[list[float], list[float]] | None:
        """(mean, std) that the folder's image processor states, if any."""
        for name in _PROCESSORS:
            fields = self.read_json(name) or {}
            nested = fields.get("image_processor")
            fields = nested if isinstance(nested, dict) else fields
            if fields.get("do_normalize") is False:
                return [0.0] * 3, [1.0] * 3
            if fields.get("image_mean") and fields.get("image_std"):
                mean = self._colours(name, fields, "image_mean")
                return mean, self._colours(name, fields, "image_std")
        return None

    def _colours(self, name: str, fields: dict[str, Any], key: str) -> list[float]:
        """A number for each channel."""
        value = fields[key]
        numbers = value if isinstance(value, list) else []
        plain = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in numbers)
        if not plain or len(numbers) != 3 or not all(map(_is_moderate, numbers)):
            raise TeacherError(
                f"{self.path / name}: {key} must be three numbers, got {shown(value)}; fetch it "
                "again."
            )
        return [float(x) for x in numbers]

    def licence(self) -> str:
        """What the model card's head says, or "unknown"."""
        path = self.path / "README.md"
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return UNKNOWN_LICENCE
        head = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
        found = dict(
            re.findall(r"^(license(?:_name)?):\s*(\S.*?)\s*$", head[1] if head else "", re.M)
        )
        licence = found.get("license_name") or found.get("license") or UNKNOWN_LICENCE
        return licence.strip("'\"")


def _is_moderate(number: float) -> bool:
    return abs(number) < 1e6 and math.isfinite(number)


def hash_files(paths: list[Path]) -> str:
    """sha256 of one file as `sha256sum` prints it; of several, that of their hashes in order."""
    digests = [file_hash(path) for path in paths]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
