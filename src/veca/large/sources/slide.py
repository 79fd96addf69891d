"""Slides of microscopes, with OpenSlide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from veca._util.extras import require
from veca.large.sources.source import Pixels, Source, damaged

SUFFIXES = frozenset({
    ".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".czi",
})  # fmt: skip


class SlideSource(Source):
    """A slide; where nothing was scanned it is white."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        openslide = require("openslide", "reading slides", "slides")
        try:
            self._slide: Any = openslide.OpenSlide(str(path))
        except Exception as error:
            raise damaged(path, error) from error
        self.levels = [(height, width) for width, height in self._slide.level_dimensions]
        found = [self._slide.properties.get(f"openslide.mpp-{axis}") for axis in "yx"]
        if all(found):
            self.microns = (float(found[0]), float(found[1]))

    def read(self, level: int, top: int, left: int, height: int, width: int) -> Pixels:
        (rows, columns), (finest_rows, finest_columns) = self.levels[level], self.levels[0]
        at = (round(left * finest_columns / columns), round(top * finest_rows / rows))
        pixels = np.asarray(self._slide.read_region(at, level, (width, height)))
        alpha = pixels[..., 3:].astype(np.uint16)
        if alpha.min() == 255:
            return pixels[..., :3]
        return ((pixels[..., :3] * alpha + 255 * (255 - alpha)) // 255).astype(np.uint8)

    def valid(self, level: int, top: int, left: int, height: int, width: int) -> Pixels | None:
        (rows, columns), (finest_rows, finest_columns) = self.levels[level], self.levels[0]
        at = (round(left * finest_columns / columns), round(top * finest_rows / rows))
        alpha = self._slide.read_region(at, level, (width, height)).getchannel("A")
        return np.asarray(alpha) > 0
