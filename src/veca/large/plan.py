"""How a pass over a large picture will go: tiles, where states wait, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from veca._util.memory import forward_bytes
from veca._util.numbers import count, gigabytes, parse_bytes
from veca._util.threads import batches_at_once
from veca.checks import check_budget
from veca.errors import LargeError, at_least, check_choice
from veca.model import Veca

SPILLS = ("auto", "memory", "disk", "recompute")
"""Where the patches' states wait from one layer to the next."""
_SIDES = {"cpu": 32, "cuda": 128}
"""Patches a side of a tile where memory allows: what stays in a CPU's cache, or fills a GPU."""
_LEAST_SIDE = 4
SAVED_EVERY = 16
"""Tiles after which it is written down how far a pass is; so many are done again at most."""
SLOT_HEADER = 32
"""Bytes before a tile's state on disk, which say whose it is."""

Mask = np.ndarray[Any, np.dtype[np.bool_]]


class PatchTile(NamedTuple):
    """A rectangle of the patch grid that is computed at once."""

    row: int
    column: int
    height: int
    width: int
    kept: Tensor | None
    """Which of its patches are there, by their numbers within the tile; None: all."""

    @property
    def patches(self) -> int:
        """How many patches are there."""
        return self.height * self.width if self.kept is None else len(self.kept)


@dataclass(frozen=True)
class Estimate:
    """What a pass will take. Printed, it is one line."""

    grid: tuple[int, int]
    """Patches down and across."""
    patches: int
    """Those that are computed; masked ones are not."""
    tiles: int
    side: int
    """Patches a side of a tile."""
    layers: int
    spill: str
    memory_bytes: int
    """Beside the weights, the picture and the features."""
    disk_bytes: int
    feature_bytes: int
    """As the network gives them."""
    work: float
    """The patches' arithmetic, as a multiple of the plain forward's."""

    def __str__(self) -> str:
        waiting = {
            "none": "each goes through all layers at once",
            "memory": "states in memory",
            "disk": f"states on disk ({gigabytes(self.disk_bytes)})",
            "recompute": "states recomputed from the pixels",
        }[self.spill]
        return (
            f"{count(self.patches, 'patch', 'patches')} in {count(self.tiles, 'tile')} of "
            f"{self.side} x {self.side}, {self.layers} layers; {waiting}; "
            f"{gigabytes(self.memory_bytes)} of memory; {self.work:.1f} times the work of a plain "
            f"forward; features {gigabytes(self.feature_bytes)}"
        )


def plan(
    model: Veca,
    grid: tuple[int, int],
    *,
    cores: int | None = None,
    mask: Mask | None = None,
    memory: int | str = "2GB",
    spill: str = "auto",
    has_disk: bool = False,
    side: int | None = None,
    ranks: int = 1,
    halo: int | None = None,
) -> Estimate:
    """The plan for a picture of `grid` patches.

    Args:
        has_disk: whether there is a folder for states, so that "auto" may use it.
        side: patches a side of a tile; None: what suits the device and the memory.
        ranks: processes that share the work; memory and disk are those of one.
        halo: where tiles go through all layers at once: patches that each sees beyond itself.
    """
    c = model.config
    check_choice("spill", spill, SPILLS)
    limit = parse_bytes(memory)
    budget = check_budget(cores, c.num_cores)
    patches = grid[0] * grid[1] if mask is None else int(mask.sum())
    at_once = batches_at_once(model.device) if model.device.type == "cpu" else 1
    number = torch.empty((), dtype=model.dtype).element_size()
    state_bytes = 0 if halo is not None else -(-patches // ranks) * c.width * number
    # The memory of the layers so far, which grows to the whole of it.
    kept = 2 * c.depth * budget * c.width * number

    def need(side: int) -> int:
        side += 2 * (halo or 0)
        scores = 2 * 4 * c.heads * budget * side * side  # of the cores, float32
        one = forward_bytes(c, side * c.patch_size, side * c.patch_size) + scores
        return at_once * one + kept

    least = _LEAST_SIDE if side is None else at_least("tile side", side)
    wish = side or _SIDES.get(model.device.type, _SIDES["cpu"])
    inside = spill == "memory" or (spill == "auto" and state_bytes + need(wish) <= limit)
    room = limit - (state_bytes if inside else 0)
    while wish > least and need(wish) > room:
        wish = max(least, wish // 2)
    if need(wish) > room:
        states = f" with all states ({gigabytes(state_bytes)})" if inside else ""
        advice = "; or choose spill='disk' or 'recompute'" if inside else ""
        raise LargeError(
            f"memory={memory!r} is too little: one tile{states} needs "
            f"{gigabytes(limit - room + need(wish))}; allow that much{advice}."
        )
    if halo is not None:
        spill = "none"
    elif spill == "auto":
        spill = "memory" if inside else "disk" if has_disk else "recompute"
    tiles = sum(1 for _ in cut(grid, wish, mask))
    slots = (-(-tiles // ranks) + SAVED_EVERY) * (wish * wish * c.width * number + SLOT_HEADER)
    return Estimate(
        grid=grid,
        patches=patches,
        tiles=tiles,
        side=wish,
        layers=c.depth,
        spill=spill,
        memory_bytes=need(wish) + (state_bytes if spill == "memory" else 0),
        disk_bytes=slots if spill == "disk" else 0,
        feature_bytes=grid[0] * grid[1] * c.feature_width * number,
        work=_work(model) if spill == "recompute" else ((wish + 2 * (halo or 0)) / wish) ** 2,
    )


def _work(model: Veca) -> float:
    """Recomputing, layer l runs the l - 1 before it again, without the patches' keys and values."""
    c = model.config
    full = 4 * c.width + 3 * c.hidden_width
    again = (full - 2 * c.width) / full
    return 1 + again * (c.depth - 1) / 2


def cut(grid: tuple[int, int], side: int, mask: Mask | None = None) -> Iterator[PatchTile]:
    """The tiles of a grid, row by row, but those that are masked whole."""
    for row in range(0, grid[0], side):
        for column in range(0, grid[1], side):
            height, width = min(side, grid[0] - row), min(side, grid[1] - column)
            kept = None
            if mask is not None:
                part = mask[row : row + height, column : column + width]
                if not part.any():
                    continue
                if not part.all():
                    kept = torch.from_numpy(np.flatnonzero(part))
            yield PatchTile(row, column, height, width, kept)


def checked_mask(mask: object, grid: tuple[int, int]) -> Mask | None:
    """The mask as booleans [h, w]: True where a patch is there. None: all are."""
    if mask is None:
        return None
    array = mask.cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask)
    if array.dtype != np.bool_ or array.shape != grid:
        raise LargeError(
            f"mask must be booleans [{grid[0]}, {grid[1]}], one for each patch, got "
            f"{array.dtype} {list(array.shape)}."
        )
    if not array.any():
        raise LargeError("the mask leaves no patch; at least one must be True.")
    return np.ascontiguousarray(array)
