"""Fetching a teacher's files from the Hugging Face hub: only what is needed, never a hang.

The hub is asked once what a repository holds, with a time limit; then only the wanted files
are fetched. When it cannot be reached, files that an earlier download left are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from veca.teachers.base import TeacherError
from veca.weights import hub


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
        answer = hub.ask(self.name, self.revision)
        if isinstance(answer, Exception):
            self._trouble = answer
        else:
            self.commit = answer.sha
            self._files = [file.rfilename for file in answer.siblings or ()]

    def fetch(self, patterns: Sequence[str]) -> Path:
        """The local folder with this repository's files that match any of `patterns`."""
        import huggingface_hub

        # By the revision asked for, not by its commit: only then is it found again offline.
        try:
            folder = huggingface_hub.snapshot_download(
                self.name,
                revision=self.revision,
                allow_patterns=list(patterns),
                etag_timeout=hub.TIMEOUT,
                local_files_only=self._trouble is not None,
            )
        except Exception as error:  # whichever HTTP library the client uses has its own
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
    model = f"model {repo.partition('@')[0]}"
    return hub.message(repo, error, model, " (list_teachers() has the known ones)")
