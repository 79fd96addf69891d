"""The segmentation head: its loss, its windows, what it learns."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from probe import sets
from veca.probe.extract import DenseSample
from veca.probe.tasks.dense import Optimizer, TokenHead, merge, together
from veca.probe.tasks.segmentation import PixelLoss, SegmentationProbe, at_label_size
from veca.probe.views import Tile, windows

SETTINGS = sets.protocol("segmentation.dropout=0.0").segmentation
CPU = torch.device("cpu")


def whole(grid, frame, width=8, seed=0) -> DenseSample:
    features = torch.randn(*grid, width, generator=torch.Generator().manual_seed(seed))
    return DenseSample(frame, frame, (Tile(0, 0, *frame),), (features,))


def probe(settings=SETTINGS, seed=0, classes=3) -> SegmentationProbe:
    return SegmentationProbe(8, classes, settings, seed=seed, device=CPU)


def reference(made: SegmentationProbe) -> nn.Sequential:
    """Batch norm and a 1x1 convolution, as torch has them."""
    norm, conv = nn.BatchNorm2d(8), nn.Conv2d(8, 3, 1)
    with torch.no_grad():
        conv.weight.copy_(made.head.project.weight[:, :, None, None])
        conv.bias.copy_(made.head.project.bias)
    return nn.Sequential(norm, conv)


def test_the_loss_is_the_mean_over_pixels_that_are_not_ignored():
    made = probe()
    plain = reference(made).train()
    samples = [whole((3, 4), (48, 64), seed=i) for i in range(2)]
    masks = [torch.randint(0, 3, (40, 52)), torch.randint(0, 3, (40, 52))]
    masks[0][:, :20] = 255
    images = torch.stack([s.maps[0].permute(2, 0, 1) for s in samples])
    large = F.interpolate(plain(images), (40, 52), mode="bilinear", align_corners=False)
    expected = F.cross_entropy(large, torch.stack(masks), ignore_index=255)
    assert made.step(samples, masks) == pytest.approx(expected.item(), rel=1e-5)


def test_a_step_is_adamws():
    made = probe()
    plain = reference(made).train()
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=SETTINGS.optimizer.lr * 1e-6, weight_decay=1e-3
    )
    sample, mask = whole((3, 4), (48, 64)), torch.randint(0, 3, (48, 64))
    out = plain(sample.maps[0].permute(2, 0, 1)[None])
    large = F.interpolate(out, (48, 64), mode="bilinear", align_corners=False)
    F.cross_entropy(large, mask[None]).backward()
    optimizer.step()  # at the first step of the warm-up the rate is 1e-6 of the full one
    made.step([sample], [mask])
    torch.testing.assert_close(made.head.project.weight, plain[1].weight[:, :, 0, 0])
    torch.testing.assert_close(made.head.norm.running_mean, plain[0].running_mean)


def test_ignored_pixels_do_not_train():
    sample = whole((3, 4), (48, 64))
    mask = torch.randint(0, 3, (48, 64))
    mask[10:20] = 255
    first, second = probe(), probe()
    first.step([sample], [mask])
    other = whole((2, 2), (32, 32), seed=5)
    nothing = torch.full((32, 32), 255)
    before = [p.clone() for p in second.head.parameters()]
    assert second.step([other], [nothing]) != second.step([other], [nothing])  # nan
    assert all(torch.equal(a, b) for a, b in zip(before, second.head.parameters(), strict=True))


def test_images_of_different_sizes_train_together():
    made = probe()
    samples = [whole((3, 4), (48, 64)), whole((5, 2), (80, 32), seed=1)]
    loss = made.step(samples, [torch.zeros(40, 50).long(), torch.ones(77, 30).long()])
    assert loss == pytest.approx(1.1, abs=0.3)  # ln 3: nothing learned yet
    for sample, size in zip(samples, [(40, 50), (77, 30)], strict=True):
        assert made.predict(sample, size).shape == size


class TestPixelLoss:
    def pieces(self):
        logits = torch.randn(5, 60, dtype=torch.float64, requires_grad=True)
        labels = torch.randint(0, 5, (60,))
        return logits, labels, torch.rand(60) > 0.3

    def test_value_and_gradient_are_torchs(self):
        logits, labels, known = self.pieces()
        target = torch.where(known, labels, 255)
        expected = F.cross_entropy(logits.T, target, ignore_index=255, reduction="sum")
        (wanted,) = torch.autograd.grad(3 * expected, logits)
        found = PixelLoss.apply(logits, labels, known)
        (gradient,) = torch.autograd.grad(3 * found, logits)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradient, wanted)
        assert (gradient[:, ~known] == 0).all()

    @pytest.mark.slow
    def test_gradcheck(self):
        logits, labels, known = self.pieces()
        assert torch.autograd.gradcheck(lambda x: PixelLoss.apply(x, labels, known), logits)


class TestTogether:
    """A GPU takes images of one shape at once; that changes no number."""

    def batch(self):
        shapes = [((3, 4), (48, 64), (40, 52)), ((5, 2), (80, 32), (77, 30))]
        samples, masks = [], []
        for i, (grid, frame, size) in enumerate(shapes * 2):
            samples.append(whole(grid, frame, seed=i))
            masks.append(torch.randint(0, 3, size))
        masks[1][:20] = 255
        return samples, masks

    def test_groups(self):
        samples, masks = self.batch()
        assert together(samples, masks, 3, torch.device("cuda")) == [[0, 2], [1, 3]]
        assert together(samples, masks, 3, CPU) == [[0], [2], [1], [3]]

    def test_no_group_is_too_large(self, monkeypatch):
        samples, masks = self.batch()
        monkeypatch.setattr("veca.probe.tasks.dense._GROUP_NUMBERS", 2 * 3 * 77 * 30 - 1)
        assert together(samples, masks, 3, torch.device("cuda")) == [[0, 2], [1], [3]]

    @pytest.mark.parametrize("windows", [False, True])
    def test_the_same_step(self, monkeypatch, windows):
        samples, masks = self.batch()
        if windows:  # two tiles side by side, the second mirrored
            samples = [
                s._replace(tiles=(s.tiles[0], s.tiles[0]._replace(flipped=True)), maps=s.maps * 2)
                for s in samples
            ]
        apart, grouped = probe(), probe()
        losses = [apart.step(samples, masks) for _ in range(3)]
        monkeypatch.setattr(
            "veca.probe.tasks.segmentation.together",
            lambda s, m, k, device: together(s, m, k, torch.device("cuda")),
        )
        assert [grouped.step(samples, masks) for _ in range(3)] == pytest.approx(losses)
        torch.testing.assert_close(grouped.head.project.weight, apart.head.project.weight)


class TestWindows:
    def tiled(self, frame, window, stride, width=8):
        """Features that are a function of the pixel's place, cut into windows."""
        field = torch.randn(width, *frame)
        tiles = windows(frame, window, stride)
        maps = tuple(
            F.avg_pool2d(field[:, t.top : t.top + t.height, t.left : t.left + t.width], 8)
            .permute(1, 2, 0)
            .contiguous()
            for t in tiles
        )
        return DenseSample(frame, frame, tiles, maps)

    def test_a_window_as_large_as_the_image_is_the_whole_image(self):
        made = probe().head.eval()
        for window in (0, 48, 64, 200):
            sample = self.tiled((48, 64), max(window, 64) if window else 0, 16)
            assert len(sample.tiles) == 1
            (logits,) = made(list(sample.maps))
            direct = F.interpolate(logits[None], (48, 64), mode="bilinear", align_corners=False)[0]
            torch.testing.assert_close(merge(sample, [logits]), direct)

    def test_overlapping_windows_are_averaged(self):
        sample = self.tiled((32, 48), 32, 16)
        assert len(sample.tiles) == 2
        ones = [torch.full((1, 4, 4), 1.0), torch.full((1, 4, 4), 3.0)]
        merged = merge(sample, ones)[0]
        assert (merged[:, :16] == 1).all() and (merged[:, 16:32] == 2).all()
        assert (merged[:, 32:] == 3).all()

    def test_mirrored_tiles_are_turned_back(self):
        frame = (16, 32)
        tiles = (Tile(0, 0, *frame), Tile(0, 0, *frame, True))
        values = torch.arange(8.0).reshape(1, 2, 4)
        sample = DenseSample(frame, frame, tiles, ())
        merged = merge(sample, [values, values.flip(-1)])
        alone = merge(sample._replace(tiles=tiles[:1]), [values])
        torch.testing.assert_close(merged, alone)

    def test_training_goes_straight_to_the_labels_where_it_can(self):
        sample = whole((3, 4), (48, 64))
        logits = torch.randn(3, 3, 4)
        direct = F.interpolate(logits[None], (37, 50), mode="bilinear", align_corners=False)[0]
        torch.testing.assert_close(at_label_size(sample, [logits], (37, 50)), direct)


