"""What is measured of photos, beside the package's own passes."""

from __future__ import annotations

import pytest
import torch

import veca
from research import content
from research.elastic import agreement
from veca.merging import unlikeness

CONFIG = veca.VecaConfig(depth=12, width=32, heads=2, num_cores=8)


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    model = veca.create_model(CONFIG).eval()
    flat, noise = torch.ones(3, 128, 128), torch.randn(3, 128, 128)
    images = torch.stack([noise, flat + 0.3 * noise])
    return model, images, content.measured(model, images, content.thresholds(model, images))


@torch.inference_mode()
def test_losses_are_those_of_the_package(found):
    model, images, values = found
    full = model(images)
    for place in (0, 3, 7):
        out = model(images, keep=content.SHARES[place])
        lost = 1 - agreement((out.cls, out.patches), (full.cls, full.patches))
        torch.testing.assert_close(values["plain losses"][:, place], lost, rtol=0, atol=1e-6)
    early = model.before_merging(images).states[-1]
    mean = unlikeness(early.tokens[:, 8:], early.grid)
    torch.testing.assert_close(values["first scores"].mean(dim=1), mean)


def test_later_choices_begin_alike_and_end_at_their_share(found):
    _, _, values = found
    for name, begun in (("second", 1), ("third", 2)):
        left = values[f"{name} left"]
        assert (left[:, :, :begun] == left[:, :1, :begun]).all()
        ways = left.shape[1]
        assert ((left - values["plain left"][:, :ways])[:, :, -1].abs() <= 2).all()


def test_a_threshold_leaves_flat_images_fewer_tokens(found):
    _, _, values = found
    left = values["threshold left"]
    assert (left[1] <= left[0]).all() and (left[1, 4] < left[0, 4]).any()
    assert (left.diff(dim=1) <= 0).all()  # a higher threshold merges more
