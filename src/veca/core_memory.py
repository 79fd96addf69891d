"""What the cores held ready for the patches in every layer: a complete memory of the picture.

Patches never attend to each other. Given the cores' keys and values of each layer, what comes out
for a patch depends on nothing but its own pixels and its place. So a picture's features can be had
again, region by region, from some megabytes and the region's pixels.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from veca._util import files, tensor_file
from veca.errors import CoreMemoryError, InputError, whole

_FORMAT, _VERSION = "veca_core_memory", "1"
_TENSORS = ("keys", "values", "cores", "core_xy")


@dataclass(frozen=True, eq=False)
class CoreMemory:
    """The cores' keys and values in every layer, and where the cores ended.

    Made by `Veca.remember` and `veca.large.features`; `Veca.read` reads regions from it. It is
    bound to the weights, the picture's grid and the budget it was made with.
    """

    keys: Tensor
    """[L, B, H, C, d] by layer, turned as the cores stood there."""
    values: Tensor
    """[L, B, H, C, d]"""
    cores: Tensor
    """[B, C, D'] the cores' features, as the pass over the whole picture gave them."""
    core_xy: Tensor
    """[B, C, 2] where each core ended, (x, y) in [-1, 1]."""
    grid: tuple[int, int]
    """(h, w): patches of the whole picture, down and across."""
    patch_size: int
    """Pixels a side of one patch."""
    weights: str
    """sha256 of the weights, as `veca.weights.weights_hash` has it."""

    @property
    def cls(self) -> Tensor:
        """[B, D'] the first core: the picture's global embedding."""
        return self.cores[:, 0]

    @property
    def budget(self) -> int:
        """How many cores it is of."""
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(getattr(self, name).nbytes for name in _TENSORS)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> CoreMemory:
        """The same on another device, or in another dtype; coordinates stay in float32."""
        moved = {name: getattr(self, name).to(device, dtype) for name in _TENSORS[:3]}
        return replace(self, **moved, core_xy=self.core_xy.to(device))

    def save(self, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> Path:
        """Write it as one safetensors file, replacing an older one in one step.

        Args:
            dtype: store in this dtype: `torch.float16` halves the file, and features that are
                read from it change in the third digit or later. None keeps its own.
        """
        target = files.place_for(path)
        tensor_file.check_dtype(dtype)
        memory = self.to("cpu", dtype)
        tensors = {name: getattr(memory, name).detach() for name in _TENSORS}
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise CoreMemoryError(
                f"cannot save the core memory to {target}: it has numbers that are NaN, infinite "
                f"or too large for {dtype}; save it with another dtype."
            )
        facts = {
            _FORMAT: _VERSION,
            "grid": ",".join(map(str, self.grid)),
            "patch_size": str(self.patch_size),
            "weights_sha256": self.weights,
        }
        tensor_file.write_file(tensors, target, facts)
        return target

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu"
    ) -> CoreMemory:
        """Read what `save` wrote; a damaged or another kind of file is a `CoreMemoryError`."""
        place = Path(path).expanduser()
        tensors, facts = tensor_file.read_file(place, CoreMemoryError)
        if facts.get(_FORMAT) != _VERSION or set(tensors) != set(_TENSORS):
            raise CoreMemoryError(
                f"{place} is no core memory of format {_VERSION}; CoreMemory.save writes one."
            )
        try:
            height, width = (int(side) for side in facts["grid"].split(","))
            patch_size, weights = int(facts["patch_size"]), facts["weights_sha256"]
        except (KeyError, ValueError) as error:
            raise CoreMemoryError(f"{place}: the header is damaged; write it again.") from error
        memory = cls(**tensors, grid=(height, width), patch_size=patch_size, weights=weights)
        if not memory._shapes_agree():
            raise CoreMemoryError(f"{place}: the tensors' shapes disagree; write it again.")
        return memory.to(device)

    def _shapes_agree(self) -> bool:
        keys, cores = self.keys.shape, self.cores.shape
        return (
            keys == self.values.shape
            and len(keys) == 5
            and len(cores) == 3
            and cores[:2] == (keys[1], keys[3])
            and self.core_xy.shape == (*cores[:2], 2)
            and min(*self.grid, self.patch_size) > 0
        )

    def fitted_to(self, model: Any, weights: str) -> CoreMemory:
        """On the device and in the dtype of a model, whose weights must be those it is of."""
        if weights != self.weights:
            raise CoreMemoryError(
                f"the core memory belongs to other weights (sha256 {self.weights[:12]}, this "
                f"model's {weights[:12]}); load those, in the same dtype, or remember anew."
            )
        return self.to(model.device, model.dtype)

    def corners(
        self, at: tuple[int, int] | Sequence[tuple[int, int]], shape: tuple[int, int], count: int
    ) -> list[tuple[int, int]]:
        """The first patch (row, column) of each region.

        Args:
            at: in pixels: one, or one for each region.
            shape: patches of a region, down and across.
            count: how many regions there are.
        """
        pictures = self.keys.shape[1]
        if pictures not in (1, count):
            raise InputError(
                f"the core memory is of {pictures} pictures, and there are {count} regions; give "
                f"one region for each."
            )
        several = isinstance(at, Sequence) and all(isinstance(x, Sequence) for x in at)
        places: list[Any] = list(at) if several else [at]
        if len(places) not in (1, count):
            raise InputError(f"at names {len(places)} places for {count} regions; give 1 or each.")
        return [self._corner(place, shape) for place in places]

    def _corner(self, place: Any, shape: tuple[int, int]) -> tuple[int, int]:
        size = self.patch_size
        sides = [whole(side) for side in place] if isinstance(place, Sequence) else []
        if len(sides) != 2 or any(side is None or side % size for side in sides):
            raise InputError(
                f"at must be (row, column) of the region's first pixel, multiples of the patch "
                f"size {size}, got {place!r}."
            )
        row, column = (int(side) // size for side in sides)  # type: ignore[arg-type]
        if (
            row < 0
            or column < 0
            or row + shape[0] > self.grid[0]
            or column + shape[1] > self.grid[1]
        ):
            height, width = (side * size for side in self.grid)
            raise InputError(
                f"the region of {shape[0] * size} x {shape[1] * size} pixels at {tuple(place)} "
                f"lies outside the picture of {height} x {width}."
            )
        return row, column

    def __repr__(self) -> str:
        layers, batch, _, budget, _ = self.keys.shape
        pictures = "" if batch == 1 else f"{batch} pictures, "
        return (
            f"CoreMemory({pictures}{layers} layers, {budget} cores, grid {self.grid[0]} x "
            f"{self.grid[1]}, {self.nbytes / 1e6:.2f} MB, {str(self.keys.dtype)[6:]})"
        )


_stamps: weakref.WeakKeyDictionary[nn.Module, tuple[object, str]]
_stamps = weakref.WeakKeyDictionary()


def weights_stamp(model: nn.Module) -> str:
    """sha256 of a model's weights, computed anew only where they have been touched."""
    state = model.state_dict()
    if any(tensor.is_inference() for tensor in state.values()):  # these tell nobody
        return tensor_file.content_hash(state)
    touched = [(x.data_ptr(), x._version, x.dtype, x.device) for x in state.values()]
    known = _stamps.get(model)
    if known is None or known[0] != touched:
        known = _stamps[model] = (touched, tensor_file.content_hash(state))
    return known[1]
