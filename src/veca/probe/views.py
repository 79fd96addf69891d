"""From an image of a dataset to the pixels that a backbone sees: crops, frames and windows.

A view is fixed: the same image gives the same pixels every time, so that features can be cached.
`augment` makes the random ones.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.errors import ProbeError
from veca.images import pixel_limit, target_size
from veca.probe.datasets import Crop, Dataset
from veca.probe.protocol import CropRule, CropView, DepthView, WindowView

Size = tuple[int, int]

_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class Tile(NamedTuple):
    """A part of the frame, as the backbone sees it."""

    top: int
    left: int
    height: int
    width: int
    flipped: bool = False
    """Mirrored left to right before the backbone saw it."""


class Shown(NamedTuple):
    """An image as a view shows it."""

    size: Size
    """(height, width) of the image as it was read."""
    frame: Size
    """(height, width) of the resized image that the tiles are parts of."""
    tiles: tuple[Tile, ...]
    pixels: tuple[Tensor, ...]
    """uint8 [3, height, width] of each tile."""


@dataclass(frozen=True)
class SquareView:
    """The middle of an image, for classification: resize the short side, cut out a square."""

    settings: CropView
    cell: int

    def __post_init__(self) -> None:
        _on_grid(self.settings.size, self.cell)

    def describe(self) -> dict[str, Any]:
        return {"view": "square", **dataclasses.asdict(self.settings)}

    def show(self, image: Image.Image) -> Shown:
        side = self.settings.size
        # At least the crop itself: rounding must not leave it a pixel short.
        short = max(side, round(side / self.settings.crop_ratio))
        height, width = short_side(image.height, image.width, short)
        resized = resize(image, (height, width), self.settings.interpolation)
        top, left = round((height - side) / 2), round((width - side) / 2)
        square = resized.crop((left, top, left + side, top + side))
        tile = Tile(0, 0, side, side)
        return Shown((image.height, image.width), (side, side), (tile,), (to_uint8(square),))


@dataclass(frozen=True)
class FrameView:
    """A whole image, seen at once or through sliding windows; for dense tasks.

    What the backbone sees is on the grid: the windows, or else the image itself. `image_crop` cuts
    the image first; `flip` shows every tile mirrored as well.
    """

    settings: WindowView
    cell: int
    image_crop: Crop | None = None
    flip: bool = False

    def __post_init__(self) -> None:
        if self.settings.window:
            _on_grid(self.settings.window, self.cell)

    def describe(self) -> dict[str, Any]:
        crop = None if self.image_crop is None else dataclasses.asdict(self.image_crop)
        settings = dataclasses.asdict(self.settings)
        if self.settings.window:
            settings["sides"] = "exact"  # told from features of a time when they were on the grid
        return {
            "view": "frame", **settings, "cell": self.cell, "image_crop": crop, "flip": self.flip
        }  # fmt: skip

    def frame(self, size: Size) -> Size:
        """The size that an image of `size` (already cropped) is resized to.

        A side that windows slide along keeps its exact length; one that is seen whole is brought
        onto the grid.
        """
        side, window = self.settings.size or None, self.settings.window
        if side is not None and side < self.cell:
            raise ProbeError(f"view.size {side} is below one cell of {self.cell} pixels.")
        exact = size if side is None else short_side(*size, side)
        fitted = target_size(*size, side, "resize", self.cell)
        height, width = (
            length if window and length >= window else on_grid
            for length, on_grid in zip(exact, fitted, strict=True)
        )
        if height * width > pixel_limit():
            raise ProbeError(
                f"an image of {size[0]} x {size[1]} pixels would be shown at {height} x {width}; "
                "such a sliver is not an image to score."
            )
        return height, width

    def tiles(self, frame: Size) -> tuple[Tile, ...]:
        found = windows(frame, self.settings.window, self.settings.stride)
        if self.flip:
            found += tuple(tile._replace(flipped=True) for tile in found)
        return found

    def show(self, image: Image.Image) -> Shown:
        size = (image.height, image.width)
        if self.image_crop is not None:
            top, bottom, left, right = self.image_crop.box(*size)
            image = image.crop((left, top, right, bottom))
        frame = self.frame((image.height, image.width))
        whole = to_uint8(resize(image, frame, self.settings.interpolation))
        tiles = self.tiles(frame)
        return Shown(size, frame, tiles, tuple(cut(whole, tile) for tile in tiles))


View = SquareView | FrameView


def depth_view(settings: DepthView, cell: int, dataset: Dataset) -> FrameView:
    window = WindowView(settings.size, 0, 0, settings.interpolation)
    return FrameView(
        window, cell, crop_of(settings.image_crop, dataset, "image_crop"), settings.flip
    )


def crop_of(rule: CropRule, dataset: Dataset, which: str) -> Crop | None:
    """The crop that a protocol's rule means for a dataset; `which` is the dataset's word for it."""
    if rule.kind == "none":
        return None
    if rule.kind == "dataset":
        found = getattr(dataset, which, None)
        return found if isinstance(found, Crop) else None
    size = (rule.size[0], rule.size[1]) if rule.size else None
    return Crop(which.replace("_", " "), rule.kind, rule.values, size)


def cut(pixels: Tensor, tile: Tile) -> Tensor:
    """The part of [..., H, W] that a tile covers, mirrored if it says so."""
    part = pixels[..., tile.top : tile.top + tile.height, tile.left : tile.left + tile.width]
    return part.flip(-1).contiguous() if tile.flipped else part.contiguous()


def windows(frame: Size, window: int, stride: int) -> tuple[Tile, ...]:
    """Windows that together cover every pixel of the frame; the last ones end at its edge.

    A window that is larger than the frame is cut down to it. Without a window (0) there is one
    tile, the frame.
    """
    height, width = frame
    rows, columns = min(window or height, height), min(window or width, width)
    return tuple(
        Tile(top, left, rows, columns)
        for top in _starts(height, rows, stride)
        for left in _starts(width, columns, stride)
    )


def _starts(length: int, window: int, stride: int) -> list[int]:
    last = length - window
    return [*range(0, last, stride), last] if last else [0]


def short_side(height: int, width: int, short: int) -> Size:
    """The size with this short side and the same proportions, to the nearest pixel."""
    least = min(height, width)
    return (2 * height * short + least) // (2 * least), (2 * width * short + least) // (2 * least)


def resize(image: Image.Image, size: Size, interpolation: str) -> Image.Image:
    if size == (image.height, image.width):
        return image
    return image.resize((size[1], size[0]), _RESAMPLING[interpolation])


def to_uint8(image: Image.Image | np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def to_unit(pixels: Tensor, device: torch.device) -> Tensor:
    """uint8 0..255 -> float32 0..1 on a device."""
    return pixels.to(device).float().div_(255)


def _on_grid(size: int, cell: int) -> None:
    if size < cell or size % cell:
        near = max(cell, (2 * size + cell) // (2 * cell) * cell)
        raise ProbeError(
            f"size {size} is not a multiple of the {cell}-pixel cell of the feature grid; {near} "
            "is the nearest."
        )
