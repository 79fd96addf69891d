"""TIFF of all sizes, BigTIFF and OME-TIFF among them, by its own tiles or strips."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from veca._util.extras import require
from veca.errors import LargeError
from veca.large.sources.source import Pixels, Source, cut_short, damaged

_KEPT = 64 * 2**20  # bytes of decoded tiles and strips that are kept for the next window
_MICRONS = {
    "m": 1e6, "cm": 1e4, "mm": 1e3, "µm": 1.0, "um": 1.0, "μm": 1.0, "micron": 1.0, "nm": 1e-3,
}  # fmt: skip


class TiffSource(Source):
    """The first picture of a TIFF file, with the smaller copies that it holds."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._tifffile = tiff_library()
        try:
            self._file = self._tifffile.TiffFile(path)
            series = self._file.series[0]
            self._pages = [_pages(path, level) for level in series.levels]
            self.levels = [(pages[0].imagelength, pages[0].imagewidth) for pages in self._pages]
            self._check_whole()
        except LargeError:
            raise
        except Exception as error:  # tifffile raises almost any type on a damaged file
            raise damaged(path, error) from error
        self.microns = self._resolution()
        self._cache: OrderedDict[tuple[int, int, int], Pixels | None] = OrderedDict()
        self._cached = 0
        self._lock = threading.Lock()

    def _check_whole(self) -> None:
        end = max(
            (
                offset + count
                for pages in self._pages
                for page in pages
                for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True)
            ),
            default=0,
        )
        if end > self.path.stat().st_size:
            raise cut_short(self.path, end)

    def _resolution(self) -> tuple[float, float] | None:
        page = self._pages[0][0]
        if self._file.is_ome:
            try:
                found = self._tifffile.xml2dict(self._file.ome_metadata)["OME"]["Image"]
                pixels = (found[0] if isinstance(found, list) else found)["Pixels"]
                return tuple(  # type: ignore[return-value]
                    float(pixels[f"PhysicalSize{axis}"])
                    * _MICRONS[pixels.get(f"PhysicalSize{axis}Unit", "µm")]
                    for axis in "YX"
                )
            except (KeyError, TypeError, ValueError, IndexError):
                return None
        unit = {2: 25_400.0, 3: 10_000.0}.get(_tag(page, "ResolutionUnit", 0))
        across, down = (_tag(page, f"{axis}Resolution", (0, 1)) for axis in "XY")
        if unit is None or not across[0] or not down[0]:
            return None
        found = (unit * down[1] / down[0], unit * across[1] / across[0])
        # 72 to 600 dots an inch are said of files that know nothing.
        return found if max(found) < 25.4e3 / 600 else None

    def read(self, level: int, top: int, left: int, height: int, width: int) -> Pixels:
        parts = [
            self._window(level, number, top, left, height, width)
            for number in range(len(self._pages[level]))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)

    def _window(
        self, level: int, number: int, top: int, left: int, height: int, width: int
    ) -> Pixels:
        """Of one page [height, width, bands]."""
        page = self._pages[level][number]
        rows, columns = _segment(page)
        across = -(-page.imagewidth // columns)
        down = -(-page.imagelength // rows)
        planes = page.samplesperpixel if page.planarconfig == 2 else 1
        bands = page.samplesperpixel // planes
        out = np.zeros((height, width, planes * bands), page.dtype)
        for plane in range(planes):
            for row in range(top // rows, -(-(top + height) // rows)):
                for column in range(left // columns, -(-(left + width) // columns)):
                    index = (plane * down + row) * across + column
                    pixels = self._decoded(level, number, index)
                    if pixels is None:  # a tile that is not stored is empty
                        continue
                    y, x = row * rows, column * columns
                    y0, x0 = max(y, top), max(x, left)
                    y1 = min(y + pixels.shape[0], top + height)
                    x1 = min(x + pixels.shape[1], left + width)
                    out[y0 - top : y1 - top, x0 - left : x1 - left, plane * bands :][
                        ..., :bands
                    ] = pixels[y0 - y : y1 - y, x0 - x : x1 - x]
        return _coloured(page, out)

    def _decoded(self, level: int, number: int, index: int) -> Pixels | None:
        """A tile or strip [h, w, bands]; the last ones are kept."""
        key = (level, number, index)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            page = self._pages[level][number]
            found = self._decode(page, index)
            self._cache[key] = found
            self._cached += 0 if found is None else found.nbytes
            while self._cached > _KEPT and len(self._cache) > 1:
                _, old = self._cache.popitem(last=False)
                self._cached -= 0 if old is None else old.nbytes
            return found

    def _decode(self, page: Any, index: int) -> Pixels | None:
        count = page.databytecounts[index]
        if not count:
            return None
        handle = self._file.filehandle
        handle.seek(page.dataoffsets[index])
        data = handle.read(count)
        if len(data) < count:
            raise cut_short(self.path, page.dataoffsets[index] + count)
        tables = _tag(page, "JPEGTables", None)
        pixels, _, shape = page.decode(data, index, jpegtables=tables)
        if pixels is None:
            return None
        found: Pixels = pixels[0, : shape[1], : shape[2]]
        return found


def tiff_library() -> Any:
    """tifffile, which logs what it then raises as well."""
    found = require("tifffile", "reading large TIFF files", "large")
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)
    return found


def _pages(path: Path, level: Any) -> list[Any]:
    """The pages of a level that are its bands: one, or a page for each of three."""
    axes, shape = level.axes, level.shape
    others = [size for axis, size in zip(axes, shape, strict=True) if axis not in "YXS"]
    keyframe = level.keyframe
    if "Y" not in axes or "X" not in axes or keyframe.imagedepth > 1:
        raise LargeError(f"{path}: its axes {axes} are not those of a picture; export one plane.")
    several = int(np.prod(others)) if others else 1
    pages = list(level.pages)
    if several == 1 or (others == [several] and several <= 16 and len(pages) == several):
        # tifffile reads only what it needs of the later ones; these are asked for everything.
        return [page if page is keyframe else page.aspage() for page in pages[:several]]
    raise LargeError(
        f"{path}: its axes {axes} of {list(shape)} are a stack of pictures; export one of them."
    )


def _segment(page: Any) -> tuple[int, int]:
    if page.is_tiled:
        return page.tilelength, page.tilewidth
    return min(page.rowsperstrip, page.imagelength), page.imagewidth


def _coloured(page: Any, pixels: Pixels) -> Pixels:
    """Palettes and inverted greys as they look."""
    name = getattr(page.photometric, "name", "")
    if name == "PALETTE" and page.colormap is not None:
        return (page.colormap.T[pixels[..., 0]] >> 8).astype(np.uint8)
    if name == "MINISWHITE" and pixels.dtype.kind == "u":
        return np.iinfo(pixels.dtype).max - pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * 255
    return pixels


def _tag(page: Any, name: str, default: Any) -> Any:
    found = page.tags.get(name)
    return default if found is None else found.value
