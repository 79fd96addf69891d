"""Where features go, a tile at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np

from veca._util import files
from veca.errors import OutputError

Features = np.ndarray[Any, Any]


@runtime_checkable
class TileWriter(Protocol):
    """Takes the features of a grid of patches, tile by tile, each once or again after a stop."""

    def begin(self, grid: tuple[int, int], width: int, resumed: bool) -> bool:
        """Before the first tile.

        Args:
            resumed: an earlier pass was stopped; tiles that it added are not added again if they
                are still there, which the answer says.
        """
        ...

    def add(self, row: int, column: int, features: Features) -> None:
        """The features [h, w, D'] of a tile whose first patch is there; 0 where masked."""
        ...

    def finish(self) -> None:
        """All tiles are there; those that never came are masked."""
        ...

    def close(self) -> None:
        """After `finish`, or a failure."""
        ...


class ArrayWriter:
    """Keeps the features in memory: `array` [h, w, D']."""

    array: Features

    def __init__(self, dtype: Any = "float32") -> None:
        self.dtype = np.dtype(dtype)

    def begin(self, grid: tuple[int, int], width: int, resumed: bool) -> bool:
        self.array = np.zeros((*grid, width), self.dtype)
        return False

    def add(self, row: int, column: int, features: Features) -> None:
        height, width = features.shape[:2]
        self.array[row : row + height, column : column + width] = features

    def finish(self) -> None:
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

    def begin(self, grid: tuple[int, int], width: int, resumed: bool) -> bool:
        self._shape = (*grid, width)
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

    def finish(self) -> None:
        files.commit(self.part, self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def as_writer(out: TileWriter | str | os.PathLike[str] | None) -> TileWriter:
    """A writer, from one, the path of a `.npy` file, or None: in memory."""
    if out is None:
        return ArrayWriter()
    if isinstance(out, (str, os.PathLike)):
        path = Path(out)
        if path.suffix != ".npy":
            raise OutputError(f"cannot write {path}: features of a large picture are a .npy file.")
        return NumpyWriter(path)
    if isinstance(out, TileWriter):
        return out
    raise OutputError(f"out must be a path, a writer or None, got {type(out).__name__}.")
