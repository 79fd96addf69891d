"""Rasters that lie on the earth: GeoTIFF, COG and what else rasterio reads."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from veca._util.extras import require
from veca.large.sources.source import Pixels, Place, Source, damaged

SUFFIXES = frozenset({".vrt", ".jp2", ".img", ".asc", ".ecw", ".sid", ".nc", ".grib"})
_DEGREE = 111_320.0e6  # micrometres of a degree of latitude


class GeoSource(Source):
    """A raster, with its overviews as levels."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        rasterio = require("rasterio", "reading GeoTIFF files", "geo")
        self._window = rasterio.windows.Window
        try:
            with quiet(rasterio):
                whole = rasterio.open(path)
                count = len(whole.overviews(1))
                self._levels: list[Any] = [
                    whole,
                    *(rasterio.open(path, overview_level=number) for number in range(count)),
                ]
        except Exception as error:
            raise damaged(path, error) from error
        self.levels = [(level.height, level.width) for level in self._levels]
        self._bands = list(range(1, whole.count + 1))
        crs = whole.crs
        if crs is not None or not whole.transform.is_identity:
            self.place = Place("" if crs is None else crs.to_wkt(), tuple(whole.transform)[:6])
        if crs is not None:
            self.microns = _microns(whole, crs)

    @property
    def georeferenced(self) -> bool:
        """Whether the file says where it lies."""
        return self.place is not None

    def read(self, level: int, top: int, left: int, height: int, width: int) -> Pixels:
        found = self._levels[level].read(self._bands, window=self._window(left, top, width, height))
        return np.moveaxis(found, 0, -1)

    def valid(self, level: int, top: int, left: int, height: int, width: int) -> Pixels | None:
        found = self._levels[level].dataset_mask(window=self._window(left, top, width, height))
        return np.asarray(found) > 0


def _microns(raster: Any, crs: Any) -> tuple[float, float] | None:
    a, b, _, d, e, _ = tuple(raster.transform)[:6]
    down, across = math.hypot(b, e), math.hypot(a, d)
    if crs.is_geographic:
        middle = (raster.bounds.top + raster.bounds.bottom) / 2
        return down * _DEGREE, across * _DEGREE * math.cos(math.radians(middle))
    if crs.is_projected:
        factor = crs.linear_units_factor[1] * 1e6
        return down * factor, across * factor
    return None


@contextlib.contextmanager
def quiet(rasterio: Any) -> Iterator[None]:
    """A picture without a place on earth is no fault here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        yield
