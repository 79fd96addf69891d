"""The depth head: bins, loss, flip, and what it learns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from probe import sets
from veca.probe.extract import DenseSample
from veca.probe.tasks.dense import together
from veca.probe.tasks.depth import DepthProbe
from veca.probe.views import Tile

SETTINGS = sets.protocol().depth
CPU = torch.device("cpu")


def probe(**changes) -> DepthProbe:
    settings = dataclasses.replace(SETTINGS, **changes)
    return DepthProbe(8, 8.0, settings, seed=0, device=CPU)


def sample(grid=(3, 4), seed=0, flip=False) -> DenseSample:
    frame = (grid[0] * 16, grid[1] * 16)
    features = torch.randn(*grid, 8, generator=torch.Generator().manual_seed(seed))
    tiles = [Tile(0, 0, *frame)]
    maps = [features]
    if flip:
        tiles.append(Tile(0, 0, *frame, True))
        maps.append(features.flip(1))
    return DenseSample(frame, frame, tuple(tiles), tuple(maps))


def test_the_expected_depth():
    made = probe(bins=4, bin_floor=0.1)
    logits = torch.tensor([[[-5.0]], [[0.0]], [[2.0]], [[1.0]]])
    weights = np.array([0.1, 0.1, 2.1, 1.1])
    centres = np.linspace(0.001, 8.0, 4)
    expected = (weights / weights.sum() * centres).sum()
    assert float(made.expect(logits)) == pytest.approx(expected, rel=1e-6)


def test_all_equal_bins_give_the_middle():
    made = probe()
    assert float(made.expect(torch.zeros(256, 1, 1))) == pytest.approx((0.001 + 8) / 2, rel=1e-5)


def test_the_loss():
    made = probe(mean_weight=0.15)
    g = torch.tensor([0.5, -0.1, 0.3, 0.9], dtype=torch.float64)
    expected = np.sqrt(np.var(g.numpy(), ddof=1) + 0.15 * g.mean().item() ** 2)
    assert float(made.loss(g, True)) == pytest.approx(expected)
    assert float(made.loss(g, False)) == pytest.approx(np.sqrt(0.15) * g.mean().item())


def test_a_perfect_batch_leaves_finite_gradients():
    made = probe()
    g = torch.zeros(4, requires_grad=True)
    made.loss(g, True).backward()
    assert torch.isfinite(g.grad).all()


def test_the_loss_of_a_batch_is_over_all_its_valid_pixels():
    made = probe(variance_from=0)
    samples = [sample(seed=i) for i in range(2)]
    truths = [torch.rand(48, 64) * 5 + 1 for _ in range(2)]
    truths[0][:10] = torch.nan
    made.head.train()
    maps = made.head([s.maps[0] for s in samples])
    logs = []
    for logits, truth in zip(maps, truths, strict=True):
        large = F.interpolate(
            made.expect(logits)[None], (48, 64), mode="bilinear", align_corners=False
        )[0, 0]
        valid = ~truth.isnan()
        logs.append((large[valid] + 1e-3).log() - (truth[valid] + 1e-3).log())
    g = torch.cat(logs).detach().numpy().astype(float)
    expected = np.sqrt(g.var(ddof=1) + 0.15 * g.mean() ** 2)
    assert probe(variance_from=0).step(samples, truths) == pytest.approx(expected, rel=1e-4)


def test_images_of_one_size_at_once_train_the_same(monkeypatch):
    """As a GPU does it; sizes differ, and a part of each image is invalid."""
    samples = [sample(seed=0), sample((2, 3), seed=1), sample(seed=2, flip=True)]
    truths = [torch.rand(48, 64) * 5 + 1, torch.rand(30, 50) * 5 + 1, torch.rand(48, 64) * 5 + 1]
    for truth in truths:
        truth[:10] = torch.nan
    apart, grouped = probe(variance_from=1), probe(variance_from=1)
    losses = [apart.step(samples, truths) for _ in range(3)]
    monkeypatch.setattr(
        "veca.probe.tasks.depth.together",
        lambda s, t, k, device: together(s, t, k, torch.device("cuda")),
    )
    assert [grouped.step(samples, truths) for _ in range(3)] == pytest.approx(losses)
    torch.testing.assert_close(grouped.head.project.weight, apart.head.project.weight)


def test_the_variance_joins_later():
    made = probe(variance_from=1)
    truth = torch.rand(48, 64) * 5 + 1
    first = made.step([sample()], [truth])
    second = made.step([sample()], [truth])
    assert second > first  # the variance term is there now


def test_images_without_depth_train_nothing():
    made = probe()
    before = made.head.project.weight.clone()
    loss = made.step([sample()], [torch.full((48, 64), torch.nan)])
    assert loss != loss and torch.equal(before, made.head.project.weight)


def test_prediction_is_clamped_and_averaged_with_the_flip():
    made = probe()
    made.head.eval()
    both = made.predict(sample(flip=True), (48, 64))
    alone = made.predict(sample(), (48, 64))
    # The mirrored features are the features mirrored, so the average is the same prediction.
    np.testing.assert_allclose(both, alone, rtol=1e-5)
    assert both.dtype == np.float32 and both.shape == (48, 64)
    with torch.no_grad():
        made.head.project.bias.fill_(-1e6)
        made.head.project.bias[-1] = 1e9
    assert made.predict(sample(), (48, 64)).max() <= 8.0


def test_it_learns_and_repeats():
    settings = sets.protocol(
        "depth.optimizer.lr=0.05", "depth.optimizer.iterations=60", "depth.variance_from=0"
    ).depth
    losses, weights = [], []
    for seed in (0, 0, 1):
        made = DepthProbe(8, 8.0, settings, seed=seed, device=CPU)
        samples = [sample((4, 4), seed=i) for i in range(4)]
        truths = [
            (3 + s.maps[0][..., 0]).clamp(0.5, 7).repeat_interleave(16, 0).repeat_interleave(16, 1)
            for s in samples
        ]
        found = [made.step(samples, truths) for _ in range(60)]
        losses.append((found[0], found[-1]))
        weights.append(made.head.project.weight.clone())
    assert losses[0][1] < 0.5 * losses[0][0]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
