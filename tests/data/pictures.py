"""Images for the tests of this folder."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int, height: int = 48, width: int = 64) -> Image.Image:
    """Smooth colours with some noise, different for each seed."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    noisy = np.clip(smooth + rng.integers(-9, 10, smooth.shape), 0, 255)
    return Image.fromarray(noisy.astype(np.uint8))


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def make_folder(path: Path, count: int, height: int = 48, width: int = 64) -> Path:
    """PNG images in three subfolders."""
    for i in range(count):
        file = path / str(i % 3) / f"{i:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(picture(i, height, width)))
    return path
