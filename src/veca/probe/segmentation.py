"""Linear segmentation: dropout, batch norm and a 1x1 convolution on frozen patch features.

Logits are enlarged to the size of the labels, which are never resized; ignored pixels count neither
in the loss nor in the score; the score comes from one confusion matrix for the whole set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veca.probe.extract import DenseSample, Stored
from veca.probe.protocol import AdamW, Segmentation
from veca.probe.resize import argmax_at, bilinear
from veca.probe.schedule import rate, torch_generator
from veca.probe.views import Tile

Array = np.ndarray[Any, Any]
Mask = Tensor
"""uint8 or int64 [H, W]."""


class TokenHead(nn.Module):
    """Batch norm over all tokens of a batch, then one linear layer: a 1x1 convolution."""

    def __init__(
        self,
        width: int,
        outputs: int,
        *,
        init_std: float,
        momentum: float,
        eps: float,
        dropout: float,
        seed: int,
    ) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=eps, momentum=momentum)
        self.project = nn.Linear(width, outputs)
        with torch.no_grad():
            self.project.weight.normal_(std=init_std, generator=torch_generator(seed, "init"))
            self.project.bias.zero_()
        self.dropout = dropout
        self._masks = torch_generator(seed, "dropout")

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """float32 [h, w, D] of each image -> [outputs, h, w] of each; grids may differ."""
        if self.training and self.dropout:
            maps = [features * self._channels(features) for features in maps]
        tokens = torch.cat([features.flatten(0, 1) for features in maps])
        out = self.project(self.norm(tokens))
        parts = out.split([features.shape[0] * features.shape[1] for features in maps])
        return [
            part.T.unflatten(1, features.shape[:2])
            for part, features in zip(parts, maps, strict=True)
        ]

    def _channels(self, features: Tensor) -> Tensor:
        """Whole channels of an image are dropped; drawn on the CPU, so that devices agree."""
        kept = torch.rand(features.shape[2], generator=self._masks) >= self.dropout
        return (kept.float() / (1 - self.dropout)).to(features.device)


class Optimizer:
    """AdamW with the protocol's schedule and clipping."""

    def __init__(self, module: nn.Module, settings: AdamW) -> None:
        self.settings = settings
        self.module = module
        self._adamw = torch.optim.AdamW(
            module.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._step = 0

    def step(self, loss: Tensor) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = rate(self.settings, self._step)
        self._adamw.zero_grad(set_to_none=True)
        loss.backward()
        if self.settings.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip)
        self._adamw.step()
        self._step += 1


class SegmentationProbe:
    """A head in training, and what it predicts."""

    def __init__(
        self, width: int, classes: int, settings: Segmentation, *, seed: int, device: torch.device
    ) -> None:
        self.classes = classes
        self.device = device
        self.head = TokenHead(
            width,
            classes,
            init_std=settings.init_std,
            momentum=settings.bn_momentum,
            eps=settings.bn_eps,
            dropout=settings.dropout,
            seed=seed,
        ).to(device)
        self.optimizer = Optimizer(self.head, settings.optimizer)

    def step(self, samples: Sequence[DenseSample], masks: Sequence[Mask], ignore: int) -> float:
        """Train on a batch; the loss is the mean over all pixels that are not ignored."""
        self.head.train()
        logits = self._logits(samples)
        total, pixels = torch.zeros((), device=self.device), 0
        for sample, maps, mask in zip(samples, logits, masks, strict=True):
            known = int((mask != ignore).sum())
            if not known:
                continue
            large = at_label_size(sample, maps, (mask.shape[0], mask.shape[1]))
            target = mask.to(self.device).long().flatten()
            total = total + F.cross_entropy(
                large.flatten(1).T, target, ignore_index=ignore, reduction="sum"
            )
            pixels += known
        if not pixels:
            return float("nan")
        loss = total / pixels
        self.optimizer.step(loss)
        return float(loss.detach())

    @torch.no_grad()
    def predict(self, sample: DenseSample, size: tuple[int, int]) -> Tensor:
        """The class of each pixel, int64 [height, width] of `size`."""
        self.head.eval()
        (maps,) = self._logits([sample])
        return argmax_at(merge(sample, maps), size)

    def _logits(self, samples: Sequence[DenseSample]) -> list[list[Tensor]]:
        """Logits [classes, h, w] of every tile, by image."""
        flat = self.head([one.to(self.device) for sample in samples for one in sample.maps])
        out, start = [], 0
        for sample in samples:
            out.append(flat[start : start + len(sample.maps)])
            start += len(sample.maps)
        return out


def at_label_size(sample: DenseSample, maps: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """Logits [K, height, width] at the size of the labels; straight from the grid if it can be."""
    if len(maps) == 1 and sample.tiles[0] == Tile(0, 0, *sample.frame):
        return bilinear(maps[0], size)
    return bilinear(merge(sample, maps), size)


def merge(sample: DenseSample, maps: Sequence[Tensor]) -> Tensor:
    """Outputs [K, h, w] of the tiles, enlarged to their pixels and averaged where they overlap.

    Mirrored tiles are turned back. -> [K, height, width] of the frame.
    """
    height, width = sample.frame
    total = maps[0].new_zeros(maps[0].shape[0], height, width)
    count = maps[0].new_zeros(1, height, width)
    for tile, values in zip(sample.tiles, maps, strict=True):
        large = bilinear(values, (tile.height, tile.width))
        rows = slice(tile.top, tile.top + tile.height)
        columns = slice(tile.left, tile.left + tile.width)
        total[:, rows, columns] += large.flip(-1) if tile.flipped else large
        count[:, rows, columns] += 1
    return total / count


def train(
    probe: SegmentationProbe,
    stored: Stored,
    mask: Callable[[int], Mask],
    batches: Iterable[Sequence[int] | Array],
    ignore: int,
    progress: Callable[[int], None] | None = None,
) -> float:
    """Train from cached features; returns the mean loss of the last tenth of the batches."""
    losses = []
    for i, batch in enumerate(batches):
        samples = [stored.dense(int(place)) for place in batch]
        losses.append(probe.step(samples, [mask(int(place)) for place in batch], ignore))
        if progress:
            progress(i + 1)
    last = [loss for loss in losses[-max(1, len(losses) // 10) :] if loss == loss]
    return sum(last) / len(last) if last else float("nan")
