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
from veca.probe.segmentation import Optimizer, TokenHead, merge, together

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
        samples = [sample._replace(maps=sample.maps[:1]) for sample in samples]
        depths = [truth.to(self.device) for truth in depths]
        valid = [torch.isfinite(truth) for truth in depths]
        if int(torch.stack([one.sum() for one in valid]).sum()) < 2:
            return math.nan
        self.head.train()
        maps = self.head([sample.maps[0].to(self.device) for sample in samples])
        differences, inside, eps = [], [], self.settings.log_eps
        for places in together(samples, depths, 1, self.device):
            truth = torch.stack([depths[i] for i in places])
            known = torch.stack([valid[i] for i in places])
            logits = torch.stack([maps[i] for i in places], dim=1)
            large = bilinear(self.expect(logits)[0], (truth.shape[1], truth.shape[2]))
            # Where nothing is known, depth is taken for right: no difference, no gradient.
            large, truth = (torch.where(known, metres, 1.0) for metres in (large, truth))
            differences.append(((large + eps).log() - (truth + eps).log()).flatten())
            inside.append(known.flatten())
        with_variance = self._step >= self.settings.variance_from
        loss = self.loss(torch.cat(differences), with_variance, torch.cat(inside))
        self.optimizer.step(loss)
        self._step += 1
        return float(loss.detach())

    def loss(self, difference: Tensor, with_variance: bool, valid: Tensor | None = None) -> Tensor:
        """sqrt(var(g) + mean_weight * mean(g)^2) of differences g of log depths.

        Args:
            valid: bool, those of g that count, the others being 0; None: all of them.
        """
        known = torch.ones_like(difference) if valid is None else valid.to(difference)
        count = known.sum()
        mean = difference.sum() / count
        squared = self.settings.mean_weight * mean.square()
        if with_variance:
            squared = squared + ((difference - mean) * known).square().sum() / (count - 1)
        # The root has no slope at zero; a perfect batch must not turn the weights to nan.
        return squared.clamp(min=1e-12).sqrt()

    def expect(self, logits: Tensor) -> Tensor:
        """Logits [bins, ...] -> depth [1, ...] in metres."""
        weights = logits.relu() + self.settings.bin_floor
        share = weights / weights.sum(dim=0, keepdim=True)
        return torch.einsum("k,k...->...", self.centres, share)[None]

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
    held = stored.held(probe.device)
    for i, batch in enumerate(batches):
        samples = [held(int(place)) for place in batch]
        losses.append(probe.step(samples, [depth(int(place)) for place in batch]))
        if progress:
            progress(i + 1)
    last = [loss for loss in losses[-max(1, len(losses) // 10) :] if loss == loss]
    return sum(last) / len(last) if last else math.nan
