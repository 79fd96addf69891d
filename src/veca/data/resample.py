"""Cut a box out of an image and bring it to a size: once by Pillow, once in batches on a GPU.

The definition is Pillow's `Image.resize(size, BICUBIC, box=box)`: a separable cubic filter
(a = -0.5) widened by the scale when shrinking (so antialiased), which may reach beyond the box
into the rest of the image, rounded to 8 bits after the horizontal and after the vertical pass.

On a CPU that very call is made, image by image. Elsewhere the whole batch is two matrix products
with banded weights, one row of taps per output pixel and image, so every image has its own box and
flip at no extra cost, and the teacher's view is cut from the same box at its own size. There the
products are float16, in which 8-bit pixels are exact and the weights nearly: about 8 % of the
pixels are one grey level off, and fewer than one in a thousand two.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

Size = tuple[int, int]


def copy_to_device(array: NDArray, device: torch.device) -> Tensor:
    """A small numpy array on `device`, without making the host wait for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    if device.type == "mps" and tensor.dtype == torch.float64:
        tensor = tensor.float()
    return tensor.to(device)


def crop_resize(image: Image.Image, box: NDArray, flip: bool, size: Size) -> NDArray[np.uint8]:
    """One view, uint8 [3, h, w], of an RGB image.

    Args:
        box: (left, top, right, bottom) as fractions of the image's width and height.
        flip: mirror left and right after cutting.
        size: (height, width) of the view.
    """
    width, height = image.size
    left, top, right, bottom = (float(side) for side in box)
    pixels = (left * width, top * height, min(right, 1) * width, min(bottom, 1) * height)
    view = image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=pixels)
    array = np.asarray(view)
    if flip:
        array = array[:, ::-1]
    return np.ascontiguousarray(array.transpose(2, 0, 1))


def crop_resize_batch(images: Tensor, boxes: NDArray, flips: NDArray, size: Size) -> Tensor:
    """Views uint8 [B, 3, h, w] of a batch uint8 [B, 3, H, W], on its device; see `crop_resize`."""
    if images.device.type != "cpu":
        return banded_products(images, boxes, flips, size, torch.float16)
    views = [
        # Joining three planes is faster than bringing the colours of each pixel together first.
        crop_resize(Image.merge("RGB", [Image.fromarray(p) for p in planes]), box, bool(flip), size)
        for planes, box, flip in zip(images.numpy(), boxes, flips, strict=True)
    ]
    return torch.from_numpy(np.stack(views)) if views else images.new_empty((0, 3, *size))


def banded_products(
    images: Tensor, boxes: NDArray, flips: NDArray, size: Size, dtype: torch.dtype
) -> Tensor:
    """`crop_resize_batch` as two matrix products in `dtype`; nothing loops over the images."""
    batch, channels, height, width = images.shape
    out = images.new_empty((batch, channels, *size))
    with torch.autocast(images.device.type, enabled=False):
        left, top, right, bottom = boxes.T * np.array([[width], [height], [width], [height]])
        # A line read from its end to its start is the mirrored view.
        start, stop = np.where(flips, right, left), np.where(flips, left, right)
        across = _taps(start, stop, width, size[1], images, dtype)
        rows = images.to(dtype).reshape(batch, channels * height, width)
        rows = _to_levels(torch.bmm(rows, across.transpose(1, 2)))
        rows = rows.view(batch, channels, height, size[1])
        down = _taps(top, bottom, height, size[0], images, dtype)
        for channel in range(channels):
            out[:, channel] = _to_levels(torch.bmm(down, rows[:, channel]))
    return out


def _to_levels(values: Tensor) -> Tensor:
    """Round half up and clip to 0..255, in place, as Pillow does after each pass."""
    return values.add_(0.5).floor_().clamp_(0, 255)


def _taps(
    start: NDArray, stop: NDArray, inside: int, outside: int, like: Tensor, dtype: torch.dtype
) -> Tensor:
    """Weights [B, outside, inside] that resample pixels start..stop of a line to `outside`."""
    scale = (stop - start) / outside
    support = 2 * np.maximum(np.abs(scale), 1)
    count = min(inside, 2 * math.ceil(support.max(initial=2)) + 1)
    # Positions need more than float32: at pixel 2000 it resolves only a ten-thousandth.
    line = copy_to_device(np.stack([start, scale, support]), like.device)[:, :, None]
    begin, step, reach = line[0], line[1], line[2]
    centre = begin + (torch.arange(outside, device=like.device) + 0.5) * step
    first = (centre - reach + 0.5).floor().clamp(0, inside - count)
    places = first[..., None] + torch.arange(count, device=like.device)
    weights = _cubic(((places + 0.5 - centre[..., None]) * (2 / reach[..., None])).abs())
    weights = weights / weights.sum(-1, keepdim=True)
    band = torch.zeros((len(start), outside, inside), dtype=dtype, device=like.device)
    return band.scatter_(2, places.long(), weights.to(dtype))


def _cubic(distance: Tensor) -> Tensor:
    """The cubic convolution kernel with a = -0.5 at a distance of 0 or more."""
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
