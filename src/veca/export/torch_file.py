"""torch.export: the traced program as a .pt2 file, which torch runs without this package."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from veca._util.archives import check_stored
from veca._util.files import from_json, parse_json
from veca.errors import ExportError, InputError
from veca.export.graph import quiet

FACTS = "veca.json"
"""The name under which a file holds its facts, as JSON."""

_LIST = re.compile(r"data/(weights|constants)/model_\w+_config\.json")
_TENSOR = re.compile(r"/data/(weights|constants)/(weight|tensor)_\d+$")
_KNOWN = re.compile(
    r"models/model\.json|data/(weights|constants)/((weight|tensor)_\d+|model_\w+_config\.json)|"
    r"extra/veca\.json|archive_(format|version)|byteorder|\.[\w/]+"
)


def write(program: torch.export.ExportedProgram, path: Path, facts: Mapping[str, Any]) -> None:
    """Write a program. The example it was traced with is left out: it would be stored pickled."""
    program._example_inputs = None  # type: ignore[assignment]
    # Into memory first: torch's writer ends the whole process where the disk is full, and insists
    # on a name ending in .pt2, which a temporary has not.
    content = io.BytesIO()
    with quiet():
        torch.export.save(program, content, extra_files={FACTS: json.dumps(facts)})
    path.write_bytes(content.getbuffer())


class TorchRunner:
    """A .pt2 file in torch: tensors in, a dict of tensors out, nothing checked but its own guards.

    Such a file is a program: open only files from people you trust. One that holds pickled
    objects, which `export_model` never writes, is refused unread.
    """

    def __init__(self, path: str | os.PathLike[str], device: str = "cpu") -> None:
        _refuse_strangers(Path(path))
        facts: dict[str, Any] = {FACTS: ""}
        with quiet():
            try:
                with Path(path).open("rb") as file:
                    program = torch.export.load(file, extra_files=facts)  # type: ignore[arg-type]
            except Exception as error:  # it raises almost any type on a damaged file
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise ExportError(
                    f"{path} cannot be read by torch {torch.__version__} ({reason}); it may be "
                    "damaged, or written by another version of torch: export it again with this "
                    "one."
                ) from error
            if torch.device(device).type != "cpu":
                from torch.export.passes import move_to_device_pass

                program = move_to_device_pass(program, device)
        self.device = torch.device(device)
        self.facts = parse_json(facts[FACTS] or "{}", f"{FACTS} in {path}", ExportError)
        self._open = [name for name in ("cores", "keep") if self.facts.get(name) == "any"]
        self._module = program.module()

    def __call__(
        self, images: Tensor, cores: int | None = None, keep: float = 1.0
    ) -> dict[str, Tensor]:
        given = {"cores": cores, "keep": keep}
        inputs = [torch.tensor(given[name], device=self.device) for name in self._open]
        with torch.no_grad():
            return self._module(images.to(self.device, torch.float32), *inputs)


def _is_no_tensor(name: str) -> bool:
    return not _TENSOR.search(name)


def _refuse_strangers(path: Path) -> None:
    """Refuse an archive with anything in it but JSON, bare tensors and what torch adds itself.

    The rest (pickles, compiled libraries) could run code when it is read.
    """
    if not path.exists():
        raise InputError(f"there is no file {path}.")
    held = check_stored(path, "a program of torch.export", ExportError, _is_no_tensor)
    entries = {name.partition("/")[2]: data for name, data in held.items()}
    try:
        configs = [from_json(data) for name, data in entries.items() if _LIST.search(name)]
        pickled = [
            name
            for config in configs
            for name, entry in config["config"].items()
            if entry["use_pickle"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(
            f"{path} is not a program of torch.export ({error}); export it again."
        ) from error
    strange = [name for name, data in entries.items() if data and not _KNOWN.fullmatch(name)]
    if pickled or strange or "models/model.json" not in entries:
        what = (*pickled, *strange, "no program")[0]
        raise ExportError(
            f"{path} holds {what}, unlike what `veca export` writes, and could run code when read; "
            "open it with torch.export.load yourself if you trust it."
        )