class TestHead:
    def test_scale_and_shift_of_the_norm_count_and_learn(self):
        head = TokenHead(8, 3, init_std=0.5, momentum=0.1, eps=1e-5, dropout=0.0, seed=0)
        plain = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
        with torch.no_grad():
            head.norm.weight.uniform_(0.5, 2)
            head.norm.bias.normal_()
        plain[0].load_state_dict(head.norm.state_dict())
        plain[1].load_state_dict(head.project.state_dict())
        maps = [torch.randn(3, 4, 8).half(), torch.randn(2, 5, 8).half()]
        tokens = torch.cat([one.flatten(0, 1) for one in maps]).float()
        for training in (True, False):
            head.train(training)
            plain.train(training)
            out = torch.cat([one.flatten(1).T for one in head(maps)])
            torch.testing.assert_close(out, plain(tokens))
            weights = torch.randn_like(out)
            ours = torch.autograd.grad((out * weights).sum(), list(head.parameters()))
            theirs = torch.autograd.grad((plain(tokens) * weights).sum(), list(plain.parameters()))
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            if training:  # the line above was a second look at the batch
                head(maps)
        torch.testing.assert_close(head.norm.running_var, plain[0].running_var)

    def test_dropout_drops_whole_channels_in_training_only(self):
        head = TokenHead(
            64, 2, init_std=0.01, momentum=0.1, eps=1e-5, dropout=0.5, seed=0
        )  # fmt: skip
        kept = head._channels(3, 64)
        assert set(kept.flatten().tolist()) == {0.0, 2.0} and not torch.equal(kept[0], kept[1])
        features = [torch.randn(4, 4, 64)]
        head.eval()
        assert torch.equal(head(features)[0], head(features)[0])

    def test_initial_weights(self):
        made = probe(dataclasses.replace(SETTINGS, init_std=0.01))
        assert made.head.project.bias.abs().max() == 0
        assert 0.005 < made.head.project.weight.std() < 0.02


