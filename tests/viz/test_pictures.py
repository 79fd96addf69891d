"""Pictures: deterministic, joint colours, the right place for every patch and core."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from veca import viz
from veca.viz.features import joint_colours


def test_equal_features_get_equal_colours_in_every_picture():
    shared = torch.randn(16)
    maps = [torch.randn(16, 3, 4), torch.randn(16, 5, 2)]
    maps[0][:, 1, 2] = shared
    maps[1][:, 4, 0] = shared
    first, second = (np.array(p) for p in viz.feature_pictures(maps))
    assert first.shape == (3, 4, 3) and second.shape == (5, 2, 3)
    assert (first[1, 2] == second[4, 0]).all()
    again = [np.array(p) for p in viz.feature_pictures(maps)]
    assert (again[0] == first).all() and (again[1] == second).all()


def test_colours_do_not_depend_on_the_sign_of_an_eigenvector():
    """Principal directions up to sign, against a plain decomposition."""
    features = torch.randn(200, 8) * torch.arange(1, 9)
    colours = joint_colours([features])[0]
    centred = (features - features.mean(0)).double()
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    for i in range(3):
        direction = directions[i] * directions[i][directions[i].abs().argmax()].sign()
        projected = centred @ direction
        low, high = projected.quantile(0.01), projected.quantile(0.99)
        expected = ((projected - low) / (high - low)).clamp(0, 1).float()
        torch.testing.assert_close(colours[:, i], expected, rtol=1e-4, atol=1e-4)


def test_narrow_and_constant_features_are_drawn_too():
    assert joint_colours([torch.randn(10, 2)])[0].shape == (10, 3)
    assert torch.isfinite(joint_colours([torch.ones(10, 5)])[0]).all()


def test_pictures_scale_patch_by_patch():
    picture = viz.feature_pictures([torch.randn(4, 2, 3)], (20, 30))[0]
    assert picture.size == (30, 20)
    assert len(np.unique(np.array(picture)[:10, :10].reshape(-1, 3), axis=0)) == 1


def test_cores_are_drawn_where_they_are():
    photo = Image.new("RGB", (200, 100), "white")
    picture = np.array(viz.draw_cores(photo, [torch.tensor([[0.5, -0.5]])])).astype(int)
    coloured = np.argwhere(np.ptp(picture, axis=-1) > 50)
    row, column = coloured.mean(axis=0)
    assert abs(column - 150) < 2 and abs(row - 25) < 2


def test_heat_is_brightest_where_the_weight_is():
    weights = torch.zeros(4, 4)
    weights[1, 3] = 0.2
    picture = np.array(viz.heat(Image.new("RGB", (64, 64), "grey"), weights)).astype(int).sum(-1)
    row, column = np.unravel_index(picture.argmax(), picture.shape)
    assert 16 <= row < 32 and 48 <= column < 64
    flat = viz.heat(Image.new("RGB", (8, 8)), torch.zeros(2, 2))
    assert flat.size == (8, 8)


def test_strip_holds_every_picture_at_one_height():
    pictures = [Image.new("RGB", (50, 100), "red"), Image.new("RGB", (300, 60), "blue")]
    row = viz.strip(pictures, ["one", "two"], height=120)
    colours = {colour for _, colour in row.getcolors(10_000)}
    assert (255, 0, 0) in colours and (0, 0, 255) in colours
    assert row.width == 60 + 600 + 3 * 8
