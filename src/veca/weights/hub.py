"""Fetching weights from the Hugging Face hub: short time-outs, and errors that say what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from veca.errors import WeightsError

TIMEOUT = 10.0
"""Seconds to wait for an answer before looking for what an earlier download left."""

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_repo(text: str) -> bool:
    """Whether `text` reads as owner/name or owner/name@revision, and not as a path to a file."""
    return bool(_REPO.fullmatch(text)) and not text.endswith(".safetensors")


def download(repo: str, wanted: Sequence[str]) -> Path:
    """The local folder with the `wanted` files of a repository; the first of them is a must.

    When the hub cannot be reached, files fetched earlier are used.
    """
    import huggingface_hub

    name, _, revision = repo.partition("@")
    options: dict[str, Any] = {"revision": revision or None, "allow_patterns": list(wanted)}
    # snapshot_download waits without limit for its first answer; this asks first, with one.
    answer = ask(name, revision or None)
    trouble = answer if isinstance(answer, Exception) else None
    try:
        folder = huggingface_hub.snapshot_download(
            name, **options, etag_timeout=TIMEOUT, local_files_only=trouble is not None
        )
    except Exception as error:  # whichever HTTP library the hub's client uses has its own
        if trouble is not None:
            raise WeightsError(message(repo, trouble)) from trouble
        raise WeightsError(message(repo, error)) from error
    path = Path(folder)
    if not (path / wanted[0]).is_file():
        if trouble is not None:
            raise WeightsError(message(repo, trouble)) from trouble
        raise WeightsError(
            f"the hub's {repo} holds no {wanted[0]}, so it is not a model of veca's; "
            "check the name."
        )
    return path


def ask(name: str, revision: str | None) -> Any:
    """What the hub says of a repository, or the exception that keeps it from serving it now."""
    import huggingface_hub

    # The client reads this variable once, when imported; a user may set it later.
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return huggingface_hub.utils.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    try:
        return huggingface_hub.HfApi().model_info(name, revision=revision, timeout=TIMEOUT)
    except Exception as error:  # as above
        return error


def message(repo: str, error: Exception, missing: str = "such repository", advice: str = "") -> str:
    """What an error of the hub's client means, and what to do.

    Args:
        missing: what the hub does not have, if so; `advice` follows "check the name".
    """
    name, _, revision = repo.partition("@")
    status = getattr(getattr(error, "response", None), "status_code", None)
    # By name, because the client's versions keep these classes in different modules.
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "GatedRepoError" in kinds or status == 403:
        return (
            f"the hub's {name} is gated: accept its licence on https://huggingface.co/{name}, then "
            "log in with `hf auth login` (or set HF_TOKEN) and try again."
        )
    if "RevisionNotFoundError" in kinds:
        return f"the hub's {name} has no revision {revision!r}; check it, or leave it out."
    if kinds & {"RepositoryNotFoundError", "HFValidationError"} or status in (401, 404):
        return (
            f"there is no folder {repo} here, and the hub has no {missing}, or it is private; "
            f"check the name{advice}, or log in with `hf auth login`."
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
