"""Dense features as colours: three principal directions become red, green and blue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def feature_pictures(
    maps: Sequence[Tensor], size: tuple[int, int] | None = None
) -> list[Image.Image]:
    """Pictures of feature maps [D, h, w], coloured together so that colours compare.

    The principal directions and the range of each colour are found over all maps at once: equal
    features get equal colours in every picture. `size` is (height, width) in pixels; by default
    one pixel a patch.
    """
    features = [m.detach().float().cpu().flatten(1).T for m in maps]
    colours = joint_colours(features)
    pictures = []
    for colour, m in zip(colours, maps, strict=True):
        height, width = m.shape[-2:]
        array = (colour.view(height, width, 3) * 255).round().byte().numpy()
        picture = Image.fromarray(np.ascontiguousarray(array))
        if size is not None:
            picture = picture.resize((size[1], size[0]), Image.Resampling.NEAREST)
        pictures.append(picture)
    return pictures


def joint_colours(features: Sequence[Tensor]) -> list[Tensor]:
    """Map rows of several [N, D] to RGB in 0..1 with one projection, the same each time."""
    joined = torch.cat(list(features)).double()
    mean = joined.mean(dim=0)
    centred = joined - mean
    _, directions = torch.linalg.eigh(centred.T @ centred)
    directions = directions[:, -3:].flip(1)
    # An eigenvector's sign is arbitrary: make its largest entry positive.
    largest = directions.abs().argmax(dim=0, keepdim=True)
    directions = directions * directions.gather(0, largest).sign()
    projected = centred @ directions
    # Quantiles, so that a few extreme patches do not wash the others out.
    low = projected.quantile(0.01, dim=0) if len(projected) <= 2**24 else projected.amin(dim=0)
    high = projected.quantile(0.99, dim=0) if len(projected) <= 2**24 else projected.amax(dim=0)
    scaled = ((projected - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
    if scaled.shape[1] < 3:
        scaled = torch.nn.functional.pad(scaled, (0, 3 - scaled.shape[1]), value=0.5)
    return [part.float() for part in scaled.split([len(f) for f in features])]
