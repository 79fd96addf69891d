"""Pictures side by side, each with a line of text above it."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont


def strip(pictures: Sequence[Image.Image], labels: Sequence[str], height: int = 256) -> Image.Image:
    """One row of labelled pictures, all of the same height."""
    gap, text = 8, 22
    scaled = [
        p.resize(
            (max(1, round(p.width * height / p.height)), height),
            Image.Resampling.BICUBIC if p.height > height else Image.Resampling.NEAREST,
        )
        for p in pictures
    ]
    width = sum(p.width for p in scaled) + gap * (len(scaled) + 1)
    canvas = Image.new("RGB", (width, height + text + 2 * gap), "white")
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size=14)
    x = gap
    for picture, label in zip(scaled, labels, strict=True):
        draw.text((x, gap), label, fill="black", font=font)
        canvas.paste(picture, (x, gap + text))
        x += picture.width + gap
    return canvas
