"""A picture at a level or a resolution, or a region of it: what a pass sees of a source.

Windows are put together from blocks that lie always in the same places. So a pixel is the same
whatever window it is read with, also where it is scaled or decoded with losses.
"""

from __future__ import annotations

import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

from veca.errors import LargeError, shown
from veca.large.picture import Picture, Pixels
from veca.large.sources import Place, Source, open_source

_BLOCK = 512
_READ = 2048  # pixels a side that are read of a source at once, at most
_KEPT = 128 * 2**20
"""Bytes of blocks that are kept: a row of them, for a picture 80,000 px wide."""
_SUPPORT = 2  # pixels around that bicubic scaling looks at
_UNITS = {"": 1.0, "um": 1.0, "µm": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6, "km": 1e9}
_SAME = 0.01  # resolutions that differ by less are one: files round them


@dataclass(frozen=True)
class PictureLook:
    """How a picture is looked at; with its path, all that is needed to open it again."""

    level: int | None = None
    """Of the file's levels, 0 the finest; None: 0."""
    mpp: float | None = None
    """Micrometres a pixel, scaled from the nearest finer level."""
    region: tuple[int, int, int, int] | None = None
    """(x, y, width, height) in pixels of the level or resolution."""
    bands: tuple[int, ...] | None = None
    """Which, counted from 1: one or three. None: the first three, or the only one."""
    value_range: tuple[float, float] | None = None
    """What becomes 0 and 255, for pictures that are not of 8 bit."""

    def to_dict(self) -> dict[str, Any]:
        """JSON; `PictureLook.of` reads it."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, facts: dict[str, Any]) -> PictureLook:
        given: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
        return cls(**given)


class PictureView:
    """A `Picture` of a source.

    Attributes:
        source, look: what is seen, and how.
        level: of the source, that is read.
        scale: pixels of the level that make one of these, (down, across).
        microns: micrometres a pixel, (down, across), where known.
    """

    def __init__(self, source: Source, look: PictureLook | None = None) -> None:
        self.source, self.look = source, look or PictureLook()
        self.level, self.scale = self._chosen()
        rows, columns = source.levels[self.level]
        whole = (
            max(1, round(rows / self.scale[0])),
            max(1, round(columns / self.scale[1])),
        )
        self.whole = whole
        self._origin, self._shape = self._area(whole)
        self._begin()

    def _begin(self) -> None:
        self._block = max(16, min(_BLOCK, int(_READ / max(self.scale))))
        self._blocks: OrderedDict[tuple[int, int], Pixels] = OrderedDict()
        self._bytes = 0
        first = self.source.read(self.level, 0, 0, 1, 1)
        self._bands = self._checked_bands(1 if first.ndim == 2 else first.shape[2])
        self._to_bytes = self._conversion(first.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def microns(self) -> tuple[float, float] | None:
        found = _level_microns(self.source, self.level)
        return None if found is None else (found[0] * self.scale[0], found[1] * self.scale[1])

    @property
    def place(self) -> Place | None:
        """Where it lies on earth, in its own pixels."""
        if self.source.place is None:
            return None
        down, across = (
            finest / level * scale
            for finest, level, scale in zip(
                self.source.levels[0], self.source.levels[self.level], self.scale, strict=True
            )
        )
        top, left = self._origin
        return self.source.place.part(top * down, left * across, down, across)

    def finest(self, row: float, column: float) -> tuple[float, float]:
        """A point in pixels of the source's finest level."""
        finest, level = self.source.levels[0], self.source.levels[self.level]
        return (
            (row + self._origin[0]) * self.scale[0] * finest[0] / level[0],
            (column + self._origin[1]) * self.scale[1] * finest[1] / level[1],
        )

    def identity(self) -> str:
        return f"{self.source.identity()} {sorted(self.look.to_dict().items())}"

    def window(self, top: int, left: int, height: int, width: int) -> Pixels:
        return self._window(top, left, height, width, self._pixels, keep=True)

    def valid(self, top: int, left: int, height: int, width: int) -> Pixels | None:
        """Booleans [height, width]: where the file has data; None: it does not say."""
        if self.source.valid(self.level, 0, 0, 1, 1) is None:
            return None
        return self._window(top, left, height, width, self._validity, keep=False)

    def reduced(self, longest: int) -> PictureView:
        """The same, with at most so many pixels along its longer side."""
        factor = max(self._shape) / longest
        if factor <= 1:
            return self
        found = PictureView.__new__(PictureView)
        found.source, found.look = self.source, self.look
        wanted = self.source.levels[self.level][0] / self.source.levels[0][0]
        wanted = self.scale[0] * factor / wanted  # of the finest level's pixels, down
        found.level = max(
            level
            for level, (rows, _) in enumerate(self.source.levels)
            if level == self.level or self.source.levels[0][0] / rows <= wanted
        )
        ratio = [
            here / there
            for here, there in zip(
                self.source.levels[self.level], self.source.levels[found.level], strict=True
            )
        ]
        found.scale = tuple(s * factor / r for s, r in zip(self.scale, ratio, strict=True))  # type: ignore[assignment]
        found.whole = tuple(max(1, round(side / factor)) for side in self.whole)  # type: ignore[assignment]
        found._origin = tuple(side / factor for side in self._origin)  # type: ignore[assignment]
        found._shape = tuple(max(1, round(side / factor)) for side in self._shape)  # type: ignore[assignment]
        found._begin()
        return found

    # ------------------------------------------------------------------------------- what is chosen

    def _chosen(self) -> tuple[int, tuple[float, float]]:
        source, look = self.source, self.look
        if look.level is not None and look.mpp is not None:
            raise LargeError("a level and a resolution are two ways to say one thing; give one.")
        if look.mpp is None:
            level = look.level or 0
            if not 0 <= level < len(source.levels):
                known = ", ".join(f"{i} ({h} x {w})" for i, (h, w) in enumerate(source.levels))
                raise LargeError(f"{source.path} has no level {level}; it has {known}.")
            return level, (1.0, 1.0)
        if not look.mpp > 0:
            raise LargeError(f"a resolution is more than 0, got {look.mpp}.")
        if source.microns is None:
            raise LargeError(
                f"{source.path} does not say its resolution, so micrometres or metres a pixel "
                "cannot be asked for; choose a level instead."
            )
        sizes = [_level_microns(source, level) for level in range(len(source.levels))]
        finer = [i for i, m in enumerate(sizes) if m and max(m) <= look.mpp * (1 + _SAME)]
        level = max(finer, default=0)
        found = sizes[level]
        assert found is not None
        scale = tuple(look.mpp / m for m in found)
        return level, tuple(1.0 if abs(s - 1) < _SAME else s for s in scale)  # type: ignore[return-value]

    def _area(self, whole: tuple[int, int]) -> tuple[tuple[float, float], tuple[int, int]]:
        if self.look.region is None:
            return (0, 0), whole
        x, y, width, height = self.look.region
        if min(x, y) < 0 or min(width, height) < 1 or x + width > whole[1] or y + height > whole[0]:
            raise LargeError(
                f"the region x={x}, y={y}, {width} wide and {height} high is empty or outside the "
                f"picture, which is {whole[1]} wide and {whole[0]} high at this level."
            )
        return (y, x), (height, width)

    def _checked_bands(self, count: int) -> list[int]:
        if self.look.bands is None:
            return [0, 1, 2] if count >= 3 else [0]
        if len(self.look.bands) not in (1, 3) or not all(1 <= b <= count for b in self.look.bands):
            raise LargeError(
                f"bands are one or three of 1..{count}, which the picture has; got "
                f"{','.join(map(str, self.look.bands))}."
            )
        return [band - 1 for band in self.look.bands]

    def _conversion(self, dtype: np.dtype[Any]) -> Callable[[Pixels], Pixels]:
        limits = self.look.value_range
        if limits is None:
            if dtype == np.uint8:
                return lambda pixels: pixels
            if dtype == np.bool_:
                return lambda pixels: pixels.astype(np.uint8) * 255
            raise LargeError(
                f"{self.source.path} holds {dtype}, and 8 bit are wanted; say with a range which "
                f"values become black and white{self._found_range()}."
            )
        low, high = limits
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise LargeError(f"a range is LOW,HIGH with LOW below HIGH, got {low:g},{high:g}.")

        def convert(pixels: Pixels) -> Pixels:
            scaled = (np.nan_to_num(pixels.astype(np.float32), nan=low) - low) / (high - low)
            return np.rint(scaled.clip(0, 1) * 255).astype(np.uint8)

        return convert

    def _found_range(self) -> str:
        """What most of a part in the middle lies between, for a message."""
        rows, columns = self.source.levels[-1]
        height, width = min(rows, 512), min(columns, 512)
        part = self.source.read(
            len(self.source.levels) - 1, (rows - height) // 2, (columns - width) // 2, height, width
        )
        numbers = part.astype(np.float64)
        numbers = numbers[np.isfinite(numbers)]
        if not numbers.size:
            return ""
        low, high = np.percentile(numbers, [2, 98])
        return f", such as {low:g},{high:g} (most of its middle)"

    # --------------------------------------------------------------------------------------- pixels

    def _window(
        self,
        top: int,
        left: int,
        height: int,
        width: int,
        of: Callable[[int, int, int, int], Pixels],
        *,
        keep: bool,
    ) -> Pixels:
        if self._on_grid:  # windows of the level; scaled ones begin with the region
            top, left = top + int(self._origin[0]), left + int(self._origin[1])
            if self.source.cheap:
                return of(top, left, height, width)
        side, out = self._block, None
        for row in range(top // side, -(-(top + height) // side)):
            for column in range(left // side, -(-(left + width) // side)):
                block = self._blocked(row, column, of, keep)
                if out is None:
                    out = np.empty((height, width, *block.shape[2:]), block.dtype)
                y, x = row * side, column * side
                y0, x0 = max(y, top), max(x, left)
                y1, x1 = (
                    min(y + block.shape[0], top + height),
                    min(x + block.shape[1], left + width),
                )
                out[y0 - top : y1 - top, x0 - left : x1 - left] = block[
                    y0 - y : y1 - y, x0 - x : x1 - x
                ]
        assert out is not None
        return out

    @property
    def _on_grid(self) -> bool:
        """Whether its pixels are those of the level."""
        return self.scale == (1.0, 1.0)

    def _blocked(
        self, row: int, column: int, of: Callable[[int, int, int, int], Pixels], keep: bool
    ) -> Pixels:
        if keep and (row, column) in self._blocks:
            self._blocks.move_to_end((row, column))
            return self._blocks[row, column]
        # Scaled, blocks begin with the region; unscaled with the level, as its own tiles do.
        limits = self.source.levels[self.level] if self._on_grid else self._shape
        top, left = row * self._block, column * self._block
        block = of(top, left, min(self._block, limits[0] - top), min(self._block, limits[1] - left))
        if keep:
            self._blocks[row, column] = block
            self._bytes += block.nbytes
            while self._bytes > _KEPT and len(self._blocks) > 1:
                self._bytes -= self._blocks.popitem(last=False)[1].nbytes
        return block

    def _pixels(self, top: int, left: int, height: int, width: int) -> Pixels:
        if self._on_grid:
            return self._colours(top, left, height, width)
        y0, x0, box = self._source_box(top, left, height, width)
        read = self._colours(y0[0], x0[0], y0[1] - y0[0], x0[1] - x0[0])
        image = Image.fromarray(np.ascontiguousarray(read))
        return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC, box=box))

    def _validity(self, top: int, left: int, height: int, width: int) -> Pixels:
        if self._on_grid:
            found = self.source.valid(self.level, top, left, height, width)
            assert found is not None
            return found
        y0, x0, box = self._source_box(top, left, height, width)
        found = self.source.valid(self.level, y0[0], x0[0], y0[1] - y0[0], x0[1] - x0[0])
        assert found is not None
        image = Image.fromarray(found.astype(np.uint8) * 255)
        return np.asarray(image.resize((width, height), Image.Resampling.BOX, box=box)) > 127

    def _source_box(
        self, top: int, left: int, height: int, width: int
    ) -> tuple[tuple[int, int], tuple[int, int], tuple[float, float, float, float]]:
        """Rows and columns of the level to read for a part, and the part's box within them."""
        spans, inside = [], []
        level = self.source.levels[self.level]
        for axis, (start, length) in enumerate(((top, height), (left, width))):
            scale = self.scale[axis]
            low = (start + self._origin[axis]) * scale
            high = min((start + length + self._origin[axis]) * scale, level[axis])
            margin = math.ceil(_SUPPORT * max(scale, 1)) + 1
            first = max(0, math.floor(low) - margin)
            last = min(level[axis], math.ceil(high) + margin)
            spans.append((first, last))
            inside.append((max(0.0, low - first), high - first))
        (y0, y1), (x0, x1) = inside
        return spans[0], spans[1], (x0, y0, x1, y1)

    def _colours(self, top: int, left: int, height: int, width: int) -> Pixels:
        """Of the level, uint8 [height, width, 3]."""
        pixels = self.source.read(self.level, top, left, height, width)
        pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
        if pixels.shape[2] != len(self._bands) or self.look.bands is not None:
            pixels = pixels[:, :, self._bands]
        return np.broadcast_to(self._to_bytes(pixels), (height, width, 3))


