"""Where pixels come from: anything with a size that can read a window."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.config import VecaConfig
from veca.errors import LargeError
from veca.images import normalize, read_image

Pixels = np.ndarray[Any, Any]


@runtime_checkable
class Picture(Protocol):
    """A picture of any size that is read window by window."""

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        ...

    def window(self, top: int, left: int, height: int, width: int) -> Pixels:
        """Its pixels there, uint8 [height, width, 3], RGB; the window lies inside."""
        ...

    def identity(self) -> str:
        """What tells this picture from others, and from itself changed: a stopped pass asks."""
        ...


class ArrayPicture:
    """A NumPy array or memory map, uint8 [H, W, 3] or [H, W]; read where it lies."""

    def __init__(self, array: Pixels) -> None:
        colours = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3))
        if array.dtype != np.uint8 or not colours or 0 in array.shape:
            raise LargeError(
                f"a picture as an array is uint8 [height, width, 3] or [height, width], got "
                f"{array.dtype} {list(array.shape)}."
            )
        self.array = array

    @property
    def shape(self) -> tuple[int, int]:
        height, width = self.array.shape[:2]
        return height, width

    def window(self, top: int, left: int, height: int, width: int) -> Pixels:
        part = self.array[top : top + height, left : left + width]
        part = part[:, :, None] if part.ndim == 2 else part
        return np.broadcast_to(part, (height, width, 3))

    def identity(self) -> str:
        facts = f"{self.array.shape}"
        file = getattr(self.array, "filename", None)
        if isinstance(self.array, np.memmap) and file is not None:
            # The map says nothing of changes; the file's date does, without reading gigabytes.
            state = os.stat(file)  # noqa: PTH116
            start = self.array.__array_interface__["data"][0]
            whole = self.array.base if isinstance(self.array.base, np.ndarray) else self.array
            offset = self.array.offset + start - whole.__array_interface__["data"][0]
            facts += f" {os.path.realpath(file)} {offset} {self.array.strides}"
            return f"{facts} {state.st_size} {state.st_mtime_ns}"
        digest = hashlib.sha256()
        for row in self.array:
            digest.update(np.ascontiguousarray(row).data)
        return f"{facts} {digest.hexdigest()}"


def as_picture(source: Picture | Pixels | Image.Image) -> Picture:
    """A `Picture`, from one, a NumPy array or memory map, or a Pillow image."""
    if isinstance(source, np.ndarray):
        return ArrayPicture(source)
    if isinstance(source, Image.Image):
        # Upright and in RGB, as everywhere; what is in memory anyway has no limit.
        return ArrayPicture(
            np.asarray(read_image(source, max_pixels=2 * source.width * source.height))
        )
    if isinstance(source, Picture):
        return source
    raise LargeError(
        f"a picture is a NumPy array, a Pillow image or a veca.large.Picture, got "
        f"{type(source).__name__}."
    )


def patch_grid(picture: Picture, patch_size: int) -> tuple[int, int]:
    """Patches down and across; the last ones may reach over the picture's edge."""
    height, width = picture.shape
    return -(-height // patch_size), -(-width // patch_size)


def tile_pixels(
    picture: Picture, config: VecaConfig, at: tuple[int, int], shape: tuple[int, int]
) -> Tensor:
    """The normalised pixels of a tile of patches [1, 3, h, w], float32.

    Patches that reach over the picture's edge repeat its last pixels.

    Args:
        at, shape: the first patch (row, column), and how many down and across.
    """
    size = config.patch_size
    top, left = (side * size for side in at)
    height = min(shape[0] * size, picture.shape[0] - top)
    width = min(shape[1] * size, picture.shape[1] - left)
    try:
        window = np.asarray(picture.window(top, left, height, width))
    except Exception as error:  # sources decode with libraries of all kinds
        raise LargeError(
            f"the picture cannot be read at row {top}, column {left} "
            f"({str(error) or type(error).__name__}); the file may be damaged or cut short."
        ) from error
    if window.dtype != np.uint8 or window.shape != (height, width, 3):
        raise LargeError(
            f"the picture's window must be uint8 [{height}, {width}, 3], got {window.dtype} "
            f"{list(window.shape)}."
        )
    missing = ((0, shape[0] * size - height), (0, shape[1] * size - width), (0, 0))
    window = np.pad(window, missing, mode="edge") if np.any(missing) else window
    pixels = torch.from_numpy(window.copy()).permute(2, 0, 1).float().div(255)
    return normalize(pixels, config.image_mean, config.image_std)[None]
