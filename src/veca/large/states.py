"""Where the patches' states wait from one layer to the next.

Each store may forget: what it does not have (any more, or whole) is computed again from the
pixels. So a damaged or lost file costs time, never the result.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from veca._util.files import output_errors, reserve, write_all
from veca.large.plan import SAVED_EVERY, SLOT_HEADER


class States(Protocol):
    """The state of a tile [1, n, D] after a layer, by the tile's number and the layer's."""

    def get(self, tile: int, layer: int) -> Tensor | None:
        """None: not known."""
        ...

    def put(self, tile: int, layer: int, state: Tensor) -> None:
        """The tile's older state is not needed any more."""
        ...

    def close(self) -> None: ...


class NoStates:
    """Everything is computed again."""

    def get(self, tile: int, layer: int) -> Tensor | None:
        return None

    def put(self, tile: int, layer: int, state: Tensor) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryStates:
    """All in memory, on the device where they were computed."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[int, Tensor]] = {}

    def get(self, tile: int, layer: int) -> Tensor | None:
        at, state = self._states.get(tile, (-1, None))
        return state if at == layer else None

    def put(self, tile: int, layer: int, state: Tensor) -> None:
        self._states[tile] = (layer, state)

    def close(self) -> None:
        self._states.clear()


class DiskStates:
    """One file of slots, some more than tiles.

    A state overwrites none that a stopped pass would begin with: tile t after layer l goes where
    tile t - `SAVED_EVERY` was before it, and by then it is written down that this one is done.
    Each slot says whose it is, with a checksum. Any thread may call `get`.
    """

    def __init__(
        self,
        path: Path,
        tiles: int,
        most: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            tiles: how many there are, of at most `most` patches of `width` numbers each.
        """
        self._width, self._dtype, self._device = width, dtype, device
        self._slots, self._most = tiles + SAVED_EVERY, most
        self._size = SLOT_HEADER + most * width * dtype.itemsize
        self._path, self._lock = path, threading.Lock()
        with output_errors(path):
            self._file = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: PTH123, SIM115
            try:
                reserve(self._file, self._slots * self._size)
            except BaseException:
                self.close()
                path.unlink(missing_ok=True)
                raise

    def _place(self, tile: int, layer: int) -> int:
        return (tile - SAVED_EVERY * layer) % self._slots * self._size

    def get(self, tile: int, layer: int) -> Tensor | None:
        place = self._place(tile, layer)
        header = torch.frombuffer(self._read(SLOT_HEADER, place), dtype=torch.int64).tolist()
        at, after, rows, checksum = header
        if (at, after) != (tile, layer) or not 0 < rows <= self._most:
            return None
        nbytes = rows * self._width * self._dtype.itemsize
        data = self._read(nbytes, place + SLOT_HEADER)
        state = torch.frombuffer(data, dtype=self._dtype)
        if _checksum(state) != checksum:
            return None
        return state.view(1, rows, self._width).to(self._device)

    def put(self, tile: int, layer: int, state: Tensor) -> None:
        numbers = state.detach().cpu().contiguous()
        header = torch.tensor([tile, layer, numbers.shape[1], _checksum(numbers)])
        place = self._place(tile, layer)
        with output_errors(self._path):
            # The header last: half a state is none.
            self._write(_bytes(numbers), place + SLOT_HEADER)
            self._write(_bytes(header), place)

    def _read(self, count: int, place: int) -> bytearray:
        data = bytearray(count)
        with self._lock:
            self._file.seek(place)
            self._file.readinto(data)
        return data

    def _write(self, data: memoryview, place: int) -> None:
        with self._lock:
            self._file.seek(place)
            write_all(self._file, data)

    def close(self) -> None:
        self._file.close()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _checksum(numbers: Tensor) -> int:
    """That every bit goes into, at the speed of memory; a width is a multiple of four numbers."""
    return int(numbers.reshape(-1).view(torch.int64).sum())
