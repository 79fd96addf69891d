"""Read once, keep as far as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V", bound=_Sized)


class Kept(Generic[_K, _V]):
    """A function whose values (tensors, or anything with `nbytes`) are kept up to `limit` bytes.

    What does not fit any more is read each time; nothing is thrown out, since training comes back
    to everything equally often.
    """

    def __init__(self, read: Callable[[_K], _V], limit: int) -> None:
        self._read = read
        self._limit = limit
        self._kept: dict[_K, _V] = {}
        self._bytes = 0

    def __call__(self, key: _K) -> _V:
        if key in self._kept:
            return self._kept[key]
        value = self._read(key)
        if self._bytes + value.nbytes <= self._limit:
            self._kept[key] = value
            self._bytes += value.nbytes
        return value


def room(device: torch.device, on_cpu: int) -> int:
    """Bytes to keep on a device: a quarter of what a GPU has free, or `on_cpu` elsewhere."""
    if device.type != "cuda":
        return on_cpu
    free, _ = torch.cuda.mem_get_info(device)
    return free // 4
