"""Random training views, each drawn from its own random numbers: the same seed, the same pixels,
whichever thread makes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.probe.datasets import Crop
from veca.probe.protocol import CropAugment, DepthAugment, SegmentationAugment
from veca.probe.views import resize, short_side, to_uint8

Array = np.ndarray[Any, Any]
Random = np.random.Generator


def random_square(
    image: Image.Image, settings: CropAugment, size: int, interpolation: str, random: Random
) -> Tensor:
    """A random resized crop, perhaps mirrored: uint8 [3, size, size]."""
    left, top, width, height = random_box(
        image.width, image.height, settings.scale, settings.ratio, random
    )
    part = image.crop((left, top, left + width, top + height))
    pixels = to_uint8(resize(part, (size, size), interpolation))
    return pixels.flip(-1) if random.random() < settings.flip else pixels


def random_box(
    width: int,
    height: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    random: Random,
) -> tuple[int, int, int, int]:
    """(left, top, width, height) of a box with a random share of the area and a random shape.

    Ten tries; an image too slim for all of them gives its middle, in the nearest allowed shape.
    """
    for _ in range(10):
        area = width * height * random.uniform(*scale)
        shape = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.integers(width - w + 1), random.integers(height - h + 1)
            return int(left), int(top), w, h
    shape = min(max(width / height, ratio[0]), ratio[1])
    w = min(width, max(1, round(height * shape)))
    h = min(height, max(1, round(width / shape)))
    return (width - w) // 2, (height - h) // 2, w, h


def random_segment(
    image: Image.Image,
    mask: Array,
    settings: SegmentationAugment,
    short: int,
    interpolation: str,
    ignore: int,
    random: Random,
) -> tuple[Tensor, Tensor]:
    """Scaled, cropped, mirrored and recoloured: uint8 [3, crop, crop], uint8 [crop, crop].

    The mask is resized to its nearest pixels; that is for training only, scores never are.
    """
    target = max(1, round(short * random.uniform(*settings.scale)))
    size = short_side(image.height, image.width, target)
    pixels = np.asarray(resize(image, size, interpolation))
    labels = np.asarray(Image.fromarray(mask).resize((size[1], size[0]), Image.Resampling.NEAREST))
    pixels, labels = _pad(pixels, labels, settings, ignore)
    side = settings.crop
    for _ in range(settings.crop_tries):
        top = int(random.integers(labels.shape[0] - side + 1))
        left = int(random.integers(labels.shape[1] - side + 1))
        part = labels[top : top + side, left : left + side]
        counts = np.bincount(part[part != ignore].astype(np.int64))
        if counts.size and counts.max() <= settings.max_class_share * counts.sum():
            break
    cropped = pixels[top : top + side, left : left + side]
    if random.random() < settings.flip:
        cropped, part = cropped[:, ::-1], part[:, ::-1]
    coloured = _distort(np.ascontiguousarray(cropped), settings, random)
    return to_uint8(coloured), torch.from_numpy(part.copy())


def _pad(
    pixels: Array, labels: Array, settings: SegmentationAugment, ignore: int
) -> tuple[Array, Array]:
    down = max(0, settings.crop - labels.shape[0])
    right = max(0, settings.crop - labels.shape[1])
    if not down and not right:
        return pixels, labels
    colour = np.round(np.array(settings.pad_colour) * 255).astype(np.uint8)
    height, width = labels.shape
    padded = np.empty((height + down, width + right, 3), dtype=np.uint8)
    padded[:] = colour
    padded[:height, :width] = pixels
    return padded, np.pad(labels, ((0, down), (0, right)), constant_values=ignore)


def _distort(pixels: Array, s: SegmentationAugment, random: Random) -> Array:
    """Brightness, contrast, saturation and hue, each with its probability; contrast first or
    last."""

    def chance() -> bool:
        return bool(random.random() < s.colour_probability)

    def scaled(values: Array, factor: float, shift: float = 0.0) -> Array:
        return np.clip(values.astype(np.float32) * factor + shift, 0, 255).astype(np.uint8)

    if chance():
        pixels = scaled(pixels, 1.0, 255 * random.uniform(-s.brightness, s.brightness))
    contrast_first = random.random() < 0.5
    if contrast_first and chance():
        pixels = scaled(pixels, random.uniform(*s.contrast))
    saturate, turn = chance(), chance()
    if saturate or turn:
        hsv = np.array(Image.fromarray(pixels).convert("HSV"))
        if saturate:
            hsv[..., 1] = scaled(hsv[..., 1], random.uniform(*s.saturation))
        if turn:
            shift = round(256 * random.uniform(-s.hue, s.hue))
            hsv[..., 0] = ((hsv[..., 0].astype(np.int32) + shift) % 256).astype(np.uint8)
        pixels = np.asarray(Image.fromarray(hsv, mode="HSV").convert("RGB"))
    if not contrast_first and chance():
        pixels = scaled(pixels, random.uniform(*s.contrast))
    return pixels


def random_depth(
    image: Image.Image,
    depth: Array,
    settings: DepthAugment,
    train_crop: Crop | None,
    short: int,
    interpolation: str,
    random: Random,
) -> tuple[Tensor, Tensor]:
    """Cut, turned, mirrored and recoloured: uint8 [3, H, W] and float32 [H, W], nan invalid.

    The image is resized to the short side `short` (0: not), and one smaller than the crop is
    enlarged to it; depth takes its nearest pixels, and metres stay metres.
    """
    if train_crop is not None:
        top, bottom, left, right = train_crop.box(image.height, image.width)
        image = image.crop((left, top, right, bottom))
        depth = depth[top:bottom, left:right]
    if random.random() < settings.rotate_probability:
        angle = random.uniform(-settings.rotate, settings.rotate)
        image = image.rotate(angle, Image.Resampling.BILINEAR)
        stored = Image.fromarray(np.nan_to_num(depth, nan=0.0).astype(np.float32))
        turned = np.asarray(stored.rotate(angle, Image.Resampling.NEAREST, fillcolor=0))
        depth = np.where(turned > 0, turned, np.float32(np.nan))
    height, width = settings.crop
    size = short_side(image.height, image.width, short) if short else (image.height, image.width)
    factor = max(1.0, height / size[0], width / size[1])
    size = math.ceil(size[0] * factor), math.ceil(size[1] * factor)
    if size != (image.height, image.width):
        image = resize(image, size, interpolation)
        stored = Image.fromarray(depth.astype(np.float32))
        depth = np.asarray(stored.resize((size[1], size[0]), Image.Resampling.NEAREST))
    top = int(random.integers(image.height - height + 1))
    left = int(random.integers(image.width - width + 1))
    pixels = np.asarray(image)[top : top + height, left : left + width]
    depth = depth[top : top + height, left : left + width]
    if random.random() < settings.flip:
        pixels, depth = pixels[:, ::-1], depth[:, ::-1]
    if random.random() < settings.colour_probability:
        values = (pixels.astype(np.float32) / 255) ** random.uniform(*settings.gamma)
        values *= random.uniform(*settings.brightness)
        values *= random.uniform(*settings.colour, size=3).astype(np.float32)
        pixels = (np.clip(values, 0, 1) * 255).round().astype(np.uint8)
    return to_uint8(pixels), torch.from_numpy(np.array(depth, dtype=np.float32))
