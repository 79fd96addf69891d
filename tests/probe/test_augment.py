"""Random training views: what they are made of, and that the seed decides."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from PIL import Image

from veca.probe import load_protocol
from veca.probe.augment import random_box, random_depth, random_segment, random_square
from veca.probe.datasets import Crop

SEG = load_protocol("dinov3-ade20k").segmentation.augment
PLAIN = dataclasses.replace(SEG, crop=32, flip=0.0, colour_probability=0.0, scale=(1.0, 1.0))
DEPTH = load_protocol("dinov3-nyu").depth.augment
STILL = dataclasses.replace(
    DEPTH, crop=(32, 48), flip=0.0, rotate_probability=0.0, colour_probability=0.0
)


def rng(seed: int = 0):
    return np.random.default_rng(seed)


def coded(height: int, width: int) -> tuple[Image.Image, np.ndarray]:
    """Pixels that carry their label: red is 10 times the label."""
    mask = rng(5).integers(0, 20, (height // 8 + 1, width // 8 + 1)).astype(np.uint8)
    mask = mask.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]
    pixels = np.stack([mask * 10, mask * 0, mask * 0], axis=2).astype(np.uint8)
    return Image.fromarray(pixels), mask


class TestSquare:
    def test_boxes_are_inside_and_in_range(self):
        random = rng()
        for _ in range(300):
            left, top, width, height = random_box(60, 40, (0.08, 1.0), (0.75, 4 / 3), random)
            assert left >= 0 and top >= 0 and left + width <= 60 and top + height <= 40
            assert 0.05 <= width * height / 2400 <= 1.0
            assert 0.6 <= width / height <= 1.6

    @pytest.mark.parametrize("size", [(1, 500), (500, 1), (1, 1)])
    def test_slivers(self, size):
        left, top, width, height = random_box(*size, (0.5, 1.0), (0.75, 4 / 3), rng())
        assert width >= 1 and height >= 1 and left + width <= size[0] and top + height <= size[1]

    def test_shape_and_seed(self):
        settings = load_protocol("dinov3-imagenet-linear").linear.augment
        image = Image.fromarray(rng().integers(0, 255, (50, 70, 3)).astype(np.uint8))
        a, b, c = (random_square(image, settings, 32, "bicubic", rng(seed)) for seed in (0, 0, 1))
        assert a.shape == (3, 32, 32) and (a == b).all() and (a != c).any()


class TestSegment:
    def test_pixels_and_labels_stay_together(self):
        image, mask = coded(64, 80)
        for seed in range(10):
            settings = dataclasses.replace(PLAIN, flip=0.5, max_class_share=1.0)
            pixels, labels = random_segment(image, mask, settings, 64, "bicubic", 255, rng(seed))
            assert pixels.shape == (3, 32, 32) and labels.shape == (32, 32)
            assert (pixels[0].numpy() == 10 * labels.numpy()).all()

    def test_small_images_are_padded_with_ignored_pixels(self):
        image, mask = coded(20, 24)
        pixels, labels = random_segment(image, mask, PLAIN, 20, "bicubic", 255, rng())
        assert (labels[20:] == 255).all() and (labels[:, 24:] == 255).all()
        assert (labels[:20, :24] != 255).all()
        assert pixels[:, 30, 30].tolist() == [124, 116, 104]  # the mean colour

    def test_a_crop_of_one_class_is_drawn_again(self):
        mask = np.zeros((64, 200), dtype=np.uint8)
        mask[:, 150:] = 1
        image = Image.fromarray(np.zeros((64, 200, 3), dtype=np.uint8))
        shares = {}
        for share in (0.75, 1.0):
            settings = dataclasses.replace(PLAIN, max_class_share=share, crop_tries=50)
            found = [
                random_segment(image, mask, settings, 64, "bicubic", 255, rng(seed))[1]
                for seed in range(20)
            ]
            shares[share] = np.mean([((x == 0).float().mean() > 0.75) for x in found])
        assert shares[0.75] == 0 and shares[1.0] > 0.4

    def test_scales(self):
        image, mask = coded(64, 64)
        settings = dataclasses.replace(PLAIN, scale=(0.25, 0.25))
        _, labels = random_segment(image, mask, settings, 64, "bicubic", 255, rng())
        assert int((labels != 255).sum()) == 16 * 16

    def test_colours_change_labels_do_not(self):
        image, mask = coded(64, 64)
        settings = dataclasses.replace(PLAIN, colour_probability=1.0, max_class_share=1.0)
        pixels, labels = random_segment(image, mask, settings, 64, "bicubic", 255, rng(1))
        plain, same = random_segment(
            image,
            mask,
            dataclasses.replace(PLAIN, max_class_share=1.0),
            64,
            "bicubic",
            255,
            rng(1),
        )
        assert (pixels != plain).any() and (labels == same).all()

    def test_seed(self):
        image, mask = coded(64, 80)
        runs = [random_segment(image, mask, SEG, 64, "bicubic", 255, rng(s)) for s in (0, 0, 1)]
        assert (runs[0][0] == runs[1][0]).all() and (runs[0][1] == runs[1][1]).all()
        assert (runs[0][0] != runs[2][0]).any()


class TestDepth:
    def scene(self, height=60, width=90):
        depth = rng(3).uniform(1, 9, (height, width)).astype(np.float32)
        depth[:3] = np.nan
        pixels = np.zeros((height, width, 3), dtype=np.uint8)
        pixels[..., 0] = np.nan_to_num(depth * 20)
        return Image.fromarray(pixels), depth

    def test_pixels_and_depth_stay_together(self):
        image, depth = self.scene()
        settings = dataclasses.replace(STILL, flip=0.5)
        for seed in range(10):
            pixels, truth = random_depth(image, depth, settings, None, 0, "bicubic", rng(seed))
            assert pixels.shape == (3, 32, 48) and truth.shape == (32, 48)
            known = ~truth.isnan()
            assert ((truth[known] * 20).floor() == pixels[0][known]).all()

    def test_the_border_is_cut_first(self):
        image, depth = self.scene()
        crop = Crop("border", "pixels", (20, 60, 30, 90), (60, 90))
        settings = dataclasses.replace(STILL, crop=(40, 60))
        _, truth = random_depth(image, depth, settings, crop, 0, "bicubic", rng())
        np.testing.assert_array_equal(truth.numpy(), depth[20:60, 30:90])

    def test_turning_makes_corners_invalid_and_invents_no_depth(self):
        image, depth = self.scene()
        settings = dataclasses.replace(STILL, rotate_probability=1.0, rotate=20.0, crop=(60, 90))
        _, truth = random_depth(image, depth, settings, None, 0, "bicubic", rng(2))
        values = truth.numpy()
        assert np.isnan(values).sum() > np.isnan(depth).sum()
        assert np.isin(values[~np.isnan(values)], depth).all()

    def test_resized_depth_stays_metres(self):
        image, depth = self.scene()
        settings = dataclasses.replace(STILL, crop=(120, 180))
        for short in (0, 120):
            pixels, truth = random_depth(image, depth, settings, None, short, "bicubic", rng())
            assert pixels.shape == (3, 120, 180)
            assert np.isin(truth[~truth.isnan()].numpy(), depth).all()

    def test_seed(self):
        image, depth = self.scene()
        settings = dataclasses.replace(DEPTH, crop=(32, 48))
        runs = [random_depth(image, depth, settings, None, 0, "bicubic", rng(s)) for s in (0, 0, 1)]
        assert (runs[0][0] == runs[1][0]).all() and (runs[0][0] != runs[2][0]).any()
