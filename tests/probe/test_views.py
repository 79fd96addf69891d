"""Views: the right pixels, every pixel covered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from veca.probe import ProbeError
from veca.probe.datasets import Crop
from veca.probe.protocol import CropView, WindowView
from veca.probe.views import FrameView, SquareView, Tile, cut, short_side, windows


def gradient(height: int, width: int) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([y % 256, x % 256, (y + x) % 256], axis=2).astype(np.uint8))


class TestSquare:
    def test_a_square_from_the_middle(self):
        image = gradient(32, 48)
        shown = SquareView(CropView(32, 1.0, "bicubic"), 16).show(image)
        expected = torch.from_numpy(np.asarray(image)[:, 8:40].copy()).permute(2, 0, 1)
        assert torch.equal(shown.pixels[0], expected)
        assert shown.size == (32, 48) and shown.frame == (32, 32)

    def test_resized_first(self):
        image = gradient(100, 300)
        shown = SquareView(CropView(224, 0.875, "bicubic"), 16).show(image)
        resized = image.resize((768, 256), Image.Resampling.BICUBIC)
        expected = np.asarray(resized)[16:240, 272:496]
        assert (shown.pixels[0].permute(1, 2, 0).numpy() == expected).all()

    @pytest.mark.parametrize("size", [(17, 400), (400, 17), (1, 1), (33, 32)])
    def test_any_shape(self, size):
        shown = SquareView(CropView(32, 0.9, "bilinear"), 16).show(gradient(*size))
        assert shown.pixels[0].shape == (3, 32, 32)

    def test_off_the_grid(self):
        with pytest.raises(ProbeError, match="208"):
            SquareView(CropView(200, 1.0, "bicubic"), 16)


class TestWindows:
    @settings(max_examples=200, deadline=None)
    @given(
        st.integers(1, 90), st.integers(1, 90), st.integers(1, 60), st.integers(1, 60)
    )  # fmt: skip
    def test_every_pixel_is_covered(self, height, width, window, stride):
        stride = min(stride, window)
        seen = np.zeros((height, width), dtype=int)
        for tile in windows((height, width), window, stride):
            assert tile.height == min(window, height) and tile.width == min(window, width)
            part = seen[tile.top : tile.top + tile.height, tile.left : tile.left + tile.width]
            assert part.shape == (tile.height, tile.width)  # inside the frame
            part += 1
        assert seen.min() >= 1

    def test_published_example(self):
        tops = [tile.top for tile in windows((853, 512), 512, 341)]
        assert tops == [0, 341] and 853 - 512 == 341
        assert [tile.left for tile in windows((512, 704), 512, 341)] == [0, 192]

    def test_one_window_when_it_holds_the_frame(self):
        for window in (0, 64, 100):
            assert windows((64, 48), window, window or 1) == (Tile(0, 0, 64, 48),)


class TestFrame:
    def test_on_the_grid(self):
        view = FrameView(WindowView(48, 0, 0, "bicubic"), 16)
        shown = view.show(gradient(100, 210))
        assert shown.frame == (48, 96) and shown.size == (100, 210)  # 48 x 100.8
        assert shown.pixels[0].shape == (3, 48, 96)

    def test_own_size_and_flip(self):
        view = FrameView(WindowView(0, 0, 0, "bicubic"), 16, None, True)
        image = gradient(32, 48)
        shown = view.show(image)
        assert torch.equal(shown.pixels[0].permute(1, 2, 0), torch.tensor(np.asarray(image)))
        assert torch.equal(shown.pixels[1], shown.pixels[0].flip(-1))
        assert [tile.flipped for tile in shown.tiles] == [False, True]

    def test_cropped_first(self):
        view = FrameView(
            WindowView(0, 0, 0, "bicubic"), 16, Crop("test", "bottom", (16, 32)), False
        )
        shown = view.show(gradient(20, 48))
        assert shown.size == (20, 48) and shown.frame == (16, 32)
        assert shown.pixels[0][0, 0, 0] == 4 and shown.pixels[0][1, 0, 0] == 8

    def test_windows_are_parts_of_the_frame(self):
        view = FrameView(WindowView(0, 32, 20, "bicubic"), 16)
        shown = view.show(gradient(48, 64))
        whole = FrameView(WindowView(0, 0, 0, "bicubic"), 16).show(gradient(48, 64)).pixels[0]
        assert len(shown.tiles) == 2 * 3
        for tile, pixels in zip(shown.tiles, shown.pixels, strict=True):
            assert torch.equal(pixels, cut(whole, tile))

    def test_windows_slide_along_exact_sides(self):
        """Short side 512 and windows of 512, as published: 480 x 640 becomes 512 x 683."""
        view = FrameView(WindowView(512, 512, 341, "bicubic"), 16)
        assert view.frame((480, 640)) == (512, 683)
        assert view.frame((500, 333)) == (769, 512)
        assert view.frame((512, 512)) == (512, 512)
        own_size = FrameView(WindowView(0, 32, 20, "bicubic"), 16)
        assert own_size.frame((45, 27)) == (45, 32)  # 27 is seen whole, and goes onto the grid
        shown = own_size.show(gradient(45, 27))
        assert {tuple(pixels.shape) for pixels in shown.pixels} == {(3, 32, 32)}
        assert [tile.top for tile in shown.tiles] == [0, 13]

    def test_bad_settings(self):
        with pytest.raises(ProbeError, match="size 40"):
            FrameView(WindowView(64, 40, 20, "bicubic"), 16)
        with pytest.raises(ProbeError, match=r"view\.size 8"):
            FrameView(WindowView(8, 0, 0, "bicubic"), 16).frame((100, 100))


def test_short_side_keeps_the_proportions():
    assert short_side(100, 300, 256) == (256, 768)
    assert short_side(300, 100, 50) == (150, 50)
    assert short_side(3, 5, 10) == (10, 17)
