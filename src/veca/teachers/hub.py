"""Fetching a teacher's files from the Hugging Face hub: only what is needed, never a hang.

The hub is asked once what a repository holds, with a time limit; then only the wanted files
are fetched. When it cannot be reached, files that an earlier download left are used.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from veca.teachers.base import TeacherError
from veca.weights.hub import TIMEOUT


class Repository:
    """A model repository, `owner/name` or `owner/name@revision`."""

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.name, _, revision = repo.partition("@")
        self.revision = revision or None
        self.commit: str | None = None
        """The exact revision, once known."""
        self._files: list[str] | None = None
        self._trouble: Exception | None = None
        self._ask()

    def _ask(self) -> None:
        import huggingface_hub

        utils: Any = importlib.import_module("huggingface_hub.utils")
        # The client reads this variable once, when imported; a user may set it later.
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            self._trouble = utils.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
            return
        try:
            api = huggingface_hub.HfApi()
            info = api.model_info(self.name, revision=self.revision, timeout=TIMEOUT)
        except Exception as error:  # whichever HTTP library the client uses has its own
            self._trouble = error
            return
        self.commit = info.sha
        self._files = [file.rfilename for file in info.siblings or ()]

    def fetch(self, patterns: Sequence[str]) -> Path:
        """The local folder with this repository's files that match any of `patterns`."""
        import huggingface_hub

        # By the revision asked for, not by its commit: only then is it found again offline.
        try:
            folder = huggingface_hub.snapshot_download(
                self.name,
                revision=self.revision,
                allow_patterns=list(patterns),
                etag_timeout=TIMEOUT,
                local_files_only=self._trouble is not None,
            )
        except Exception as error:  # as above
            cause = self._trouble or error
            raise TeacherError(_message(self.repo, cause)) from cause
        return Path(folder)

    def first(self, folder: Path, *groups: Sequence[str]) -> Sequence[str]:
        """The first of `groups` of patterns of which the repository holds every one.

        Where the hub could not be asked, what lies in `folder` counts.
        """
        held = self._files
        if held is None:
            held = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        for group in groups:
            if all(any(fnmatchcase(name, pattern) for name in held) for pattern in group):
                return group
        if self._trouble is not None:
            raise TeacherError(_message(self.repo, self._trouble)) from self._trouble
        wanted = " or ".join(group[0] for group in groups)
        raise TeacherError(f"the hub's {self.repo} holds no {wanted}; choose another repository.")


def _message(repo: str, error: Exception) -> str:
    utils: Any = importlib.import_module("huggingface_hub.utils")
    name, _, revision = repo.partition("@")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, utils.GatedRepoError) or status == 403:
        return (
            f"the hub's {name} is gated: accept its licence on https://huggingface.co/{name}, then "
            "log in with `hf auth login` (or set HF_TOKEN) and try again."
        )
    if isinstance(error, utils.RevisionNotFoundError):
        return f"the hub's {name} has no revision {revision!r}; check it, or leave it out."
    missing = isinstance(error, (utils.RepositoryNotFoundError, utils.HFValidationError))
    if missing or status in (401, 404):
        return (
            f"there is no folder {repo} here, and the hub has no model {name}, or it is private; "
            "check the name (list_teachers() has the known ones), or log in with `hf auth login`."
        )
    if isinstance(error, utils.OfflineModeIsEnabled):
        return (
            f"the hub's {repo} was not fetched earlier, and HF_HUB_OFFLINE is set; unset it to "
            "fetch, or give the path of a local folder."
        )
    reason = (str(error).splitlines() or [""])[0].strip()
    return (
        f"the hub's {repo} cannot be fetched ({type(error).__name__}: {reason}) and was not "
        "fetched earlier; check the network, or give the path of a local folder."
    )
