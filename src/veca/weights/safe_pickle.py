"""Reading a torch-saved archive without running anything it asks for.

A pickle is a program: it names functions and classes, and calls them. Here it may name what it
likes, but for a handful of torch's own names, which stand for "a tensor lies there", each name
becomes an inert stand-in: never imported, and calling it does nothing. Data comes through
untouched, foreign objects come out as `Inert`, tensors as `StoredTensor`, read when asked for.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from veca.errors import WeightsError

_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Inert:
    """A stand-in for anything foreign. The pickle may do to it what it likes; nothing happens."""

    # Every hook takes anything, because a pickle can also name the class itself where it would
    # properly name an instance.
    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __call__(self, *args: object, **kwargs: object) -> Inert:
        return Inert()

    def __setstate__(*args: object) -> None: ...  # type: ignore[misc]

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(*args: object) -> None: ...  # type: ignore[misc]

    extend = add = append


class _Dict(dict):  # type: ignore[type-arg]
    """torch's OrderedDicts carry attributes, which a plain dict has no place for."""

    def __init__(self, *args: object) -> None:
        super().__init__()
        for key, value in args[0] if args and isinstance(args[0], (list, tuple)) else ():
            self[key] = value

    def __setstate__(self, state: object) -> None: ...


class _Storage:
    """A run of numbers in the archive."""

    __slots__ = ("count", "dtype", "path", "start")

    def __init__(self, path: Path, start: int, count: int, dtype: torch.dtype) -> None:
        self.path, self.start, self.count, self.dtype = path, start, count, dtype

    def __setstate__(self, state: object) -> None: ...


class StoredTensor:
    """A tensor in the archive, not yet read."""

    __slots__ = ("offset", "size", "storage", "stride")

    def __init__(self, storage: _Storage, offset: int, size: tuple[int, ...], stride: Any) -> None:
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride

    def __setstate__(self, state: object) -> None: ...

    def read(self) -> Tensor:
        """The tensor itself, from the file."""
        storage = self.storage
        nbytes = storage.count * storage.dtype.itemsize
        with storage.path.open("rb") as file:
            file.seek(storage.start)
            data = bytearray(file.read(nbytes))
        if len(data) != nbytes:
            raise WeightsError(f"{storage.path} is cut short; fetch it again.")
        if not data:
            return torch.empty(self.size, dtype=storage.dtype)
        flat = torch.frombuffer(data, dtype=storage.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


class _Allowed:
    """A function the pickle may call; wrapped, so that the pickle cannot alter it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: object) -> None: ...


class _StorageType:
    """The name of a storage class, which stands for a dtype."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __setstate__(self, state: object) -> None: ...


def read(path: Path) -> object:
    """The object in a file written by `torch.save` in its zip format (the one since 2020)."""
    try:
        with zipfile.ZipFile(path) as archive:
            root = _root(archive, path)
            order = f"{root}byteorder"
            if order in archive.NameToInfo and archive.read(order) == b"big":
                raise WeightsError(f"{path} was written on a big-endian machine; save it on a PC.")
            program = archive.read(f"{root}data.pkl")
            _refuse_codes(program, path)
            return _Unpickler(program, archive, root, path).load()
    except WeightsError:
        raise
    except (zipfile.BadZipFile, OSError) as error:
        raise WeightsError(f"cannot read {path} ({error}); fetch it again.") from error
    except Exception as error:  # a pickle can fail in any way; none is more than a bad file
        raise WeightsError(f"{path} is not a readable checkpoint ({error}).") from error


def _refuse_codes(program: bytes, path: Path) -> None:
    """Refuse what torch never writes and `find_class` does not see."""
    for code, argument, _ in pickletools.genops(program):
        if code.name.startswith("EXT"):  # names an object by a number
            raise WeightsError(f"{path} uses pickle extension codes, which weights never do.")
        if code.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(program):
            raise WeightsError(f"{path} asks for more memory than it can need; fetch it again.")


def _root(archive: zipfile.ZipFile, path: Path) -> str:
    """The folder inside the archive that holds `data.pkl`, with its slash."""
    for info in archive.infolist():
        head, slash, tail = info.filename.partition("/")
        if slash and tail == "data.pkl" and info.compress_type == zipfile.ZIP_STORED:
            return f"{head}/"
    raise WeightsError(f"{path} is a zip archive, but not one written by torch.save.")


class _Unpickler(pickle.Unpickler):
    def __init__(self, program: bytes, archive: zipfile.ZipFile, root: str, path: Path) -> None:
        super().__init__(io.BytesIO(program), encoding="utf-8")
        self._archive, self._root, self._path = archive, root, path

    def find_class(self, module: str, name: str) -> object:
        """What a name in the pickle stands for. Nothing is looked up, let alone imported."""
        if (module, name) == ("collections", "OrderedDict"):
            return _Allowed(_Dict)
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return _Allowed(_tensor)
        if module == "torch._utils" and name in (
            "_rebuild_parameter",
            "_rebuild_parameter_with_state",
        ):
            return _Allowed(lambda data, *rest: data)
        if module == "torch" and name in _DTYPES:
            return _StorageType(_DTYPES[name])
        return type("Inert", (Inert,), {"foreign": f"{module}.{name}"})

    def persistent_load(self, reference: Any) -> object:
        """The storage that a tensor refers to: ("storage", type, key, device, count)."""
        kind, storage_type, key, _, count = reference
        if kind != "storage" or not isinstance(storage_type, _StorageType):
            return Inert()
        info = self._archive.getinfo(f"{self._root}data/{key}")
        stored = info.compress_type == zipfile.ZIP_STORED and type(count) is int and count >= 0
        if not stored or count * storage_type.dtype.itemsize > info.file_size:
            raise WeightsError(f"{self._path}: the tensor data {key} are damaged; fetch it again.")
        return _Storage(self._path, self._start(info), count, storage_type.dtype)

    def _start(self, info: zipfile.ZipInfo) -> int:
        """Where in the file the bytes of a member begin, after its local header."""
        with self._path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(30)
        name, extra = struct.unpack("<HH", header[26:30])
        return info.header_offset + 30 + int(name) + int(extra)


def _tensor(storage: object, offset: int, size: Any, stride: Any, *rest: object) -> object:
    if not isinstance(storage, _Storage):
        return Inert()  # of a kind that weights never have
    size, stride = tuple(size), tuple(stride)
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise WeightsError(f"{storage.path}: a tensor has an impossible shape; fetch it again.")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    count = math.prod(size)
    if count and (last >= storage.count or count > storage.count):
        raise WeightsError(f"{storage.path}: a tensor is larger than its data; fetch it again.")
    return StoredTensor(storage, offset, size, stride)


def kind(value: object) -> str:
    """What a value read is, for messages: its type, or the foreign name it stands for."""
    return str(getattr(value, "foreign", type(value).__name__))
