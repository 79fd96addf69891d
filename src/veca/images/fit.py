"""Fitting an image to the patch grid: which size it comes out at.

Sizes are always (height, width) in pixels.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from veca.errors import ImageError, check_choice
from veca.images.read import positive

FITS = ("resize", "pad", "crop", "error")
"""How an image comes onto the patch grid; see `target_size`."""

SHAPES = ("short", "square", "squash")
"""What is kept of an image: all of it in its own shape, the middle, all of it in another shape."""

Size: TypeAlias = "int | tuple[int, int] | None"


def target_size(
    height: int, width: int, size: Size, fit: str, patch_size: int = 16
) -> tuple[int, int]:
    """Return the (height, width) in pixels that a `height` x `width` image is fitted to.

    `size` first scales the image: None keeps it; a whole number becomes the short side, the long
    side keeping the aspect ratio (to the nearest pixel); (height, width) is taken as is, without
    regard to the aspect ratio. `fit` then brings both sides onto the patch grid: "resize" to the
    nearest multiple of `patch_size` (half way goes up; at least one patch), "pad" up, "crop" down,
    and "error" raises unless they are multiples already.
    """
    patch = positive(patch_size, "patch_size")
    check_choice("fit", fit, FITS, ImageError)
    scaled = scaled_size(positive(height, "height"), positive(width, "width"), size, patch)
    if fit == "resize":
        grid = [max(1, (2 * side + patch) // (2 * patch)) for side in scaled]
    elif fit == "pad":
        grid = [-(-side // patch) for side in scaled]
    else:
        grid = [side // patch for side in scaled]
    if fit == "crop" and 0 in grid:
        raise ImageError(
            f"{scaled[0]} x {scaled[1]} pixels cannot be cropped to whole patches of {patch} x "
            f"{patch}; use fit='resize' or fit='pad', or a larger size"
        )
    final = (grid[0] * patch, grid[1] * patch)
    if fit == "error" and final != scaled:
        raise ImageError(
            f"{scaled[0]} x {scaled[1]} pixels is not a whole number of patches of {patch} x "
            f"{patch}; use fit='resize', 'pad' or 'crop', or size=(h, w) in multiples of {patch}"
        )
    return final


def scaled_size(height: int, width: int, size: Size, patch: int) -> tuple[int, int]:
    """The size before the grid is looked at. Integers only: a float ratio could be one off."""
    size = check_size(size, patch)
    if size is None:
        return height, width
    if isinstance(size, tuple):
        return size
    short = min(height, width)
    return (2 * height * size + short) // (2 * short), (2 * width * size + short) // (2 * short)


def centred_box(
    image: tuple[int, int], shape: tuple[int, int]
) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the largest part in the middle that has a shape.

    Args:
        image, shape: (width, height), as Pillow has it.
    """
    scale = min(image[0] / shape[0], image[1] / shape[1])
    width, height = min(image[0], shape[0] * scale), min(image[1], shape[1] * scale)
    left, top = (image[0] - width) / 2, (image[1] - height) / 2
    return left, top, left + width, top + height


def check_size(size: Any, patch: int) -> Size:
    """`size` in plain numbers, if it is one that `target_size` takes."""
    if size is None:
        return None
    pair = isinstance(size, (tuple, list))
    if pair and len(size) != 2:
        raise ImageError(f"size={size!r} has {len(size)} entries, expected (height, width)")
    sides = [
        positive(side, "size (short side or (height, width))")
        for side in (size if pair else (size,))
    ]
    if min(sides) < patch:
        raise ImageError(f"size={size!r} is below one patch; expected at least {patch} pixels")
    return (sides[0], sides[1]) if pair else sides[0]
