"""Colours: heat for one value, a hue for each core."""

from __future__ import annotations

import colorsys
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

RGB: TypeAlias = "tuple[int, int, int]"

# Dark violet to yellow, growing in lightness, so that it reads in grey as well.
_STOPS = torch.tensor(
    [[13, 8, 60], [90, 12, 120], [165, 35, 105], [225, 85, 60], [250, 160, 40], [250, 240, 120]]
).float()
_GOLDEN = 0.6180339887


def heat_colours(level: Tensor) -> Tensor:
    """Levels in 0..1 of any shape [...] -> uint8 colours [..., 3]."""
    position = level.clamp(0, 1) * (len(_STOPS) - 1)
    below = position.floor().long().clamp(max=len(_STOPS) - 2)
    fraction = (position - below)[..., None]
    return (_STOPS[below] * (1 - fraction) + _STOPS[below + 1] * fraction).round().byte()


def heat_bar(width: int, height: int) -> Image.Image:
    """The scale of `heat_colours`, dark on the left."""
    row = heat_colours(torch.linspace(0, 1, width))
    return Image.fromarray(np.ascontiguousarray(row.expand(height, width, 3).numpy()))


def heat(
    photo: Image.Image,
    values: Tensor,
    *,
    low: float = 0.0,
    high: float | None = None,
    strength: float = 0.75,
) -> Image.Image:
    """The photo under a map of values [h, w].

    `low` is the darkest colour and `high` the brightest, by default the largest value; `strength`
    is the share of the map in the mixture, 1 leaving nothing of the photo.
    """
    values = values.detach().float().cpu()
    top = values.max().item() if high is None else high
    level = ((values - low) / max(top - low, 1e-12)).clamp(0, 1)
    grey = Image.fromarray((level * 255).round().byte().numpy()).resize(
        photo.size, Image.Resampling.BICUBIC
    )
    colour = heat_colours(torch.from_numpy(np.array(grey)).float() / 255)
    return Image.blend(photo.convert("RGB"), Image.fromarray(colour.numpy()), strength)


def core_colour(core: int) -> RGB:
    """The colour of a core, counted from 0: the same at every budget, neighbours far apart."""
    value = 0.95 if core % 2 == 0 else 0.7
    red, green, blue = colorsys.hsv_to_rgb(core * _GOLDEN % 1, 0.85, value)
    return round(red * 255), round(green * 255), round(blue * 255)
