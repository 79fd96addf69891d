"""Bilinear enlargement equals torch's, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from veca.probe import resize
from veca.probe.resize import argmax_at, bilinear

SHAPES = [
    ((3, 4), (12, 16)),
    ((1, 1), (5, 7)),
    ((5, 3), (5, 9)),
    ((7, 5), (3, 2)),
    ((6, 6), (6, 6)),
]


def theirs(x, size):
    return F.interpolate(x[None], size, mode="bilinear", align_corners=False)[0]


@pytest.mark.parametrize(("old", "new"), SHAPES)
def test_equals_torch(old, new):
    x = torch.randn(4, *old, dtype=torch.float64)
    torch.testing.assert_close(bilinear(x, new), theirs(x, new), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bilinear(x.float(), new), theirs(x, new).float())


@pytest.mark.parametrize(("old", "new"), SHAPES)
def test_gradients_equal_torchs(old, new):
    x = torch.randn(2, *old, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, *new, dtype=torch.float64)
    (ours,) = torch.autograd.grad((bilinear(x, new) * weights).sum(), x)
    (expected,) = torch.autograd.grad((theirs(x, new) * weights).sum(), x)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_the_largest_strip_by_strip(monkeypatch):
    logits = torch.randn(5, 6, 8, dtype=torch.float64)
    expected = theirs(logits, (41, 37)).argmax(dim=0)
    assert torch.equal(argmax_at(logits, (41, 37)), expected)
    monkeypatch.setattr(resize, "_STRIP_NUMBERS", 5 * 37 * 4)  # ten strips and a bit
    assert torch.equal(argmax_at(logits, (41, 37)), expected)
