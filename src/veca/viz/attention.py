"""Attention of a core as heat over the photo."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

# Dark violet to yellow, growing in lightness, so that it reads in grey as well.
_STOPS = torch.tensor(
    [[13, 8, 60], [90, 12, 120], [165, 35, 105], [225, 85, 60], [250, 160, 40], [250, 240, 120]]
).float()


def heat(photo: Image.Image, weights: Tensor, strength: float = 0.75) -> Image.Image:
    """The photo under a map of weights [h, w], its largest value brightest."""
    weights = weights.detach().float().cpu()
    level = (weights / weights.max().clamp_min(1e-12)).clamp(0, 1)
    grey = Image.fromarray((level * 255).byte().numpy()).resize(
        photo.size, Image.Resampling.BICUBIC
    )
    position = torch.from_numpy(np.array(grey)).float() / 255 * (len(_STOPS) - 1)
    below = position.floor().long().clamp(max=len(_STOPS) - 2)
    fraction = (position - below)[..., None]
    colour = _STOPS[below] * (1 - fraction) + _STOPS[below + 1] * fraction
    picture = Image.fromarray(colour.byte().numpy())
    return Image.blend(photo.convert("RGB"), picture, strength)
