"""From images to the batch a model takes: read, fitted, normalised."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca._util.memory import forward_bytes, too_large
from veca._util.numbers import count
from veca.config import DEFAULT_SIZE
from veca.errors import ImageError, VecaWarning, check_choice
from veca.images.fit import (
    FITS,
    SHAPES,
    Size,
    centred_box,
    check_size,
    scaled_size,
    target_size,
)
from veca.images.read import Source, check_area, checked_limit, name_of, positive, read_named

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_MUCH = 2**30
"""Bytes, and by how much the pixels are multiplied: above both, an enlarged image is a warning."""
_BLOWN_UP = 16
"""With `IMAGENET_MEAN`: of pixels in 0..1, by channel (R, G, B)."""

Box: TypeAlias = "tuple[int, int, int, int]"


def to_tensor(image: Image.Image) -> Tensor:
    """Return an RGB image (as `read_image` gives it) as float32 [3, H, W] in 0..1."""
    if not isinstance(image, Image.Image) or image.mode != "RGB" or 0 in image.size:
        raise ImageError(f"to_tensor takes an RGB image with pixels, got {image!r}; use read_image")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255).contiguous()


def normalize(
    pixels: Tensor,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Tensor:
    """Return `(pixels - mean) / std` per channel, for float pixels [..., 3, H, W] in 0..1."""
    mean_, std_ = _channel_stats(pixels, mean, std)
    return (pixels - mean_) / std_


def denormalize(
    pixels: Tensor,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Tensor:
    """Undo `normalize`: return `pixels * std + mean`, unclipped, for float [..., 3, H, W]."""
    mean_, std_ = _channel_stats(pixels, mean, std)
    return pixels * std_ + mean_


def _channel_stats(
    pixels: Tensor, mean: Sequence[float], std: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return mean and std as [3, 1, 1], of the dtype and on the device of `pixels`."""
    if not pixels.is_floating_point():
        raise ImageError(
            f"pixels of dtype {pixels.dtype}, expected a float tensor in 0..1; divide by 255 first"
        )
    if pixels.ndim < 3 or pixels.shape[-3] != 3:
        raise ImageError(f"pixels of shape {list(pixels.shape)}, expected [..., 3, height, width]")
    try:
        mean_ = torch.tensor([float(v) for v in mean]).to(pixels).view(3, 1, 1)
        std_ = torch.tensor([float(v) for v in std]).to(pixels).view(3, 1, 1)
    except (TypeError, ValueError, RuntimeError):
        mean_ = std_ = torch.full((3, 1, 1), math.nan)
    if not (mean_.isfinite().all() and std_.isfinite().all() and std_.min() > 0):
        raise ImageError(
            f"mean={mean!r} and std={std!r}: expected three finite numbers each, std above 0"
        )
    return mean_, std_


@dataclass(frozen=True, eq=False, repr=False)
class Preprocessed:
    """A batch ready for the model, and what was done to get it."""

    pixels: Tensor
    """[B, 3, H, W] float32, normalised."""
    grid: tuple[int, int]
    """Patches (down, across): (H / patch_size, W / patch_size)."""
    names: list[str]
    """One per image: its path, or what kind of object it was and its place in the input."""
    original_sizes: list[tuple[int, int]]
    """(height, width) of each upright image as it was read."""
    valid: tuple[int, int]
    """(height, width) of the top-left area of `pixels` that holds image; the rest is padding."""
    crop_box: list[Box]
    """(left, top, right, bottom) of each image after scaling: what was kept of it. The whole image
    unless fit="crop"."""
    skipped: list[tuple[str, str]]
    """(name, message) of each image left out by on_error="skip"."""

    def __repr__(self) -> str:
        """A line: the pixels stay out of a notebook's way."""
        shape, (height, width) = list(self.pixels.shape), self.grid
        kind = f"{str(self.pixels.dtype).removeprefix('torch.')}, {self.pixels.device}"
        left_out = f", {len(self.skipped)} skipped" if self.skipped else ""
        return f"Preprocessed(pixels {shape}, grid {height} x {width}, {kind}{left_out})"

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Preprocessed:
        """Return the same batch with `pixels` on `device` and of `dtype`."""
        return replace(self, pixels=self.pixels.to(device=device, dtype=dtype))


