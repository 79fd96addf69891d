"""Features on the disk, in parts: each part appears whole or not at all, and is checked when read.

An entry is a folder named by a hash of all that its numbers depend on: the weights, the data, the
view, the budget. It holds `entry.json`, which says so in words, and one safetensors file for every
so many images. A run that is stopped goes on where it stopped; a part that is damaged (cut short,
changed, of another entry) is found by its checksum and computed again.

Global features are kept as float32. Dense ones are kept as the protocol says, by default float16:
half the size, rounded to 11 significant bits (a relative error of at most 0.05 %).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from veca._util.cache import cache_folder
from veca._util.files import atomic_write, atomic_write_json, remove_leftovers
from veca.embed.writers import BackgroundWrites, Result
from veca.errors import ProbeError

# Raise it when features computed by this code change, so that no old entry is taken for a new one.
VERSION = 1
_OPEN_PARTS = 64  # files that a reader keeps open at a time

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


def default_folder() -> Path:
    """Where features are kept unless told otherwise: `probe` in $VECA_CACHE or ~/.cache/veca."""
    return cache_folder("probe")


class Entry:
    """The features of one backbone, view and list of images."""

    def __init__(self, root: Path, key: Mapping[str, Any], count: int, part_size: int) -> None:
        facts = {"version": VERSION, "count": count, "part_size": part_size, **key}
        text = json.dumps(facts, sort_keys=True)
        self.key = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.facts = facts
        self.folder = root / self.key
        self.count = count
        self.part_size = part_size
        self.damaged: list[str] = []
        """What was wrong with parts that had to be computed again."""
        self._files: OrderedDict[int, Any] = OrderedDict()
        remove_leftovers(self.folder.glob(".*.tmp"))

    @property
    def parts(self) -> range:
        return range(-(-self.count // self.part_size))

    def members(self, part: int) -> range:
        """The places of the images in a part."""
        return range(part * self.part_size, min(self.count, (part + 1) * self.part_size))

    def path(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}.safetensors"

    def write(self, part: int, arrays: Arrays) -> None:
        """Keep a part; it is on the disk, whole, when this returns."""
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        metadata = {"entry": self.key, "part": str(part), "crc32": str(_checksum(arrays))}
        if not (self.folder / "entry.json").exists():
            atomic_write_json(self.folder / "entry.json", self.facts)
        with atomic_write(self.path(part)) as file:
            file.write(save(arrays, metadata))
        self._files.pop(part, None)

    def missing(self) -> list[int]:
        """The parts that are not there or not sound; reads everything that is there once."""
        return [part for part in self.parts if not self._is_sound(part)]

    def _is_sound(self, part: int) -> bool:
        path = self.path(part)
        if not path.exists():
            return False
        fault = self._fault(part, path)
        if fault:
            self.damaged.append(f"{path}: {fault}")
        return not fault

    def _fault(self, part: int, path: Path) -> str:
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            return f"cannot be read ({error})"
        if metadata.get("entry") != self.key or metadata.get("part") != str(part):
            return "belongs to another entry"
        if metadata.get("crc32") != str(_checksum(arrays)):
            return "its checksum is wrong"
        return ""

    def read(self, part: int, name: str) -> Array:
        """One array of a part."""
        with self._reading(part):
            return np.asarray(self._open(part).get_tensor(name))

    def read_rows(self, part: int, name: str, start: int, stop: int) -> Array:
        """Some rows of an array, without the others; the file stays mapped."""
        with self._reading(part):
            return np.asarray(self._open(part).get_slice(name)[start:stop])

    def _open(self, part: int) -> Any:
        if part not in self._files:
            self._files[part] = safe_open(self.path(part), framework="numpy")
            if len(self._files) > _OPEN_PARTS:
                self._files.popitem(last=False)
        self._files.move_to_end(part)
        return self._files[part]

    @contextlib.contextmanager
    def _reading(self, part: int) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise ProbeError(
                f"{self.path(part)}: cached features cannot be read ({error}); run again, and the "
                "part is computed anew."
            ) from error


class CacheWriter:
    """Fills what an entry lacks: a part is written when all its images have come.

    `join` makes the arrays of a part out of those of its images.
    """

    def __init__(
        self, entry: Entry, join: Callable[[list[Arrays]], Arrays], writes: BackgroundWrites
    ) -> None:
        self._entry, self._join, self._writes = entry, join, writes
        self.missing = set(entry.missing())
        self._come: dict[int, Arrays] = {}

    def has(self, place: int) -> bool:
        return place // self._entry.part_size not in self.missing

    def add(self, results: Sequence[Result[int]]) -> None:
        for result in results:
            self._come[result.item] = result.arrays
            part = result.item // self._entry.part_size
            members = self._entry.members(part)
            if all(member in self._come for member in members):
                samples = [self._come.pop(member) for member in members]
                self._writes.submit(self._write, part, samples)
                self.missing.remove(part)

    def finish(self) -> None:
        self._writes.finish()

    def close(self) -> None:
        self._writes.close()

    def _write(self, part: int, samples: list[Arrays]) -> None:
        self._entry.write(part, self._join(samples))


def _checksum(arrays: Mapping[str, Array]) -> int:
    total = 0
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), total)
        total = zlib.crc32(array.reshape(-1).view(np.uint8).data, total)
    return total


def digest(words: Sequence[str]) -> str:
    """A short name for a list of names, in order."""
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=_Sized)


class MemoryCache(Generic[Key, Value]):
    """A function whose values (tensors, or anything with `nbytes`) are kept up to `limit` bytes.

    What does not fit any more is read each time; nothing is thrown out, since training comes back
    to everything equally often.
    """

    def __init__(self, read: Callable[[Key], Value], limit: int) -> None:
        self._read = read
        self._limit = limit
        self._kept: dict[Key, Value] = {}
        self._bytes = 0

    def __call__(self, key: Key) -> Value:
        if key in self._kept:
            return self._kept[key]
        value = self._read(key)
        if self._bytes + value.nbytes <= self._limit:
            self._kept[key] = value
            self._bytes += value.nbytes
        return value


def memory_to_use(device: torch.device, on_cpu: int) -> int:
    """Bytes to keep on a device: a quarter of what a GPU has free, or `on_cpu` elsewhere."""
    if device.type != "cuda":
        return on_cpu
    free, _ = torch.cuda.mem_get_info(device)
    return free // 4
