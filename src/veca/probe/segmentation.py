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
from torch.nn import functional

from veca.probe.extract import DenseSample, Stored
from veca.probe.protocol import AdamW, Segmentation
from veca.probe.resize import argmax_at, bilinear
from veca.probe.schedule import rate, torch_generator
from veca.probe.views import Tile

Array = np.ndarray[Any, Any]
_GROUP_NUMBERS = 2**26  # logits that a GPU makes at once: 256 MiB in float32
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
        """Features [h, w, D] of each image -> float32 [outputs, h, w] of each; grids may differ."""
        counts = [features.shape[0] * features.shape[1] for features in maps]
        # The features are frozen. With the norm's scale and shift moved into the projection, only
        # small matrices need gradients: the same function, for a third less work.
        with torch.no_grad():
            tokens = self._normed(maps, counts)
        bias = self.project.weight @ self.norm.bias + self.project.bias
        out = functional.linear(tokens, self.project.weight * self.norm.weight, bias)
        return [
            part.T.unflatten(1, features.shape[:2])
            for part, features in zip(out.split(counts), maps, strict=True)
        ]

    def _normed(self, maps: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        """float32 [tokens, D], after dropout and the norm without its scale and shift."""
        tokens = torch.cat([features.flatten(0, 1) for features in maps]).float()
        if self.training and self.dropout:
            kept = self._channels(len(maps), tokens.shape[1]).to(tokens.device)
            for part, channels in zip(tokens.split(counts), kept, strict=True):
                part *= channels
        return functional.batch_norm(
            tokens,
            self.norm.running_mean,
            self.norm.running_var,
            training=self.training,
            momentum=self.norm.momentum or 0.0,
            eps=self.norm.eps,
        )

    def _channels(self, images: int, width: int) -> Tensor:
        """[images, D]: whole channels of an image are dropped; drawn on the CPU, for any device."""
        kept = torch.rand(images, width, generator=self._masks) >= self.dropout
        return kept.float() / (1 - self.dropout)


class PixelLoss(torch.autograd.Function):
    """Sum of the cross-entropies of logits [K, P] for labels int64 [P], over the known pixels.

    Labels of other pixels have to be some class, and do not count. The classes lie along the slow
    axis and the gradient, softmax minus one-hot, is made right away: torch's own loss takes ten
    times as long on a CPU, and on a GPU the form of it that is as fast is not deterministic.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, known: Tensor) -> Tensor:
        scores = logits.log_softmax(dim=0)
        total = -(scores.gather(0, labels[None])[0] * known).sum()
        gradient = scores.exp_()
        gradient.scatter_add_(0, labels[None], torch.full_like(gradient[:1], -1.0))
        ctx.save_for_backward(gradient.mul_(known))
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None


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
        masks = [mask.to(self.device) for mask in masks]
        known = [mask != ignore for mask in masks]
        pixels = int(torch.stack([one.sum() for one in known]).sum())
        if not pixels:
            return float("nan")
        self.head.train()
        logits = self._logits(samples)
        total = torch.zeros((), device=self.device)
        for places in together(samples, masks, self.classes, self.device):
            size = (masks[places[0]].shape[0], masks[places[0]].shape[1])
            # [K, images, h, w] of each tile: the classes stay on the slow axis.
            tiles = zip(*(logits[i] for i in places), strict=True)
            maps = [torch.stack(tile, dim=1) for tile in tiles]
            large = at_label_size(samples[places[0]], maps, size)
            inside = torch.stack([known[i] for i in places]).flatten()
            labels = torch.stack([masks[i] for i in places]).flatten()
            labels = torch.where(inside, labels, 0).long()
            total = total + PixelLoss.apply(large.flatten(1), labels, inside)
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


def together(
    samples: Sequence[DenseSample], labels: Sequence[Tensor], outputs: int, device: torch.device
) -> list[list[int]]:
    """The places of a batch in groups of one shape, to be computed at once; in a fixed order.

    A GPU wants few large pieces of work. On a CPU every image is a group of its own, which stays
    in the cache.
    """
    limit = _GROUP_NUMBERS if device.type != "cpu" else 0
    groups: dict[tuple[Any, ...], list[list[int]]] = {}
    for i, (sample, label) in enumerate(zip(samples, labels, strict=True)):
        tiles = tuple(tuple(features.shape[:2]) for features in sample.maps)
        found = groups.setdefault((sample.frame, sample.tiles, tiles, tuple(label.shape)), [])
        if found and (len(found[-1]) + 1) * outputs * label.numel() <= limit:
            found[-1].append(i)
        else:
            found.append([i])
    return [places for found in groups.values() for places in found]


def at_label_size(sample: DenseSample, maps: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """Logits [..., h, w] of the tiles -> [..., height, width], at the size of the labels.

    Straight from the grid if it can be.
    """
    if len(maps) == 1 and sample.tiles[0] == Tile(0, 0, *sample.frame):
        return bilinear(maps[0], size)
    return bilinear(merge(sample, maps), size)


def merge(sample: DenseSample, maps: Sequence[Tensor]) -> Tensor:
    """Outputs [..., h, w] of the tiles, enlarged to their pixels and averaged where they overlap.

    Mirrored tiles are turned back. -> [..., height, width] of the frame.
    """
    height, width = sample.frame
    total = maps[0].new_zeros(*maps[0].shape[:-2], height, width)
    count = maps[0].new_zeros(height, width)
    for tile, values in zip(sample.tiles, maps, strict=True):
        large = bilinear(values, (tile.height, tile.width))
        rows = slice(tile.top, tile.top + tile.height)
        columns = slice(tile.left, tile.left + tile.width)
        total[..., rows, columns] += large.flip(-1) if tile.flipped else large
        count[rows, columns] += 1
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
    held = stored.held(probe.device)
    for i, batch in enumerate(batches):
        samples = [held(int(place)) for place in batch]
        losses.append(probe.step(samples, [mask(int(place)) for place in batch], ignore))
        if progress:
            progress(i + 1)
    last = [loss for loss in losses[-max(1, len(losses) // 10) :] if loss == loss]
    return sum(last) / len(last) if last else float("nan")
