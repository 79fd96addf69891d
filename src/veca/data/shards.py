"""Tar shards in the webdataset layout: plain tar files of `key.jpg`, perhaps with `key.json`.

Each shard is listed once, and images are read by their place in the file (`pread`), in any order
and from any number of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from veca._util.cache import cache_folder
from veca._util.files import check_regular, from_json
from veca.data.index import VERSION, digest, load_arrays, save_arrays
from veca.data.names import Names
from veca.errors import DataError
from veca.images import EXTENSIONS, extensions

_OPEN_FILES = 64
_BLOCK = 512
_files_lock = threading.Lock()


def _renew_lock() -> None:
    """In a forked child: another thread of the parent may have held the lock, and is not here."""
    global _files_lock
    _files_lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)


class ShardIndex(NamedTuple):
    """The images of one shard, in the order they lie in it."""

    names: Names
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]


class ShardSource:
    """The images of some tar shards, in the order of the shards."""

    def __init__(self, shards: Sequence[Path], *, cache: Path | None = None) -> None:
        self.shards = [path.absolute() for path in shards]
        self._indexes = [shard_index(path, cache=cache) for path in self.shards]
        self._ends = np.cumsum([len(index.names) for index in self._indexes])
        if not len(self):
            raise DataError(
                f"no image in {_listed(self.shards)}; expected members such as 000001.jpg."
            )
        self._files: OrderedDict[int, int] = OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def name(self, index: int) -> str:
        """Shard and member, such as "train/shard-000003.tar/00012.jpg"."""
        shard, place = self._locate(index)
        return f"{self.shards[shard]}/{self._indexes[shard].names[place]}"

    def read(self, index: int) -> bytes:
        """The encoded image."""
        shard, place = self._locate(index)
        entry = self._indexes[shard]
        size, offset = int(entry.sizes[place]), int(entry.offsets[place])
        data = self._pread(shard, size, offset)
        if len(data) != size:
            raise DataError(
                f"{self.shards[shard]} ends in the middle of {entry.names[place]}: the shard was "
                f"cut short while in use; write or fetch it again."
            )
        return data

    def fingerprint(self) -> str:
        """Depends on the names and sizes of shards and members."""
        total = hashlib.sha256()
        for path, index in zip(self.shards, self._indexes, strict=True):
            total.update(f"{path.name}\0{len(index.names)}\0".encode("utf-8", "surrogateescape"))
            for array in (index.names.text, index.names.ends, index.sizes):
                total.update(array.tobytes())
        return total.hexdigest()[:32]

    def _locate(self, index: int) -> tuple[int, int]:
        index = range(len(self))[index]
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)

    def _pread(self, shard: int, size: int, offset: int) -> bytes:
        if not hasattr(os, "pread"):  # Windows
            with self.shards[shard].open("rb") as file:
                file.seek(offset)
                return file.read(size)
        handle = self._own_handle(shard)
        try:
            return os.pread(handle, size, offset)
        finally:
            os.close(handle)

    def _own_handle(self, shard: int) -> int:
        """A handle for the caller to close: another thread may close the kept one at any time."""
        with _files_lock:
            if self._process != os.getpid():  # a forked worker shares the files, not their closing
                self._files, self._process = OrderedDict(), os.getpid()
            if shard not in self._files:
                while len(self._files) >= _OPEN_FILES:
                    os.close(self._files.popitem(last=False)[1])
                self._files[shard] = os.open(self.shards[shard], os.O_RDONLY)
            self._files.move_to_end(shard)
            return os.dup(self._files[shard])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict(), "_process": -1}

    def __del__(self) -> None:
        if getattr(self, "_process", -1) == os.getpid():
            for handle in self._files.values():
                with contextlib.suppress(OSError):
                    os.close(handle)


def shard_index(path: Path, *, cache: Path | None = None) -> ShardIndex:
    """List one shard, or recall the list as long as the file has the same size and time."""
    try:
        check_regular(path)
        state = path.stat()
    except OSError as error:
        raise DataError(
            f"{path}: the shard cannot be read ({error.strerror}); check the path."
        ) from error
    head: list[Any] = [VERSION, str(path.absolute()), state.st_size, state.st_mtime_ns]
    if extensions() != EXTENSIONS:  # what counts as an image depends on the plugins there are
        head.append(sorted(extensions()))
    kept = (cache or cache_folder()) / "index" / f"{digest('shard', path.absolute())}.npz"
    index = _recall(kept, head)
    if index is None:
        index = _scan(path, state.st_size)
        save_arrays(
            kept,
            head=head,
            text=index.names.text,
            ends=index.names.ends,
            offsets=index.offsets,
            sizes=index.sizes,
        )
    return index


def _recall(kept: Path, head: list[Any]) -> ShardIndex | None:
    arrays = load_arrays(kept)
    try:
        if arrays is None or from_json(arrays["head"].tobytes()) != head:
            return None
        names = Names(arrays["text"], arrays["ends"])
        return ShardIndex(names, arrays["offsets"], arrays["sizes"])
    except (KeyError, ValueError, TypeError):
        return None


def _scan(path: Path, length: int) -> ShardIndex:
    members: list[tuple[str, int, int]] = []
    known = extensions()
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isreg() and _is_image(member.name, known):
                    members.append((member.name, member.offset_data, member.size))
                tar.members = []  # type: ignore[attr-defined]  # it keeps every header
            end = tar.offset
    except (tarfile.TarError, EOFError, OSError) as error:
        packed = _starts_compressed(path)
        reason = "it is compressed, and images are read from any place; unpack it first"
        if not packed:
            reason = f"it is cut short or damaged ({error}); write or fetch it again"
        raise DataError(f"{path}: not a readable tar shard: {reason}.") from error
    if length - end < _BLOCK:
        raise DataError(
            f"{path}: the tar shard ends without its end mark, so it is cut short; write or fetch "
            f"it again."
        )
    kept = _main_images(members)
    return ShardIndex(
        Names.of(name for name, _, _ in kept),
        np.array([offset for _, offset, _ in kept], np.int64),
        np.array([size for _, _, size in kept], np.int64),
    )


def _main_images(members: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Leave out `key.mask.png` where there is a `key.jpg`: it belongs to that sample."""
    plain = {name.rpartition(".")[0] for name, _, _ in members if _key(name)[1].count(".") == 0}
    return [
        member
        for member in members
        if _key(member[0])[1].count(".") == 0 or _key(member[0])[0] not in plain
    ]


def _key(name: str) -> tuple[str, str]:
    """A member's key and extension: everything before and after the first dot of its file name."""
    folder, _, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return (f"{folder}/{stem}" if folder else stem), extension


def _is_image(name: str, known: frozenset[str]) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in known and not path.name.startswith(".")


def _starts_compressed(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(6)
    except OSError:
        return False
    return start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))


def _listed(paths: Sequence[Path], most: int = 3) -> str:
    shown = ", ".join(map(str, paths[:most]))
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more shards"
