"""A small photo, and a view of it by a small model."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from veca import viz


def make_photo(width: int = 96, height: int = 64) -> Image.Image:
    """Smooth colours and some texture, the same each time."""
    y, x = np.mgrid[:height, :width]
    grain = np.random.default_rng(0).integers(0, 60, (height, width))
    channels = (x * 255 // width, y * 255 // height, (x + y) % 200)
    return Image.fromarray(np.stack([c // 2 + grain for c in channels], axis=-1).astype(np.uint8))


@pytest.fixture
def photo():
    return make_photo()


@pytest.fixture
def view(tiny, photo):
    """4 x 6 patches, three layers, eight cores."""
    return viz.View(tiny, photo, 64, name="p", height=80)