def preprocess(
    images: Source | Iterable[Source],
    size: Size = DEFAULT_SIZE,
    *,
    model: object = None,
    fit: str = "resize",
    patch_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    max_pixels: int | None = None,
    on_error: str = "raise",
) -> Preprocessed:
    """Read one image or several, fit them to the patch grid and normalise them into one batch.

    Mean, deviation and patch size are those that `model` wants, unless they are given: a model of
    this package or its configuration. Without one they are ImageNet's, and 16.

    `size` and `fit` mean what they mean in `target_size`: the short side, by default
    `veca.config.DEFAULT_SIZE`, (height, width), or None for each image's own.
    Images are resampled at most once (bicubic, antialiased). "pad" adds the mean colour (0 once
    normalised) at the right and the bottom, see `valid`; "crop" cuts less than one patch from each
    dimension, half on either side, see `crop_box`. `max_pixels` holds before decoding
    and for the fitted image.

    With on_error="skip" images that cannot be read are left out and listed in `skipped`; images
    that can be read but not fitted still raise.

    Raises:
        ImageError: an image cannot be read or fitted, none could be read, or they do not come out
            at one size.
    """
    check_choice("fit", fit, FITS, ImageError)
    check_choice("on_error", on_error, ("raise", "skip"), ImageError)
    own_patch, own_mean, own_std = _wanted_by(model)
    mean, std = own_mean if mean is None else mean, own_std if std is None else std
    patch_size = own_patch if patch_size is None else patch_size
    patch, limit = positive(patch_size, "patch_size"), checked_limit(max_pixels)
    check_size(size, patch)

    batch: list[Tensor] = []
    names: list[str] = []
    originals: list[tuple[int, int]] = []
    valids: list[tuple[int, int]] = []
    boxes: list[Box] = []
    skipped: list[tuple[str, str]] = []
    for name, source in _named(images):
        try:
            image = read_named(source, name, limit)
        except ImageError as error:
            if on_error == "raise":
                raise
            skipped.append((name, str(error)))
            continue
        try:
            pixels, box = _scale_and_crop(image, size, fit, patch, limit, model)
        except ImageError as error:
            raise ImageError(f"{name}: {error}") from None
        names.append(name)
        originals.append((image.height, image.width))
        boxes.append(box)
        valids.append((pixels.shape[1], pixels.shape[2]))
        # Padding follows normalisation, where the mean colour is exactly zero.
        padding = (0, -pixels.shape[2] % patch, 0, -pixels.shape[1] % patch)
        batch.append(torch.nn.functional.pad(normalize(pixels, mean, std), padding))
        # `valid` is one pair for the batch, so padded images have to agree in it as well. Checked
        # here and not at the end: a folder of mixed photos should not be read to the last first.
        if valids[-1] != valids[0]:
            (a, b), (c, d) = valids[0], valids[-1]
            raise ImageError(
                f"images of one batch must have one size, but {names[0]} comes out at {a} x {b} "
                f"pixels and {name} at {c} x {d}{' (before padding)' if fit == 'pad' else ''}; "
                f"pass size=(h, w), or process them one at a time"
            )

    if not batch and not skipped:
        raise ImageError("no images given; expected at least one")
    if not batch:
        raise ImageError(
            f"none of {count(len(skipped), 'image')} can be read; the first: {skipped[0][1]}"
        )
    grid = (batch[0].shape[1] // patch, batch[0].shape[2] // patch)
    return Preprocessed(torch.stack(batch), grid, names, originals, valids[0], boxes, skipped)


@dataclass(frozen=True, repr=False)
class ImageTransform:
    """From one image to the tensor [3, H, W] that a model takes: for a `Dataset`.

    Made by `model.transform(size)`. It can be sent to the workers of a `DataLoader`.

    >>> ImageFolder("photos", transform=model.transform(224))
    """

    size: int | tuple[int, int] = DEFAULT_SIZE
    """Pixels: both sides, or (height, width); with the shape "short" one number is the short side.
    Brought to the nearest multiples of the patch size."""
    shape: str = "square"
    """"square": the largest part in the middle that has the shape of the result. "squash": the
    whole image, whatever its shape. "short": the whole image in its own shape, so that images of
    different shapes do not make one batch."""
    patch_size: int = 16
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    max_pixels: int | None = None
    """As in `read_image`."""

    def __post_init__(self) -> None:
        check_choice("shape", self.shape, SHAPES, ImageError)
        size = check_size(self.size, positive(self.patch_size, "patch_size"))
        if size is None:
            raise ImageError("size is the side of the images in pixels, or (height, width)")
        object.__setattr__(self, "size", size)
        normalize(torch.zeros(3, 1, 1), self.mean, self.std)  # says what is wrong with these two
        checked_limit(self.max_pixels)

    def __call__(self, image: Source) -> Tensor:
        """float32 [3, H, W], normalised, of a path, a Pillow image or what else `read_image` takes.

        Each image is resampled at most once (bicubic, antialiased).
        """
        limit, name = checked_limit(self.max_pixels), name_of(image)
        picture = read_named(image, name, limit)
        try:
            if self.shape == "short":
                pixels, _ = _scale_and_crop(picture, self.size, "resize", self.patch_size, limit)
            else:
                pixels = to_tensor(self._shaped(picture, limit))
        except ImageError as error:
            raise ImageError(f"{name}: {error}") from None
        return normalize(pixels, self.mean, self.std)

    def _sides(self) -> tuple[int, int]:
        """(height, width) of what comes out, on the patch grid."""
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size
        return target_size(height, width, None, "resize", self.patch_size)

    def _shaped(self, image: Image.Image, limit: int) -> Image.Image:
        height, width = self._sides()
        check_area(width, height, limit)
        box = None if self.shape == "squash" else centred_box(image.size, (width, height))
        if image.size == (width, height):
            return image
        return image.resize((width, height), Image.Resampling.BICUBIC, box=box)

    def __repr__(self) -> str:
        if self.shape == "short" and isinstance(self.size, int):
            size = f"short side {self.size}"
        else:
            size = "{} x {}".format(*self._sides())
        mean, std = ((round(v, 4) for v in values) for values in (self.mean, self.std))
        return f"ImageTransform({size}, {self.shape}, mean {(*mean,)}, std {(*std,)})"


def check_memory(model: Any, original: tuple[int, int], final: tuple[int, int]) -> None:
    """Refuse an image that a model (or its configuration) has no memory for, before it is fitted.

    Sizes are (height, width). One that takes more than half of it is a warning, as is a small one
    that is enlarged until it takes more than a gigabyte.
    """
    needed = forward_bytes(getattr(model, "config", model), *final)
    device = getattr(model, "device", "cpu")
    (h, w), (height, width) = original, final
    blown_up = needed > _MUCH and height * width > _BLOWN_UP * h * w
    much = too_large(needed, device, share=0.0 if blown_up else 0.5)
    if much is None:
        return
    says = (
        f"an image of {h} x {w}, fitted to {height} x {width} pixels, needs {much}; use a smaller "
        "size, or (height, width), which gives long strips another shape"
    )
    if too_large(needed, device):
        raise ImageError(says)
    warnings.warn(f"{says}.", VecaWarning, stacklevel=2)


def _wanted_by(model: object) -> tuple[int, Sequence[float], Sequence[float]]:
    """Patch size, mean and deviation that a model wants of its images."""
    if model is None:
        return 16, IMAGENET_MEAN, IMAGENET_STD
    config: Any = getattr(model, "config", model)
    try:
        return config.patch_size, config.image_mean, config.image_std
    except AttributeError:
        load = f"veca.load({model!r})" if isinstance(model, str) else "veca.load(...)"
        raise ImageError(
            f"model must be a model of this package or its configuration, got "
            f"{type(model).__name__}; pass {load}"
        ) from None


def _named(images: Source | Iterable[Source]) -> Iterator[tuple[str, Source]]:
    """Yield (name, source) of one source or of each in an iterable."""
    single = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image, np.ndarray, Tensor)
    if isinstance(images, (np.ndarray, Tensor)) and images.ndim == 4:  # a batch
        images = list(images)
    # A file object is iterable too, by line.
    if isinstance(images, single) or hasattr(images, "read") or not isinstance(images, Iterable):
        yield name_of(images), cast(Source, images)
        return
    for index, source in enumerate(images):
        yield name_of(source, index), source


def _scale_and_crop(
    image: Image.Image, size: Size, fit: str, patch: int, max_pixels: int, model: object = None
) -> tuple[Tensor, Box]:
    """Return the pixels to show, [3, h, w] in 0..1 and not yet padded, and the box they are."""
    final = target_size(image.height, image.width, size, fit, patch)
    # A sliver of 1 x 100,000 pixels with its short side scaled to 224 would be 5 Gpixel.
    check_area(final[1], final[0], max_pixels)
    if model is not None:
        check_memory(model, (image.height, image.width), final)
    scaled = final if fit == "resize" else scaled_size(image.height, image.width, size, patch)
    if scaled != (image.height, image.width):
        image = image.resize((scaled[1], scaled[0]), Image.Resampling.BICUBIC)
    height, width = min(final[0], scaled[0]), min(final[1], scaled[1])
    top, left = (scaled[0] - height) // 2, (scaled[1] - width) // 2
    box = (left, top, left + width, top + height)
    return to_tensor(image)[:, top : top + height, left : left + width], box
