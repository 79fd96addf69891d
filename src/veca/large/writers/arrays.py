"""Features as arrays: in memory, as a `.npy` file, and as the first half of what is converted."""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path
from typing import IO, Any

import numpy as np

from veca._util import files
from veca.core_memory import CoreMemory
from veca.errors import OutputError
from veca.large.writers import Features, Layout


class ArrayWriter:
    """Keeps the features in memory: `array` [h, w, D']."""

    array: Features

    def __init__(self, dtype: Any = "float32") -> None:
        self.dtype = np.dtype(dtype)

    def begin(self, layout: Layout, resumed: bool) -> bool:
        self.array = np.zeros((*layout.grid, layout.width), self.dtype)
        return False

    def add(self, row: int, column: int, features: Features) -> None:
        height, width = features.shape[:2]
        self.array[row : row + height, column : column + width] = features

    def finish(self, memory: CoreMemory | None) -> None:
        pass

    def close(self) -> None:
        pass


class NumpyWriter:
    """A `.npy` file [h, w, D'], to be opened with `numpy.load(path, mmap_mode="r")`.

    It grows in a hidden file beside the target, which takes its place at the end. Rows are written
    where they belong, not through a memory map, whose pages would count as the process's memory.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: Any = "float32") -> None:
        self.path = files.place_for(path)
        self.dtype = np.dtype(dtype)
        self.part = self.path.with_name(f".{self.path.name}.part")
        self._file: IO[bytes] | None = None

    def begin(self, layout: Layout, resumed: bool) -> bool:
        self.layout, self._shape = layout, (*layout.grid, layout.width)
        nbytes = int(np.prod(self._shape)) * self.dtype.itemsize
        with files.output_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir():
                raise OutputError(f"cannot write {self.path}: it is a folder; name a file.")
            there = resumed and self._is_ours(self.part, nbytes)
            if not there:
                with self.part.open("wb") as file:
                    np.lib.format.write_array_header_1_0(file, self._header())
                    file.flush()
                    files.reserve(file, file.tell() + nbytes)
            self._file = open(self.part, "r+b", buffering=0)  # noqa: PTH123, SIM115
        self._start = self.part.stat().st_size - nbytes
        return there

    def _header(self) -> dict[str, Any]:
        descr = np.lib.format.dtype_to_descr(self.dtype)
        return {"descr": descr, "fortran_order": False, "shape": self._shape}

    def _is_ours(self, path: Path, nbytes: int) -> bool:
        try:
            with path.open("rb") as file:
                np.lib.format.read_magic(file)
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
                whole = path.stat().st_size == file.tell() + nbytes
        except (OSError, ValueError):
            return False
        return whole and shape == self._shape and dtype == self.dtype and not fortran

    def add(self, row: int, column: int, features: Features) -> None:
        assert self._file is not None
        pixels = np.ascontiguousarray(features, self.dtype)
        size = self._shape[2] * self.dtype.itemsize
        with files.output_errors(self.path):
            for number, line in enumerate(pixels, start=row):
                self._file.seek(self._start + (number * self._shape[1] + column) * size)
                files.write_all(self._file, memoryview(line).cast("B"))

    def finish(self, memory: CoreMemory | None) -> None:
        files.commit(self.part, self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ConvertedWriter(NumpyWriter):
    """Gathers features beside the target, of which `convert` makes the target at the end.

    For formats that a kill in the middle would ruin: until then nothing is where they will be.
    """

    @abstractmethod
    def convert(self, temporary: Path, memory: CoreMemory | None) -> None:
        """Write the target's content to a file, from `rows`."""

    def rows(self, start: int, stop: int) -> Features:
        """Features [stop - start, w, D'] that were gathered, of these rows of the grid."""
        assert self._file is not None
        each = int(np.prod(self._shape[1:]))
        found = np.empty((stop - start) * each, self.dtype)
        self._file.seek(self._start + start * each * self.dtype.itemsize)
        view = found.data.cast("B")
        while view:
            count = self._file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise OutputError(f"{self.part} has been cut short; run the pass again.")
            view = view[count:]
        return found.reshape(stop - start, *self._shape[1:])

    def finish(self, memory: CoreMemory | None) -> None:
        with files.temporary_beside(self.path) as temporary, files.output_errors(self.path):
            self.convert(temporary, memory)
            files.commit(temporary, self.path)
        self.close()
        self.part.unlink(missing_ok=True)