def test_deterministic():
    settings = sets.protocol("segmentation.dropout=0.3").segmentation
    samples = [whole((3, 4), (48, 64), seed=i) for i in range(3)]
    masks = [torch.randint(0, 3, (48, 64)) for _ in samples]
    weights = []
    for seed in (0, 0, 1):
        made = probe(settings, seed=seed)
        for _ in range(5):
            made.step(samples, masks)
        weights.append(made.head.project.weight.clone())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_it_learns_what_is_linear():
    settings = sets.protocol(
        "segmentation.optimizer.lr=0.05", "segmentation.optimizer.iterations=60"
    ).segmentation
    made = SegmentationProbe(8, 2, settings, seed=0, device=CPU)
    samples, masks = [], []
    for i in range(4):
        sample = whole((4, 4), (64, 64), seed=i)
        bright = (sample.maps[0][..., 0] > 0).long()
        samples.append(sample)
        masks.append(bright.repeat_interleave(16, 0).repeat_interleave(16, 1))
    for _ in range(60):
        made.step(samples, masks)
    hits = [
        (made.predict(s, (64, 64)) == m).float().mean() for s, m in zip(samples, masks, strict=True)
    ]
    assert min(hits) > 0.75


def test_long_gradients_are_cut():
    module = torch.nn.Linear(2, 1)
    settings = dataclasses.replace(sets.protocol().segmentation.optimizer, clip=0.5)
    Optimizer(module, settings).step(module(torch.full((1, 2), 100.0)).sum())
    length = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
    assert length.item() == pytest.approx(0.5, rel=1e-4)
