"""Axial 2D rotary embedding. Stateless: tables are functions of coordinates, never of a size.

A token at (x, y) in [-1, 1]^2 has its head channels rotated in adjacent pairs (2i, 2i + 1).
The first half of the pairs turns with x, the second half with y. Pair j of an axis turns by
2 pi * coordinate / period_j; the longest periods are infinite, so those pairs never turn and
carry content alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veca._util.tracing import transformed


class Rotation(NamedTuple):
    """Cosines and sines for some tokens, each [B or 1, T, d / 2], shared by all heads."""

    cos: Tensor
    sin: Tensor


def grid_coordinates(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """Centres of a height x width grid of patches as (x, y) in [-1, 1]: [height * width, 2]."""
    return region_coordinates((height, width), (0, 0), (height, width), device)


def region_coordinates(
    grid: tuple[int, int],
    at: tuple[int, int],
    shape: tuple[int, int],
    device: torch.device | None = None,
) -> Tensor:
    """Those of a region of `shape` (rows, columns) whose first patch is `at` (row, column)."""
    (height, width), (rows, columns) = grid, shape
    y = torch.arange(rows, device=device, dtype=torch.float32)
    x = torch.arange(columns, device=device, dtype=torch.float32)
    y = (y + at[0] + 0.5) / height * 2.0 - 1.0
    x = (x + at[1] + 0.5) / width * 2.0 - 1.0
    return torch.stack([x.repeat(rows), y.repeat_interleave(columns)], dim=-1)


def augment_coordinates(
    xy: Tensor, shift: float | None, jitter: float | None, rescale: float | None
) -> Tensor:
    """Move and stretch coordinates at random, one draw for all of them. Training only."""
    if shift is not None:
        xy = xy + xy.new_empty(2).uniform_(-shift, shift)
    if jitter is not None:
        limit = math.log(jitter)
        xy = xy * xy.new_empty(2).uniform_(-limit, limit).exp()
    if rescale is not None:
        limit = math.log(rescale)
        xy = xy * xy.new_empty(1).uniform_(-limit, limit).exp()
    return xy


def periods(
    head_width: int, base: float, zero_fraction: float, device: torch.device | None = None
) -> Tensor:
    """The d / 4 periods of one axis, float32; the last ones infinite.

    Made anew on each call, from the device's own arange: a buffer would be rounded by
    `model.to(torch.bfloat16)`, and a copy from the host would break CUDA graph capture.
    """
    count = head_width // 4
    still = round(zero_fraction * count)
    steps = torch.arange(count, device=device, dtype=torch.float32)
    finite = torch.pow(base, 2.0 * steps / (head_width // 2))
    return torch.where(steps < count - still, finite, math.inf)


def rotation(xy: Tensor, periods: Tensor) -> Rotation:
    """The rotation of tokens at coordinates `xy` [..., T, 2]; angles in float32 at least."""
    xy = _widened(xy)
    angles = (2.0 * math.pi) * xy.unsqueeze(-1) / periods.to(xy.dtype)  # [..., T, 2, d / 4]
    angles = angles.flatten(-2)
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, tables: Rotation) -> Tensor:
    """Rotate the channel pairs of `x` [B, H, T, d] in float32 at least; the dtype is kept."""
    cos, sin = (_widened(table).unsqueeze(1) for table in tables)
    real = torch.compiler.is_compiling() or x.device.type in ("mps", "meta")
    if real or transformed():
        # Compilers fuse real arithmetic and cannot see through complex numbers; torch.func cannot
        # see through `_Rotate`.
        even, odd = _widened(x).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)
    if not torch.is_grad_enabled():
        return _turn(x, torch.complex(cos, sin))
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """A pair is a complex number and its rotation one product.

    One pass over memory where the real form takes six: over thirty times faster on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(x, cos, sin)
        return _turn(x, torch.complex(cos, sin))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin = ctx.saved_tensors
        grad_x = grad_cos = grad_sin = None
        if ctx.needs_input_grad[0]:
            grad_x = _turn(grad, torch.complex(cos, -sin))
        if any(ctx.needs_input_grad[1:]):
            # The tables are shared by all heads, and by the batch where their first axis is 1.
            turned = (_as_complex(x).conj() * _as_complex(grad)).sum_to_size(cos.shape)
            grad_cos, grad_sin = turned.real, turned.imag
        return grad_x, grad_cos, grad_sin


def _turn(x: Tensor, turn: Tensor) -> Tensor:
    pairs = _as_complex(x)
    return torch.view_as_real(pairs * turn.to(pairs.dtype)).flatten(-2).to(x.dtype)


def _as_complex(x: Tensor) -> Tensor:
    pairs = _widened(x).unflatten(-1, (-1, 2))
    *outer, inner = pairs.stride()
    if inner != 1 or pairs.storage_offset() % 2 or any(stride % 2 for stride in outer):
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(pairs)


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
