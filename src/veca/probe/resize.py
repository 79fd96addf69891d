"""Bilinear enlargement as two matrix products.

The numbers are those of `torch.nn.functional.interpolate(..., mode="bilinear",
align_corners=False)`, to rounding. As matrix products they are deterministic on a GPU, backward
too, which torch's own kernel is not, and no slower.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_STRIP_NUMBERS = 2**26  # of a strip of logits: 256 MiB in float32


def bilinear(x: Tensor, size: tuple[int, int]) -> Tensor:
    """[..., h, w] -> [..., height, width]."""
    height, width = size
    if x.shape[-2:] == (height, width):
        return x
    rows = _matrix(x.shape[-2], height, x.device, x.dtype)
    columns = _matrix(x.shape[-1], width, x.device, x.dtype)
    # Along the width first, while there are still few rows.
    return rows @ (x @ columns.T)


def argmax_at(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """The largest of logits [K, h, w], brought to `size`: int64 [height, width].

    Strip by strip: 150 classes on a photo of 12 megapixels would take 7 GiB at once.
    """
    classes = logits.shape[0]
    height, width = size
    rows = _matrix(logits.shape[1], height, logits.device, logits.dtype)
    columns = _matrix(logits.shape[2], width, logits.device, logits.dtype)
    step = max(1, _STRIP_NUMBERS // max(1, classes * width))
    strips = [
        # `max` finds the same place as `argmax` (the first), nine times as fast on a CPU.
        (rows[top : top + step] @ logits @ columns.T).max(dim=0).indices
        for top in range(0, height, step)
    ]
    return torch.cat(strips)


@lru_cache(maxsize=256)
def _matrix(length: int, target: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[target, length]: how much each old sample counts in each new one."""
    centre = (torch.arange(target, dtype=torch.float64) + 0.5) * (length / target) - 0.5
    centre = centre.clamp(min=0)
    low = centre.floor().long().clamp(max=length - 1)
    high = (low + 1).clamp(max=length - 1)
    share = centre - low
    matrix = torch.zeros(target, length, dtype=torch.float64)
    place = torch.arange(target)
    matrix[place, low] += 1 - share
    matrix[place, high] += share
    return matrix.to(device, dtype)
