"""What segmentation and depth share: a head on every patch, trained on stored features or views.

Each names its head, its random views and how it scores; `DenseTask` does the rest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from veca.probe import live
from veca.probe import protocol as protocols
from veca.probe.cache import MemoryCache
from veca.probe.data import labels_of
from veca.probe.datasets import Dataset
from veca.probe.extract import DenseSample, Stored, Want
from veca.probe.intervals import Sums
from veca.probe.resize import bilinear
from veca.probe.schedule import batches, rate, torch_generator
from veca.probe.tasks.shared import FeatureRequest, Outcome, ProbeSetup, number, random_batches

Array = np.ndarray[Any, Any]
Labels = MemoryCache[int, Tensor]
"""Place of an image -> its mask or depth [H, W]."""

_GROUP_NUMBERS = 2**26  # logits that a GPU makes at once: 256 MiB in float32

_H = TypeVar("_H", bound="DenseHead")


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


class Optimizer:
    """AdamW with the protocol's schedule and clipping."""

    def __init__(self, module: nn.Module, settings: protocols.AdamW) -> None:
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


class DenseHead(Protocol):
    """What the dense tasks train."""

    device: torch.device

    def step(self, samples: Sequence[DenseSample], labels: Sequence[Tensor]) -> float:
        """Train on a batch; returns the loss, nan where nothing in it is labelled."""
        ...


class DenseTask(ABC, Generic[_H]):
    """A head on the patches and a label for every pixel, for every row of the table."""

    name: ClassVar[str]

    def __init__(
        self, setup: ProbeSetup, settings: Any, wants: Sequence[Want], train_wants: Sequence[Want]
    ) -> None:
        self.setup, self.settings, self.train_wants = setup, settings, train_wants
        self.requests = [setup.of_test(wants)]
        if not settings.augment.enabled:
            self.requests.insert(0, setup.of_training(train_wants))

    @abstractmethod
    def new_head(self, width: int) -> _H:
        """A fresh head for features of this width."""

    @abstractmethod
    def read_label(self, dataset: Dataset, index: int, size: Sequence[int]) -> Tensor:
        """The mask or depth [H, W] of an image, checked against (height, width) of the image."""

    @abstractmethod
    def random_view(
        self, image: Image.Image, label: Array, size: int, random: np.random.Generator
    ) -> live.Drawn: ...

    @abstractmethod
    def describe(self, size: int) -> dict[str, Any]:
        """Constants of a row, for its details."""

    @abstractmethod
    def score(
        self, head: _H, test: Stored, truths: Labels, row: str
    ) -> tuple[dict[str, float], Sums, dict[str, Any]]:
        """Metrics, the sums of the first of them, and details of a trained head."""

    def outcomes(self, features: Sequence[Sequence[Stored]]) -> list[Outcome]:
        setup = self.setup
        *training, test = features
        heads = [] if training else self._train_on_random_crops()
        labels = self._labels(self.requests[0], training[0], setup.device) if training else None
        truths = self._labels(self.requests[-1], test)
        outcomes = []
        for i, (backbone, size) in enumerate(setup.rows):
            details = {"features": "patches", **self.describe(size)}
            if labels is None:
                head = heads[i]
            else:
                head = self.new_head(training[0][i].dense(0).maps[0].shape[2])
                loss = self._train_on_stored(head, training[0][i], labels, backbone.label)
                details["train_loss"] = number(loss)
            metrics, sums, more = self.score(head, test[i], truths, backbone.label)
            tile = test[i].dense(0).tiles[0]
            pixels = (tile.height, tile.width)
            outcomes.append(Outcome(backbone, size, pixels, metrics, sums, {**details, **more}))
        return outcomes

    def _labels(
        self, request: FeatureRequest, stored: Sequence[Stored], device: torch.device | None = None
    ) -> Labels:
        """The labels of images whose features are there, shared by all rows of the table."""
        dataset, indices, _ = request
        sizes = stored[0].sizes()
        return labels_of(lambda i: self.read_label(dataset, indices[i], sizes[i].tolist()), device)

    def _train_on_stored(self, head: _H, stored: Stored, labels: Labels, row: str) -> float:
        """Train from cached features; returns the mean loss of the last tenth of the batches."""
        settings = self.settings.optimizer
        losses = []
        held = stored.held(head.device)
        order = batches(len(stored), settings.batch, settings.iterations, self.setup.seed)
        for done, batch in enumerate(order, 1):
            samples = [held(int(place)) for place in batch]
            losses.append(head.step(samples, [labels(int(place)) for place in batch]))
            self.setup.progress(f"training on {row}", done, settings.iterations)
        last = [loss for loss in losses[-max(1, len(losses) // 10) :] if loss == loss]
        return sum(last) / len(last) if last else math.nan

    def _train_on_random_crops(self) -> list[_H]:
        """A head for every row; all see the same crops."""
        data, settings = self.setup.data, self.settings.optimizer

        def read(place: int) -> tuple[Image.Image, Array]:
            index = data.train_indices[place]
            image = data.train.image(index)
            label = self.read_label(data.train, index, (image.height, image.width))
            return image, label.numpy()

        heads: list[_H] = []
        for row, features, views in random_batches(
            self.setup,
            self.train_wants,
            read,
            lambda sample, size, random: self.random_view(*sample, size, random),
            count=len(data.train_indices),
            batch=settings.batch,
            iterations=settings.iterations,
            text=f"{self.name}, random crops",
        ):
            if row == len(heads):
                heads.append(self.new_head(features.patches.shape[2]))
            height, width = views[0].pixels.shape[1:]
            samples = live.dense_samples(features, (height, width))
            heads[row].step(samples, [view.label for view in views])
        return heads


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
