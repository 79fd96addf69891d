"""Folders of small tiles, one file each, as viewers on the web have them: DeepZoom and Zoomify."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from veca.errors import LargeError
from veca.images import read_image
from veca.large.sources.source import Pixels, Source, damaged, file_identity

ZOOMIFY = "ImageProperties.xml"


class _Tiles(Source):
    """Levels of tiles of one size, of which each level halves the one before."""

    tile: int
    overlap = 0

    def __init__(self, path: Path, description: Path) -> None:
        super().__init__(path)
        self._description = description

    def file(self, level: int, row: int, column: int) -> Path:
        """Of a tile; level 0 is the finest."""
        raise NotImplementedError

    def identity(self) -> str:
        return file_identity(self._description)

    def read(self, level: int, top: int, left: int, height: int, width: int) -> Pixels:
        out = np.empty((height, width, 3), np.uint8)
        for row in range(top // self.tile, -(-(top + height) // self.tile)):
            for column in range(left // self.tile, -(-(left + width) // self.tile)):
                self._copy(out, level, row, column, top, left)
        return out

    def _copy(self, out: Pixels, level: int, row: int, column: int, top: int, left: int) -> None:
        """Put what a tile has of the window that begins there into `out`."""
        pixels = np.asarray(read_image(self.file(level, row, column)))
        y, x = row * self.tile, column * self.tile
        rows, columns = self.levels[level]
        # Neighbours' pixels stand before a tile's own, but for the first.
        skip_y, skip_x = (self.overlap if index else 0 for index in (row, column))
        own = pixels[skip_y : skip_y + min(self.tile, rows - y)]
        own = own[:, skip_x : skip_x + min(self.tile, columns - x)]
        if own.shape[:2] != (min(self.tile, rows - y), min(self.tile, columns - x)):
            raise LargeError(f"{self.file(level, row, column)} is smaller than a tile should be.")
        y0, x0 = max(y, top), max(x, left)
        y1, x1 = min(y + own.shape[0], top + len(out)), min(x + own.shape[1], left + out.shape[1])
        out[y0 - top : y1 - top, x0 - left : x1 - left] = own[y0 - y : y1 - y, x0 - x : x1 - x]


class DeepZoomSource(_Tiles):
    """A `.dzi` file and the folder of tiles beside it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path)
        root = _xml(path)
        size = next((child for child in root if child.tag.endswith("Size")), None)
        facts = {**root.attrib, **({} if size is None else size.attrib)}
        self.tile, self.overlap, width, height = _numbers(
            path, facts, "TileSize", "Overlap", "Width", "Height"
        )
        self._suffix = facts.get("Format", "jpg")
        self._folder = path.with_name(f"{path.stem}_files")
        last = math.ceil(math.log2(max(width, height, 1)))
        self.levels = [(-(-height // 2**k), -(-width // 2**k)) for k in range(last + 1)]

    def file(self, level: int, row: int, column: int) -> Path:
        number = len(self.levels) - 1 - level
        return self._folder / str(number) / f"{column}_{row}.{self._suffix}"


class ZoomifySource(_Tiles):
    """A folder with `ImageProperties.xml` and groups of 256 tiles."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path / ZOOMIFY)
        facts = {key.upper(): value for key, value in _xml(path / ZOOMIFY).attrib.items()}
        self.tile, width, height = _numbers(path / ZOOMIFY, facts, "TILESIZE", "WIDTH", "HEIGHT")
        self.levels = [(height, width)]
        while max(self.levels[-1]) > self.tile:
            rows, columns = self.levels[-1]
            self.levels.append((max(1, rows // 2), max(1, columns // 2)))
        counts = [self._across(k) * self._down(k) for k in range(len(self.levels))]
        # Tiles are counted from the coarsest level on.
        self._before = [sum(counts[k + 1 :]) for k in range(len(counts))]

    def _across(self, level: int) -> int:
        return -(-self.levels[level][1] // self.tile)

    def _down(self, level: int) -> int:
        return -(-self.levels[level][0] // self.tile)

    def file(self, level: int, row: int, column: int) -> Path:
        number = self._before[level] + row * self._across(level) + column
        name = f"{len(self.levels) - 1 - level}-{column}-{row}.jpg"
        return self.path / f"TileGroup{number // 256}" / name


def _xml(path: Path) -> Any:
    try:
        text = path.read_text("utf-8-sig")
        if re.search(r"<!(DOCTYPE|ENTITY)", text):  # which can make gigabytes of a line
            raise damaged(path, "it declares entities")
        return ElementTree.fromstring(text)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        if isinstance(error, LargeError):
            raise
        raise damaged(path, error) from error


def _numbers(path: Path, facts: dict[str, str], *names: str) -> list[int]:
    try:
        found = [int(facts[name]) for name in names]
    except (KeyError, ValueError) as error:
        raise damaged(path, f"it does not say {error}") from error
    least = [0 if name == "Overlap" else 1 for name in names]
    if any(number < low for number, low in zip(found, least, strict=True)):
        raise damaged(path, "its sizes are not positive")
    return found