class _OneLevel(Source):
    """Any picture as a source."""

    cheap = True

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.levels = [picture.shape]

    def read(self, level: int, top: int, left: int, height: int, width: int) -> Pixels:
        return self.picture.window(top, left, height, width)

    def identity(self) -> str:
        return self.picture.identity()


def as_view(picture: Picture) -> PictureView:
    """A picture as a view of itself."""
    return picture if isinstance(picture, PictureView) else PictureView(_OneLevel(picture))


def overview(picture: Picture, longest: int) -> Pixels:
    """The whole of a picture in at most so many pixels a side, uint8 [h, w, 3]."""
    view = as_view(picture).reduced(longest)
    return view.window(0, 0, *view.shape)


def open_picture(
    path: str | os.PathLike[str],
    *,
    level: int | None = None,
    mpp: float | str | None = None,
    region: Sequence[int] | None = None,
    bands: Sequence[int] | None = None,
    value_range: Sequence[float] | None = None,
) -> PictureView:
    """A picture of any size from a file or a folder, at a level or a resolution.

    Pillow's formats, TIFF, BigTIFF and OME-TIFF; slides (extra `slides`), GeoTIFF and COG (extra
    `geo`), Zarr and OME-Zarr, DeepZoom (`.dzi`) and Zoomify folders, `.npy` files.

    Args:
        level: of those the file holds, 0 the finest.
        mpp: micrometres a pixel, or with a unit: "0.5", "10m". Scaled from the nearest finer level.
        region: (x, y, width, height), in pixels of that level or resolution.
        bands: one or three, counted from 1; by default the first three, or the only one.
        value_range: what becomes black and white, where pixels are not of 8 bit.

    Raises:
        LargeError: it cannot be read so; the message says why.
        MissingExtraError: a library is missing; the message says how to get it.
    """
    return PictureView(open_source(path), look_at(level, mpp, region, bands, value_range))


