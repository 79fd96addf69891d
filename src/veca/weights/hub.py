"""Fetching from the Hugging Face hub: only what is needed, never a hang, clear errors.

The hub is asked once what a repository holds, with a time limit; then only the wanted files are
fetched. When it cannot be reached, files that an earlier download left are used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from veca.errors import VecaError, WeightsError

TIMEOUT = 10.0
"""Seconds to wait for an answer before looking for what an earlier download left."""

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_repo(text: str) -> bool:
    """Whether `text` reads as owner/name or owner/name@revision, and not as a path to a file."""
    return bool(_REPO.fullmatch(text)) and not text.endswith(".safetensors")


def at_revision(repo: object, revision: str | None) -> str:
    """`owner/name@revision` of a repository and a branch, a tag or the hash of a commit."""
    text = repo if isinstance(repo, str) else ""
    name, at, _ = text.partition("@")
    if at or not is_repo(f"{name}@{revision}"):
        raise WeightsError(
            f"revision={revision!r} is a branch, a tag or a commit of a hub repository owner/name, "
            f"but the weights are {repo!r}; leave one of them out, or write owner/name@revision."
        )
    return f"{name}@{revision}"


def fetched_before(repo: str) -> bool:
    """Whether the hub's cache on this machine holds something of a repository."""
    from huggingface_hub import constants

    name = repo.partition("@")[0].replace("/", "--")
    return Path(constants.HF_HUB_CACHE, f"models--{name}").is_dir()


def download(repo: str, wanted: Sequence[str]) -> Path:
    """The local folder with the `wanted` files of a repository; the first of them is a must."""
    repository = Repository(repo)
    path = repository.fetch(wanted)
    if not (path / wanted[0]).is_file():
        if repository.trouble is not None:
            raise repository.refusal(repository.trouble) from repository.trouble
        raise WeightsError(
            f"the hub's {repo} holds no {wanted[0]}, so it is not a model of veca's; "
            "check the name."
        )
    return path


class Repository:
    """A model repository, `owner/name` or `owner/name@revision`.

    Args:
        error: the class of what is raised.
        known: what helps to find the right name, in words.
    """

    def __init__(self, repo: str, error: type[VecaError] = WeightsError, known: str = "") -> None:
        self.repo, self._error, self._known = repo, error, known
        self.name, _, revision = repo.partition("@")
        self.revision = revision or None
        self.trouble: Exception | None = None
        """What keeps the hub from serving this repository to us right now, if anything."""
        self._info: Any = None
        # snapshot_download waits without limit for its first answer; this asks first, with one.
        try:
            self._info = self._ask()
            self._require_pinned()
        except VecaError:
            raise
        except Exception as error:  # whichever HTTP library the hub's client uses has its own
            self.trouble = error

    def _ask(self) -> Any:
        import huggingface_hub

        # The client reads this variable once, when imported; a user may set it later.
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise huggingface_hub.utils.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        return huggingface_hub.HfApi().model_info(
            self.name, revision=self.revision, timeout=TIMEOUT
        )

    def _require_pinned(self) -> None:
        """A commit that was asked for by its hash is what the hub answers with, or nothing is."""
        commit, asked = self.commit, (self.revision or "").lower()
        if commit and _COMMIT.fullmatch(asked) and commit != asked:
            raise self._error(
                f"the hub answered {self.repo} with commit {commit}, which is another; nothing was "
                "fetched. Check the hash, and whether a branch or a tag has it for a name."
            )

    @property
    def commit(self) -> str | None:
        """The exact revision, where the hub could be asked."""
        return getattr(self._info, "sha", None)

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
                local_files_only=self.trouble is not None,
            )
        except Exception as error:  # as above
            cause = self.trouble or error
            raise self.refusal(cause) from cause
        return Path(folder)

    def first(self, folder: Path, *groups: Sequence[str]) -> Sequence[str]:
        """The first of `groups` of patterns of which the repository holds every one.

        Where the hub could not be asked, what lies in `folder` counts.
        """
        if self.trouble is None:
            held = [file.rfilename for file in self._info.siblings or ()]
        else:
            held = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        for group in groups:
            if all(any(fnmatchcase(name, pattern) for name in held) for pattern in group):
                return group
        if self.trouble is not None:
            raise self.refusal(self.trouble) from self.trouble
        wanted = " or ".join(group[0] for group in groups)
        raise self._error(f"the hub's {self.repo} holds no {wanted}; choose another repository.")

    def refusal(self, trouble: Exception) -> VecaError:
        """What is in the way, and what to do about it."""
        return self._error(self._message(trouble))

    def _message(self, error: Exception) -> str:
        repo, name = self.repo, self.name
        status = getattr(getattr(error, "response", None), "status_code", None)
        # By name, because the client's versions keep these classes in different modules.
        kinds = {cls.__name__ for cls in type(error).__mro__}
        if "GatedRepoError" in kinds or status == 403:
            return (
                f"the hub's {name} is gated: accept its licence on https://huggingface.co/{name}, "
                "then log in with `hf auth login` (or set HF_TOKEN) and try again."
            )
        if "RevisionNotFoundError" in kinds:
            return f"the hub's {name} has no revision {self.revision!r}; check it, or leave it out."
        if kinds & {"RepositoryNotFoundError", "HFValidationError"} or status in (401, 404):
            known = f" ({self._known})" if self._known else ""
            return (
                f"there is no folder {repo} here, and the hub has no such repository, or it is "
                f"private; check the name{known}, or log in with `hf auth login`."
            )
        if "OfflineModeIsEnabled" in kinds:
            return (
                f"the hub's {repo} was not fetched earlier, and HF_HUB_OFFLINE is set; unset it to "
                "fetch, or give the path of a local folder."
            )
        reason = (str(error).splitlines() or [""])[0].strip() or type(error).__name__
        return (
            f"the hub's {repo} cannot be fetched ({type(error).__name__}: {reason}) and was not "
            "fetched earlier; check the network, or give the path of a local folder."
        )
