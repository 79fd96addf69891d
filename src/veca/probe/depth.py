"""Linear depth with bins: batch norm and a 1x1 convolution to 256 depths, of which the mean is
taken.

The weight of a bin is relu(logit) + 0.1, normalised; the depth of a patch is the weighted mean of
the bins' depths, enlarged to the image. Trained with the scale-invariant loss of log depths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veca.probe.extract import DenseSample, Stored
from veca.probe.protocol import Depth
from veca.probe.resize import bilinear
from veca.probe.segmentation import Optimizer, TokenHead, merge

Array = np.ndarray[Any, Any]


class DepthProbe:
    """A head in training, and the depth it predicts."""

    def __init__(
        self, width: int, max_depth: float, settings: Depth, *, seed: int, device: torch.device
    ) -> None:
        self.settings = settings
        self.device = device
        self.max_depth = max_depth
        self.head = TokenHead(
            width,
            settings.bins,
            init_std=settings.init_std,
            momentum=settings.bn_momentum,
            eps=settings.bn_eps,
            dropout=0.0,
            seed=seed,
        ).to(device)
        self.centres = torch.linspace(settings.min_depth, max_depth, settings.bins, device=device)
        self.optimizer = Optimizer(self.head, settings.optimizer)
        self._step = 0

    def step(self, samples: Sequence[DenseSample], depths: Sequence[Tensor]) -> float:
        """Train on a batch; depths are float32 [H, W] in metres, nan where invalid."""
        self.head.train()
        maps = self.head([sample.maps[0].to(self.device) for sample in samples])
        logs = []
        for logits, truth in zip(maps, depths, strict=True):
            truth = truth.to(self.device)
            valid = torch.isfinite(truth)
            predicted = bilinear(self.expect(logits), (truth.shape[0], truth.shape[1]))[0][valid]
            logs.append(
                (predicted + self.settings.log_eps).log()
                - (truth[valid] + self.settings.log_eps).log()
            )
        difference = torch.cat(logs)
        if len(difference) < 2:
            return math.nan
        loss = self.loss(difference, self._step >= self.settings.variance_from)
        self.optimizer.step(loss)
        self._step += 1
        return float(loss.detach())

    def loss(self, difference: Tensor, with_variance: bool) -> Tensor:
        """sqrt(var(g) + mean_weight * mean(g)^2) of differences g of log depths."""
        squared = self.settings.mean_weight * difference.mean().square()
        if with_variance:
            squared = squared + difference.var()
        # The root has no slope at zero; a perfect batch must not turn the weights to nan.
        return squared.clamp(min=1e-12).sqrt()

    def expect(self, logits: Tensor) -> Tensor:
        """Logits [bins, h, w] -> depth [1, h, w] in metres."""
        weights = logits.relu() + self.settings.bin_floor
        share = weights / weights.sum(dim=0, keepdim=True)
        return (share * self.centres.view(-1, 1, 1)).sum(dim=0, keepdim=True)

    @torch.no_grad()
    def predict(self, sample: DenseSample, size: tuple[int, int]) -> Array:
        """Metres, float32 [height, width] of `size`; averaged over the mirrored view, clamped."""
        self.head.eval()
        maps = self.head([one.to(self.device) for one in sample.maps])
        depth = bilinear(merge(sample, [self.expect(logits) for logits in maps]), size)[0]
        clamped = depth.clamp(self.settings.min_depth, self.max_depth)
        array: Array = clamped.cpu().numpy()
        return array


def train(
    probe: DepthProbe,
    stored: Stored,
    depth: Callable[[int], Tensor],
    batches: Iterable[Sequence[int] | Array],
    progress: Callable[[int], None] | None = None,
) -> float:
    """Train from cached features; returns the mean loss of the last tenth of the batches."""
    losses = []
    for i, batch in enumerate(batches):
        samples = [stored.dense(int(place)) for place in batch]
        losses.append(probe.step(samples, [depth(int(place)) for place in batch]))
        if progress:
            progress(i + 1)
    last = [loss for loss in losses[-max(1, len(losses) // 10) :] if loss == loss]
    return sum(last) / len(last) if last else math.nan