def look_at(
    level: int | None = None,
    mpp: float | str | None = None,
    region: Sequence[int] | None = None,
    bands: Sequence[int] | None = None,
    value_range: Sequence[float] | None = None,
) -> PictureLook:
    """A look, from what a user gave; see `open_picture`."""
    return PictureLook(
        level,
        None if mpp is None else parse_mpp(mpp),
        None if region is None else _four(region),
        None if bands is None else tuple(bands),
        None if value_range is None else (float(value_range[0]), float(value_range[1])),
    )


def parse_mpp(text: float | str) -> float:
    """Micrometres a pixel: 0.5, "0.5", "0.5um", "10m"."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zµ]*)\s*", str(text))
    if found is None or found[2] not in _UNITS:
        raise LargeError(
            f"a resolution is a length a pixel, in micrometres or with a unit, such as 0.5 or 10m; "
            f"got {shown(text)}."
        )
    return float(found[1]) * _UNITS[found[2]]


def _four(region: Sequence[int]) -> tuple[int, int, int, int]:
    if len(region) != 4:
        raise LargeError(f"a region is x,y,width,height, got {shown(list(region))}.")
    x, y, width, height = (int(side) for side in region)
    return x, y, width, height


def _level_microns(source: Source, level: int) -> tuple[float, float] | None:
    if source.microns is None:
        return None
    down, across = (
        microns * finest / here
        for microns, finest, here in zip(
            source.microns, source.levels[0], source.levels[level], strict=True
        )
    )
    return down, across
