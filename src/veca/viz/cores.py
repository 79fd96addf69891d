"""Cores on the photo: where each one ended, and the way it took there."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

from PIL import Image, ImageDraw
from torch import Tensor


def draw_cores(photo: Image.Image, path: Sequence[Tensor]) -> Image.Image:
    """Draw cores over a photo; `path` holds their places [C, 2] layer by layer, in [-1, 1]."""
    picture = Image.blend(photo.convert("RGB"), Image.new("RGB", photo.size, "white"), 0.35)
    draw = ImageDraw.Draw(picture)
    width, height = photo.size
    radius = max(3, min(width, height) // 90)
    places = [xy.detach().float().cpu().tolist() for xy in path]
    for core in range(len(places[0])):
        colour = _colour(core, len(places[0]))
        points = [((x + 1) / 2 * width, (y + 1) / 2 * height) for x, y in (p[core] for p in places)]
        draw.line(points, fill=colour, width=max(1, radius // 2), joint="curve")
        x, y = points[-1]
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour, outline="black")
    return picture


def _colour(core: int, count: int) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(core / count, 0.85, 0.9)
    return round(red * 255), round(green * 255), round(blue * 255)
