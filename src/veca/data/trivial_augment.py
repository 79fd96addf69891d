"""TrivialAugmentWide (Müller and Hutter, 2021) on batches of 8-bit images.

One operation per image, drawn uniformly from 14; its strength drawn uniformly from 31 bins; where
it has a direction, that is drawn too. The ranges are the published wide ones. Each operation gives
Pillow's result to the bit: nearest-neighbour sampling in 16.16 fixed point with black outside,
`ImageEnhance` and `ImageOps` with their rounding.

The images are handled in four groups (moved, mapped through a table, desaturated, sharpened), so
the work does not grow with the number of images in Python.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca.data.draws import Keys, choice, uniform
from veca.data.resample import Size, copy_to_device

OPS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color",
    "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
BINS = 31

_MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
_TABLES = ("Brightness", "Contrast", "Posterize", "Solarize", "AutoContrast", "Equalize")
_SIGNED = {*_MOVES, "Brightness", "Color", "Contrast", "Sharpness"}
_FIXED = 65536.0  # Pillow walks affine maps in 16.16 fixed point


class DrawnOperations(NamedTuple):
    """What happens to each image."""

    ops: NDArray[np.int64]
    """[B], places in `OPS`."""
    values: NDArray[np.float64]
    """[B]: shear (tangent), pixels of the student's view, degrees, factor - 1, bits kept, or
    threshold; 0 for operations without a strength."""


def draw_operations(keys: Keys, streams: tuple[int, int, int]) -> DrawnOperations:
    """Operation, bin and direction of each sample, from three streams of its key."""
    ops = choice(keys, streams[0], len(OPS))
    values = _STRENGTHS[ops, choice(keys, streams[1], BINS)]
    negative = (uniform(keys, streams[2]) < 0.5) & np.isin(ops, _places(*_SIGNED))
    return DrawnOperations(ops, np.where(negative, -values, values))


def _strengths() -> NDArray[np.float64]:
    """Strength by operation and bin, before the sign."""
    table = np.zeros((len(OPS), BINS))
    for op, top in (
        ("ShearX", 0.99), ("ShearY", 0.99), ("Rotate", 135.0), ("Brightness", 0.99),
        ("Color", 0.99), ("Contrast", 0.99), ("Sharpness", 0.99),
    ):  # fmt: skip
        table[OPS.index(op)] = np.linspace(0, top, BINS)
    table[_places("TranslateX", "TranslateY")] = np.trunc(np.linspace(0, 32, BINS))
    table[OPS.index("Posterize")] = 8 - np.round(np.arange(BINS) / ((BINS - 1) / 6))
    table[OPS.index("Solarize")] = np.linspace(255, 0, BINS)
    return table


def _places(*names: str) -> list[int]:
    return [OPS.index(name) for name in names]


_STRENGTHS = _strengths()


def apply_operations(
    student: Tensor, drawn: DrawnOperations, teacher: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The augmented views, uint8: (student,) or (student, teacher).

    Args:
        student: uint8 [B, 3, h, w].
        teacher: the same images at another size, uint8 [B, 3, H, W]. Moves are scaled to it, and
            whatever depends on the image's own colours (mean, range, histogram) is measured on the
            student's view, so both see one mapping. Sharpness works on each view's own pixels.
    """
    views = (student,) if teacher is None else (student, teacher)
    outs = tuple(view.clone() for view in views)
    groups = [
        np.flatnonzero(np.isin(drawn.ops, _places(*names)))
        for names in (_MOVES, _TABLES, ("Color",), ("Sharpness",))
    ]
    rows = copy_to_device(np.concatenate(groups), student.device)
    begin = 0
    for kind, group in enumerate(groups):
        chosen = rows[begin : begin + len(group)]
        begin += len(group)
        if not len(group):
            continue
        picked = [view.index_select(0, chosen) for view in views]
        ops, values = drawn.ops[group], drawn.values[group]
        if kind == 0:
            size = (student.shape[2], student.shape[3])
            done = [_move(view, ops, values, size) for view in picked]
        elif kind == 1:
            tables = _tables(picked[0], ops, values)
            done = [_look_up(view, tables) for view in picked]
        else:
            dull = _grey if kind == 2 else _smooth
            factor = _factors(values, student.device)[..., None, None]
            done = [_blend(dull(view), view, factor) for view in picked]
        for out, new in zip(outs, done, strict=True):
            out.index_copy_(0, chosen, new)
    return outs


# ------------------------------------------------------------------------------------------ moves


def _move(images: Tensor, ops: NDArray, values: NDArray, reference: Size) -> Tensor:
    """Shear from the top left corner, shift, or turn about the centre; strengths in `reference`."""
    height, width = images.shape[2:]
    fixed = copy_to_device(_matrices(ops, values, reference, (height, width)), images.device)
    along = torch.arange(width, device=images.device, dtype=torch.int32)
    down = torch.arange(height, device=images.device, dtype=torch.int32)[:, None]
    a, b, c, d, e, f = (fixed[:, i, None, None] for i in range(6))
    x = (a * along + b * down + c) >> 16
    y = (d * along + e * down + f) >> 16
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    places = (y * width + x).masked_fill_(~inside, 0).long().flatten(1)[:, None, :]
    moved = images.flatten(2).gather(2, places.expand(-1, images.shape[1], -1))
    return moved.view_as(images) * inside[:, None]


