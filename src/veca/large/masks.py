"""Which patches are there: by a mask file, by where a file has data, or by where tissue is."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

from veca.errors import ImageError, LargeError
from veca.images import read_image
from veca.large.picture import Picture, Pixels, patch_grid
from veca.large.plan import Mask
from veca.large.view import PictureView, as_view

TISSUE, NODATA = "tissue", "nodata"
_FINE = 4  # pixels of the overview a side of a patch
_MOST = 8192  # of the overview's longer side
_LEAST_CHROMA = 8  # of 255: below it a slide's glass and a scanner's noise lie
_SHARE = 0.25  # of a patch that must be tissue


def mask_of(picture: Picture, wanted: str | os.PathLike[str], patch_size: int) -> Mask:
    """Booleans [h, w], one for each patch.

    Args:
        wanted: "tissue": what has more colour than the glass around it; "nodata": where the file
            has data; or an image whose pixels other than 0 are there, of the size of the picture
            at its level, of the region, or of either scaled down evenly.
    """
    if wanted == TISSUE:
        return tissue(picture, patch_size)
    if wanted == NODATA:
        return _with_data(picture, patch_size)
    return _from_file(picture, Path(wanted).expanduser(), patch_size)


def tissue(picture: Picture, patch_size: int) -> Mask:
    """Where an overview has colour: the difference of its channels over a threshold of its own.

    The threshold parts the pixels into two groups with the least variance inside them (Otsu).
    """
    grid = patch_grid(picture, patch_size)
    view = as_view(picture).reduced(min(_MOST, _FINE * max(grid)))
    pixels = view.window(0, 0, *view.shape)
    chroma = pixels.max(axis=2) - pixels.min(axis=2)
    found = chroma > max(_LEAST_CHROMA, _otsu(chroma))
    mask = shares(found, grid, picture.shape, patch_size) >= _SHARE
    if not mask.any():
        raise LargeError("no tissue is found in the picture; give a mask file, or no mask.")
    return mask


def _otsu(values: Pixels) -> int:
    counts = np.bincount(values.ravel(), minlength=256).astype(np.float64)
    below, total = counts.cumsum(), counts.sum()
    sums = (counts * np.arange(256)).cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (sums[-1] * below - sums * total) ** 2 / (below * (total - below))
    return int(np.nan_to_num(between, nan=-1.0, posinf=-1.0).argmax())


def _with_data(picture: Picture, patch_size: int) -> Mask:
    if not isinstance(picture, PictureView) or picture.valid(0, 0, 1, 1) is None:
        raise LargeError("the picture does not say where it has data; give a mask file, or none.")
    height, width = patch_grid(picture, patch_size)
    mask = np.zeros((height, width), np.bool_)
    rows = max(1, 2048 // patch_size)
    for row in range(0, height, rows):
        for column in range(0, width, rows):
            top, left = row * patch_size, column * patch_size
            tall = min(rows * patch_size, picture.shape[0] - top)
            wide = min(rows * patch_size, picture.shape[1] - left)
            found = picture.valid(top, left, tall, wide)
            assert found is not None
            down, across = -(-tall // patch_size), -(-wide // patch_size)
            part = shares(found, (down, across), (tall, wide), patch_size) > 0
            mask[row : row + down, column : column + across] = part
    return mask


def _from_file(picture: Picture, path: Path, patch_size: int) -> Mask:
    try:
        pixels = np.asarray(read_image(path).convert("L"))
    except ImageError as error:
        raise LargeError(f"the mask cannot be read: {error}") from error
    found = pixels > 0
    shape = picture.shape
    if not _fits(found.shape, shape, patch_size) and isinstance(picture, PictureView):
        if not _fits(found.shape, picture.whole, patch_size):
            raise _another_size(path, found, picture)
        found = _part(found, picture)
    elif not _fits(found.shape, shape, patch_size):
        raise _another_size(path, found, picture)
    grid = patch_grid(picture, patch_size)
    return found if found.shape == grid else shares(found, grid, shape, patch_size) > 0


def _fits(mask: tuple[int, ...], picture: tuple[int, int], patch_size: int) -> bool:
    """Whether a mask is the picture scaled down evenly, up to the rounding of its sides."""
    grid = tuple(-(-side // patch_size) for side in picture)
    if tuple(mask) in (picture, grid):
        return True
    factor = max(picture) / max(mask)
    return factor > 1 and all(
        abs(side / factor - there) <= 1 for side, there in zip(picture, mask, strict=True)
    )


def _another_size(path: Path, mask: Mask, picture: Picture) -> LargeError:
    return LargeError(
        f"the mask {path} has {mask.shape[0]} x {mask.shape[1]} pixels, and the picture "
        f"{picture.shape[0]} x {picture.shape[1]}; a mask has the picture's size, or that of the "
        "picture scaled down evenly."
    )


def _part(mask: Mask, view: PictureView) -> Mask:
    """What a mask of the whole has for a view of a region, in pixels of the view's proportions."""
    x, y, width, height = view.look.region or (0, 0, view.shape[1], view.shape[0])
    down, across = (m / w for m, w in zip(mask.shape, view.whole, strict=True))
    box = (x * across, y * down, (x + width) * across, (y + height) * down)
    size = (max(1, round(width * across)), max(1, round(height * down)))
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    return np.asarray(image.resize(size, Image.Resampling.NEAREST, box=box)) > 0


def shares(
    found: Mask, grid: tuple[int, int], shape: tuple[int, int], patch_size: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """[h, w]: the share of each patch that a mask of the whole picture, of any size, covers."""
    totals = np.zeros((found.shape[0] + 1, found.shape[1] + 1))
    totals[1:, 1:] = found.cumsum(axis=0, dtype=np.float64).cumsum(axis=1)
    spans = []
    for side, count, there in zip(shape, grid, found.shape, strict=True):
        edges = np.minimum(np.arange(count + 1) * patch_size, side) * there / side
        low = np.floor(edges[:-1] + 1e-9).astype(int)
        high = np.maximum(np.ceil(edges[1:] - 1e-9).astype(int), low + 1)
        spans.append((low, np.minimum(high, there)))
    (y0, y1), (x0, x1) = spans
    sums = (
        totals[np.ix_(y1, x1)]
        - totals[np.ix_(y0, x1)]
        - totals[np.ix_(y1, x0)]
        + totals[np.ix_(y0, x0)]
    )
    return sums / np.outer(y1 - y0, x1 - x0)
