"""Cutting and resizing against Pillow and against torch's own antialiased interpolation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from veca.data.resample import banded_products, crop_resize, crop_resize_batch


def batch(count: int, height: int, width: int) -> torch.Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.integers(0, 256, (count, 3, height, width), dtype=np.uint8))


def boxes(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    low = rng.uniform(0, 0.5, (count, 2))
    high = low + rng.uniform(0.1, 0.5, (count, 2))
    made = np.concatenate([low, high], axis=1)
    made[0] = (0, 0, 1, 1)
    return made, rng.random(count) < 0.5


@pytest.mark.parametrize("size", [(16, 16), (24, 40), (7, 5), (80, 64)])
def test_products_give_pillows_pixels(size: tuple[int, int]) -> None:
    images, (cuts, flips) = batch(9, 50, 70), boxes(9)
    wanted = crop_resize_batch(images, cuts, flips, size).int()
    exact = banded_products(images, cuts, flips, size, torch.float32).int()
    difference = (exact - wanted).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.001  # ties that float32 rounds the other way
    half = (banded_products(images, cuts, flips, size, torch.float16).int() - wanted).abs()
    assert half.max() <= 2
    assert (half > 0).float().mean() < 0.15 and (half > 1).float().mean() < 0.005


def test_the_definition_is_pillows_resize_of_a_box() -> None:
    image = Image.fromarray(batch(1, 40, 60)[0].permute(1, 2, 0).numpy())
    box = np.array([0.1, 0.25, 0.85, 0.9])
    wanted = np.asarray(
        image.resize((16, 12), Image.Resampling.BICUBIC, box=(6.0, 10.0, 51.0, 36.0))
    )
    seen = crop_resize(image, box, False, (12, 16))
    assert np.array_equal(seen.transpose(1, 2, 0), wanted)
    mirrored = crop_resize(image, box, True, (12, 16))
    assert np.array_equal(mirrored, seen[:, :, ::-1])


def test_shrinking_a_whole_image_is_antialiased_interpolation() -> None:
    images = batch(3, 64, 96)
    whole, flips = np.tile([0.0, 0.0, 1.0, 1.0], (3, 1)), np.zeros(3, bool)
    wanted = F.interpolate(images.double(), (20, 30), mode="bicubic", antialias=True)
    for seen in (
        crop_resize_batch(images, whole, flips, (20, 30)),
        banded_products(images, whole, flips, (20, 30), torch.float32),
    ):
        # Half a level by the last rounding, and a little more by the one between the passes.
        assert (seen.double() - wanted.clamp(0, 255)).abs().max() < 1.1


def test_a_whole_pixel_box_at_its_own_size_is_a_plain_crop() -> None:
    images = batch(2, 32, 48)
    cuts = np.array([[8 / 48, 4 / 32, 24 / 48, 28 / 32], [0, 8 / 32, 16 / 48, 1.0]])
    flips = np.array([False, True])
    wanted = torch.stack([images[0, :, 4:28, 8:24], images[1, :, 8:32, 0:16].flip(-1)])
    assert torch.equal(crop_resize_batch(images, cuts, flips, (24, 16)), wanted)
    assert torch.equal(banded_products(images, cuts, flips, (24, 16), torch.float32), wanted)


def test_autocast_does_not_touch_the_pixels() -> None:
    images, (cuts, flips) = batch(3, 40, 40), boxes(3)
    wanted = banded_products(images, cuts, flips, (16, 16), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(banded_products(images, cuts, flips, (16, 16), torch.float32), wanted)


def test_an_empty_batch_stays_empty() -> None:
    none = np.zeros((0, 4)), np.zeros(0, bool)
    assert crop_resize_batch(batch(0, 8, 8), *none, (4, 6)).shape == (0, 3, 4, 6)
    assert banded_products(batch(0, 8, 8), *none, (4, 6), torch.float32).shape == (0, 3, 4, 6)