def _matrices(
    ops: NDArray, values: NDArray, reference: Size, size: Size
) -> NDArray[np.signedinteger]:
    """Fixed-point maps int32 [n, 6] from pixels of the result to pixels of the image."""
    down, across = size[0] / reference[0], size[1] / reference[1]
    stretch = down / across  # a view of another aspect: the same move in the image's own frame
    maps = np.zeros((len(ops), 6))
    maps[:, 0] = maps[:, 4] = 1
    for name, entry, unit in (
        ("ShearX", 1, 1 / stretch),
        ("ShearY", 3, stretch),
        ("TranslateX", 2, across),
        ("TranslateY", 5, down),
    ):
        chosen = ops == OPS.index(name)
        maps[chosen, entry] = values[chosen] * unit
    chosen = ops == OPS.index("Rotate")
    angle = np.radians(values[chosen])
    cos, sin = np.cos(angle).round(15), np.sin(angle).round(15)
    x, y = size[1] / 2, size[0] / 2
    b, d = -sin / stretch, sin * stretch
    maps[chosen] = np.stack([cos, b, x - cos * x - b * y, d, cos, y - d * x - cos * y], axis=1)
    # Pixel centres lie half a pixel in.
    maps[:, 2] += 0.5 * (maps[:, 0] + maps[:, 1])
    maps[:, 5] += 0.5 * (maps[:, 3] + maps[:, 4])
    return np.floor(maps * _FIXED + 0.5).astype(np.int32)


# ----------------------------------------------------------------------------------------- tables


def _look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Replace each level by its entry in tables [n, 3, 256]."""
    return tables.gather(2, images.flatten(2).long()).view_as(images)


def _tables(images: Tensor, ops: NDArray, values: NDArray) -> Tensor:
    """One table per image and channel, uint8 [n, 3, 256]."""
    device = images.device
    tables = torch.empty((len(ops), 3, 256), dtype=torch.uint8, device=device)
    ramp = torch.arange(256, device=device)
    for name in _TABLES:
        group = np.flatnonzero(ops == OPS.index(name))
        if not len(group):
            continue
        rows = copy_to_device(group, device)
        if name == "Brightness":
            table = _blend(torch.zeros_like(ramp), ramp, _factors(values[group], device))[:, None]
        elif name == "Contrast":
            mean = _grey_mean(images.index_select(0, rows))
            table = _blend(mean, ramp, _factors(values[group], device))[:, None]
        elif name == "Posterize":
            mask = copy_to_device(256 - 2 ** (8 - values[group].astype(np.int64)), device)[:, None]
            table = (ramp & mask)[:, None]
        elif name == "Solarize":
            threshold = copy_to_device(values[group].astype(np.float32), device)[:, None]
            table = torch.where(ramp < threshold, ramp, 255 - ramp)[:, None]
        elif name == "AutoContrast":
            table = _stretch(images.index_select(0, rows), ramp)
        else:
            table = _equalise(images.index_select(0, rows), ramp)
        tables.index_copy_(0, rows, table.to(torch.uint8).expand(-1, 3, -1))
    return tables


def _stretch(images: Tensor, ramp: Tensor) -> Tensor:
    """Each channel's darkest level to 0, its brightest to 255."""
    exact = torch.float32 if images.device.type == "mps" else torch.float64
    flat = images.flatten(2)
    low, high = (level[..., None].to(exact) for level in (flat.amin(2), flat.amax(2)))
    scale = 255.0 / (high - low).clamp(min=1)
    table = (ramp * scale - low * scale).clamp(0, 255).trunc()
    return torch.where(high > low, table, ramp.to(exact))


def _equalise(images: Tensor, ramp: Tensor) -> Tensor:
    """Each channel's levels spread by its histogram."""
    count, channels = images.shape[:2]
    lines = torch.arange(count * channels, device=images.device)[:, None] * 256
    places = (images.reshape(count * channels, -1).long() + lines).flatten()
    histogram = torch.zeros(count * channels * 256, dtype=torch.int32, device=images.device)
    histogram.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
    histogram = histogram.view(count, channels, 256).long()
    brightest = images.flatten(2).amax(2).long()[..., None]
    step = (histogram.sum(-1, keepdim=True) - histogram.gather(2, brightest)) // 255
    before = histogram.cumsum(-1) - histogram
    table = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table, ramp)


# ----------------------------------------------------------------------------------------- blends


def _blend(dull: Tensor, image: Tensor, factor: Tensor) -> Tensor:
    """From `dull` towards `image` and beyond, cut off (not rounded) to whole levels."""
    dull, image = dull.float(), image.float()
    return (dull + factor * (image - dull)).clamp_(0, 255).to(torch.uint8)


def _factors(values: NDArray, device: torch.device) -> Tensor:
    """[n, 1]; added in double precision, then rounded, as a call of Pillow from Python does."""
    return copy_to_device((1 + values).astype(np.float32), device)[:, None]


def _grey(images: Tensor) -> Tensor:
    """Luma uint8 [n, 1, h, w] by Pillow's integer weights."""
    red, green, blue = images.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16)[:, None].to(torch.uint8)


def _grey_mean(images: Tensor) -> Tensor:
    """The mean luma rounded to a level, [n, 1]."""
    grey = _grey(images).flatten(1)
    total, count = grey.sum(1, keepdim=True, dtype=torch.int64), grey.shape[1]
    return (2 * total + count) // (2 * count)


def _smooth(images: Tensor) -> Tensor:
    """The 3 x 3 mean with a centre of weight 5 out of 13; the outermost pixels stay."""
    out = images.clone()
    wide = images.int()
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * wide[:, :, 1:-1, 1:-1]
    out[:, :, 1:-1, 1:-1] = ((2 * total + 13) // 26).to(torch.uint8)
    return out
