"""A backbone that sees nothing: the floor under a table.

Its features say where a patch is, and no more. So its depth is about the mean depth at each place,
its segmentation the commonest class there, its classification a guess. A dataset on which networks
are hardly better says little about them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veca.probe.backbone import BASELINE, Backbone, Compute, Features, Grid, own_grid

NAME = "blind"
PLACES = 16
"""Places along each side; what lies between two of them has a part of both."""


class BlindBackbone(Backbone):
    """Features of the place alone: `PLACES`² for each patch, and a constant for the image."""

    def __init__(
        self, *, name: str = NAME, role: str = BASELINE, device: torch.device | str = "cpu"
    ) -> None:
        self.name, self.role, self.device = name, role, torch.device(device)

    def grid_for(self, size: Grid, cell: int) -> Grid:
        return own_grid(size, cell, cell)

    def features(self, pixels: Tensor, grid: Grid) -> Features:
        down, across = (_shares(count, self.device) for count in grid)
        places = torch.einsum("hi,wj->hwij", down, across).flatten(2).flatten(0, 1)
        images = len(pixels)
        return Features(
            torch.ones(images, 1, device=self.device), places.expand(images, -1, -1), grid
        )

    def identity(self) -> dict[str, Any]:
        return {"kind": NAME, "places": PLACES}

    def describe(self) -> dict[str, Any]:
        return self.identity()

    def compute(self, size: Grid, cell: int) -> Compute:
        return Compute(None, None)


def _shares(count: int, device: torch.device) -> Tensor:
    """[count, PLACES]: how much of each place the cells of a side have, 1 in all."""
    eye = torch.eye(PLACES, device=device)
    return F.interpolate(eye[None], count, mode="linear", align_corners=False)[0].T
