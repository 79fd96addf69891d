"""Files of `torch.save`, read so that a small one costs little and a damaged one is an error.

`torch.load(weights_only=True)` runs nothing of a file, but it believes what the file says of
itself. So the checksums of the archive are compared first, and the pickle in it is looked through,
without being run, for numbers and nesting that would take gigabytes or hours.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veca._util import files
from veca._util.archives import check_stored
from veca.errors import VecaError
from veca.weights import tensors as ts

_MOST_PICKLED = 8 * 2**20
"""Bytes of a pickle; that of a checkpoint, whose tensors lie outside, has some hundred thousand."""
_MOST_WORK = 10**7
"""Steps that hashing the keys of a pickle may take."""
_SHARED = 4
"""Times that the tensors of a file may together be as large as their data; views are shared."""
_LEGACY = 5  # pickles that a file of torch before 1.6 begins with


def read(path: Path, what: str, error: type[VecaError]) -> object:
    """What a file holds: tensors and plain data. Anything else, and damage, is an `error`.

    Args:
        what: the kind of file, for messages: "a checkpoint".
    """
    try:
        with files.open_file(path) as file:
            zipped = file.read(2) == b"PK"
            file.seek(0)
            pickles = _pickles(path, error) if zipped else [file.read(_MOST_PICKLED)]
    except OSError as problem:
        raise error(f"cannot read {path} ({problem.strerror}).") from problem
    size = path.stat().st_size
    for pickled in pickles:
        fault = _fault(pickled, size)
        if fault:
            raise error(f"{path}: {fault}, unlike {what}; it is not read.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as problem:  # a pickle can fail in any way; none is more than a bad file
        foreign = _foreign(path) if zipped else []
        if foreign:
            raise error(
                f"{path} holds Python objects beside tensors and plain data "
                f"({ts.listed(foreign)}), which are never loaded; save it again with a plain dict "
                "of tensors and settings alone."
            ) from problem
        raise error(
            f"{path} is not {what} saved by torch that can be read safely; fetch it again, or if "
            "it is one of a torch before 1.6, load it with that and save it again."
        ) from problem


def check_sizes(state: Mapping[str, Tensor], path: Path, error: type[VecaError]) -> None:
    """Refuse tensors that would be larger in memory than what the file has stored for them."""
    stored: dict[int, int] = {}
    total = 0
    for name, tensor in state.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise error(f"{path}: {name} is not an ordinary tensor, but sparse or empty.")
        data = tensor.untyped_storage()
        size = tensor.numel() * tensor.itemsize
        if size > data.nbytes():
            raise error(f"{path}: {name} is larger than its data; fetch it again.")
        stored[data.data_ptr()] = data.nbytes()
        total += size
    if total > _SHARED * sum(stored.values()):
        raise error(
            f"{path}: the tensors would be {total / 1e6:.0f} MB, {total // sum(stored.values())} "
            "times their data; save it again with a copy of each."
        )


def _pickles(path: Path, error: type[VecaError]) -> list[bytes]:
    """The pickles in an archive, every byte of which is compared with its checksum."""
    found = check_stored(path, "one written by torch.save", error, lambda n: n.endswith(".pkl"))
    if not any(name.endswith("/data.pkl") for name in found):
        raise error(f"{path} is a zip archive, but not one written by torch.save.")
    return list(found.values())


class _Value(NamedTuple):
    """What is known of a value that a pickle makes, without making it."""

    work: int = 1
    """Steps of its hash."""
    name: str = ""
    """Of a function or a class."""
    largest: int = 0
    """The largest number in it."""


class _Costly(Exception):
    """Why a pickle is not worth running."""


def _fault(pickled: bytes, size: int) -> str | None:
    """What in a pickle, one of a file of `size` bytes, would cost more than it could be worth."""
    if len(pickled) > _MOST_PICKLED:
        return f"it holds {len(pickled) / 1e6:.0f} MB of plain data"
    stream = io.BytesIO(pickled)
    try:
        for _ in range(_LEGACY):
            _look_through(pickletools.genops(stream), size)
    except _Costly as cost:
        return str(cost)
    except Exception:  # no pickle, or one that torch cannot run beyond this point either
        return None
    return None


def _look_through(program: Iterator[Any], size: int) -> None:
    """Follow a pickle's program as far as torch would run it."""
    stack: list[_Value] = []
    marks: list[list[_Value]] = []
    memo: dict[int, _Value] = {}
    work = 0

    def popped() -> list[_Value]:
        nonlocal stack
        items, stack = stack, marks.pop()
        return items

    for opcode, argument, _ in program:
        name = opcode.name
        if name == "MARK":
            marks.append(stack)
            stack = []
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            count = 0 if name == "TUPLE" else int(name[-1])
            parts = popped() if not count else [stack.pop() for _ in range(count)][::-1]
            made = _tuple(parts)
            work += made.work
            stack.append(made)
        elif name in ("REDUCE", "NEWOBJ"):
            given, function = stack.pop(), stack.pop()
            if _allocates(function.name) and given.largest > size:
                raise _Costly(f"it asks for {given.largest:,} numbers that it does not hold")
            work += given.work
            stack.append(_Value(given.work, largest=given.largest))
        elif name == "BINPERSID":
            given = stack.pop()
            if given.largest > size:
                raise _Costly(f"it says it stores {given.largest:,} numbers, more than its bytes")
            stack.append(_Value())
        elif name in ("SETITEM", "SETITEMS"):
            items = popped() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
            work += sum(key.work for key in items[::2])
        elif name in ("APPEND", "BUILD"):
            stack.pop()
        elif name == "APPENDS":
            popped()
        elif name == "GLOBAL":
            stack.append(_Value(name=argument.replace(" ", ".")))
        elif name in ("PROTO", "STOP", "FRAME"):
            continue
        elif not opcode.stack_before and len(opcode.stack_after) == 1:
            number = isinstance(argument, int) and not isinstance(argument, bool)
            stack.append(_Value(largest=argument if number else 0))
        else:
            raise ValueError(name)  # torch refuses it
        if work > _MOST_WORK:
            raise _Costly("its tuples are nested so that hashing them would take for ever")


def _tuple(parts: list[_Value]) -> _Value:
    work = 1 + sum(part.work for part in parts)
    return _Value(work, largest=max((part.largest for part in parts), default=0))


def _allocates(name: str) -> bool:
    """Whether a function that torch allows makes as many bytes as a number says."""
    return name.endswith(".bytearray") or (
        name.startswith("torch.") and name.endswith(("Tensor", "Storage"))
    )


def _foreign(path: Path) -> list[str]:
    """The names of what a file asks for that torch does not load; none if it is damaged."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        return []
