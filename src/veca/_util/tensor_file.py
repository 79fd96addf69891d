"""Files of tensors (safetensors): which bytes are they, are they whole; in and out."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from veca._util import files
from veca.errors import InputError, OutputError, VecaError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

SEAL = "veca_sha256"
"""The key in a file's header under which `seal` stands; files of 0.1 have none."""


def check_dtype(dtype: torch.dtype | None) -> None:
    """Refuse a dtype that weights cannot have; None is fine."""
    if dtype is not None and dtype not in FLOATS:
        names = ", ".join(str(known).removeprefix("torch.") for known in FLOATS)
        raise InputError(f"dtype must be one of {names} (of torch) or None, got {dtype!r}.")


def content_hash(state: Mapping[str, Tensor]) -> str:
    """sha256 over the names, dtypes, shapes and bytes of the tensors, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def seal(content: str, metadata: Mapping[str, str]) -> str:
    """sha256 of all that a file says: the hash of its tensors, and the rest of its header.

    A header is text: without this one changed digit in it would be another model.
    """
    digest = hashlib.sha256(content.encode())
    for name in sorted(metadata.keys() - {SEAL}):
        for text in (name, metadata[name]):
            # The length first, so that nothing can move from one text to the next.
            digest.update(f"\0{len(text)}\0{text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """`safe_open` for torch. A pipe, for which it would wait, is an OSError."""
    files.check_regular(path)
    with safe_open(path, framework="pt") as file:
        yield file


def read_file(path: Path, error: type[VecaError]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and the rest of its header, as `write_file` wrote them.

    `error` says what is wrong with a file that is damaged, or has changed since.
    """
    try:
        with opened(path) as file:
            metadata = dict(file.metadata() or {})
            # Copies: what is read is a window on the file, which may change or vanish.
            state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"cannot read {path} ({reason}); fetch or write it again.") from problem
    if metadata.get(SEAL, "") not in ("", seal(content_hash(state), metadata)):
        raise error(
            f"{path} is not what was saved (its sha256 differs from the one recorded); fetch or "
            "write it again."
        )
    return state, metadata


def write_file(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as a safetensors file, all or nothing."""
    with files.temporary_beside(path) as temporary:
        write(tensors, temporary, path, metadata)
        files.commit(temporary, path)


def write(
    tensors: Mapping[str, Tensor],
    temporary: Path,
    target: Path,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a file that is about to become `target`, and keep the file's permissions."""
    mode = temporary.stat().st_mode
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    header = dict(metadata or {})
    if SEAL not in header:
        header[SEAL] = seal(content_hash(whole), header)
    try:
        save_file(whole, temporary, metadata=header)
        _sort_header(temporary)
    except SafetensorError as error:
        raise OutputError(
            f"cannot write {target} ({error}); free some space or choose another place."
        ) from error
    temporary.chmod(mode)  # safetensors makes files that only their owner can read


def _sort_header(path: Path) -> None:
    """Put the words of a header in order: safetensors has another each time, and equal content
    is to be equal bytes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        words = header.pop("__metadata__", {})
        ordered = {"__metadata__": dict(sorted(words.items())), **header}
        text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # longer only where JSON is written otherwise; then it stays
            file.seek(8)
            file.write(text.ljust(size))
