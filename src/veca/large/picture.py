"""Where pixels come from: anything with a size that can read a window."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.checks import check_model
from veca.config import VecaConfig
from veca.errors import InputError, LargeError, whole
from veca.images import normalize, read_image
from veca.model import Veca

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


def as_picture(source: Picture | Pixels | Image.Image | str | os.PathLike[str]) -> Picture:
    """A `Picture`, from one, a path, a NumPy array or memory map, or a Pillow image."""
    if isinstance(source, (str, os.PathLike)):
        from veca.large.view import open_picture

        return open_picture(source)
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
        f"a picture is a path, a NumPy array, a Pillow image or a veca.large.Picture, got "
        f"{type(source).__name__}."
    )


def patch_grid(picture: Picture, patch_size: int) -> tuple[int, int]:
    """Patches down and across; the last ones may reach over the picture's edge."""
    height, width = picture.shape
    return -(-height // patch_size), -(-width // patch_size)


def region(
    model: Veca,
    picture: Picture | Pixels | Image.Image | str | os.PathLike[str],
    at: tuple[int, int],
    size: tuple[int, int],
) -> Tensor:
    """The normalised pixels of a region [1, 3, h, w], as `Veca.read` takes them.

    Args:
        at: the first pixel (row, column), multiples of the patch size.
        size: (height, width) in pixels, multiples of the patch size. Patches may reach over the
            picture's edge, where the pass over the whole picture has them reach.
    """
    check_model(model, "veca.large.region")
    source, patch = as_picture(picture), model.config.patch_size
    numbers = [whole(side) for side in (*at, *size)]
    if len(numbers) != 4 or any(n is None or n < 0 or n % patch for n in numbers) or 0 in size:
        raise InputError(
            f"at and size must be (row, column) and (height, width) in multiples of the patch "
            f"size {patch}, got {at!r} and {size!r}."
        )
    grid = patch_grid(source, patch)
    corner, shape = (at[0] // patch, at[1] // patch), (size[0] // patch, size[1] // patch)
    if any(a + s > g for a, s, g in zip(corner, shape, grid, strict=True)):
        height, width = source.shape
        raise InputError(
            f"the region of {size[0]} x {size[1]} pixels at {tuple(at)} lies outside the picture "
            f"of {height} x {width}."
        )
    window = tile_window(source, patch, corner, shape)
    return normalized(window, model.config).to(model.device, model.dtype)


def tile_window(
    picture: Picture, patch_size: int, at: tuple[int, int], shape: tuple[int, int]
) -> Pixels:
    """The pixels of a tile of patches, uint8 [h, w, 3].

    Patches that reach over the picture's edge repeat its last pixels.

    Args:
        at, shape: the first patch (row, column), and how many down and across.
    """
    size = patch_size
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
    return np.pad(window, missing, mode="edge") if np.any(missing) else window


def normalized(window: Pixels, config: VecaConfig) -> Tensor:
    """uint8 [h, w, 3] as the weights want it, float32 [1, 3, h, w]."""
    pixels = torch.from_numpy(window.copy()).permute(2, 0, 1).float().div(255)
    return normalize(pixels, config.image_mean, config.image_std)[None]
