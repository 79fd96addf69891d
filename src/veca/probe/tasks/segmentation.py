"""Linear segmentation: dropout, batch norm and a 1x1 convolution on frozen patch features.

Logits are enlarged to the size of the labels, which are never resized; ignored pixels count neither
in the loss nor in the score; the score comes from one confusion matrix for the whole set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.errors import ProbeError
from veca.probe import live
from veca.probe.augment import random_segment
from veca.probe.cache import MemoryCache
from veca.probe.data import labels_of, read_mask
from veca.probe.datasets import IGNORE_INDEX
from veca.probe.extract import DENSE, DenseSample, Stored, Want
from veca.probe.intervals import iou_sums
from veca.probe.metrics import Confusion
from veca.probe.protocol import Segmentation
from veca.probe.resize import argmax_at, bilinear
from veca.probe.tasks.shared import (
    Array,
    FeatureRequest,
    Optimizer,
    Outcome,
    ProbeSetup,
    TokenHead,
    at_size,
    merge,
    number,
    random_batches,
    require_sklearn,
    together,
    train_on_stored,
)
from veca.probe.views import FrameView, Tile

Sample = tuple[Image.Image, Array]
"""An image and its mask."""
Masks = MemoryCache[int, Tensor]


class SegmentationTask:
    def __init__(self, setup: ProbeSetup, settings: Segmentation) -> None:
        self.setup, self.settings = setup, settings
        self.sections = {size: at_size(settings, size, setup.cell) for size in setup.sizes}
        views = {size: FrameView(one.view, setup.cell) for size, one in self.sections.items()}
        self.wants = [Want(backbone, views[size], DENSE) for backbone, size in setup.rows]
        self.requests = [setup.of_test(self.wants)]
        if not settings.augment.enabled:
            self.requests.insert(0, setup.of_training(self.wants))
        elif 0 in self.sections:
            raise ProbeError("segmentation with random crops needs a short side; give --size.")

    def outcomes(self, features: Sequence[Sequence[Stored]]) -> list[Outcome]:
        setup, settings = self.setup, self.settings
        *training, test = features
        probes = self._train_on_random_crops() if settings.augment.enabled else []
        masks = _masks(self.requests[0], training[0], setup.device) if training else None
        truths = _masks(self.requests[-1], test)
        outcomes = []
        for i, (backbone, size) in enumerate(setup.rows):
            details: dict[str, Any] = {
                "features": "patches",
                "view": dataclasses.asdict(self.sections[size].view),
            }
            if masks is None:
                probe = probes[i]
            else:
                stored = training[0][i]
                probe = self._probe(stored.dense(0).maps[0].shape[2])
                loss = train_on_stored(
                    setup, probe, stored, masks, settings.optimizer, backbone.label
                )
                details["train_loss"] = number(loss)
            confusion, more = self._score(probe, test[i], truths, backbone.label)
            first = test[i].dense(0).tiles[0]
            outcomes.append(
                Outcome(
                    backbone,
                    size,
                    (first.height, first.width),
                    confusion.metrics(),
                    iou_sums(confusion.images),
                    {**details, **more},
                )
            )
        return outcomes

    def _probe(self, width: int) -> SegmentationProbe:
        train = self.setup.data.train
        return SegmentationProbe(
            width,
            train.num_classes,
            self.settings,
            seed=self.setup.seed,
            device=self.setup.device,
            ignore=train.ignore_index,
        )

    def _train_on_random_crops(self) -> list[SegmentationProbe]:
        data, settings = self.setup.data, self.settings

        def read(place: int) -> Sample:
            index = data.train_indices[place]
            image = data.train.image(index)
            return image, read_mask(data.train, index, (image.height, image.width)).numpy()

        def make(sample: Sample, size: int, random: np.random.Generator) -> live.Drawn:
            augment, interpolation = self.sections[size].augment, settings.view.interpolation
            ignore = data.train.ignore_index
            return live.Drawn(
                *random_segment(*sample, augment, size, interpolation, ignore, random)
            )

        probes: list[SegmentationProbe] = []
        for row, features, views in random_batches(
            self.setup, self.wants, read, make, count=len(data.train_indices),
            batch=settings.optimizer.batch, iterations=settings.optimizer.iterations,
            text="segmentation, random crops",
        ):  # fmt: skip
            if row == len(probes):
                probes.append(self._probe(features.patches.shape[2]))
            height, width = views[0].pixels.shape[1:]
            samples = live.dense_samples(features, (height, width))
            probes[row].step(samples, [view.label for view in views])
        return probes

    def _score(
        self, probe: SegmentationProbe, stored: Stored, truths: Masks, label: str
    ) -> tuple[Confusion, dict[str, Any]]:
        """The confusion matrix of the whole test set, and details of it."""
        setup, test = self.setup, self.setup.data.test
        confusion = Confusion(len(test.classes), test.ignore_index)
        check = ConfusionCheck(len(test.classes), test.ignore_index) if setup.verify else None
        for place in range(len(stored)):
            sample, mask = stored.dense(place), truths(place).numpy()
            predicted = probe.predict(sample, (mask.shape[0], mask.shape[1])).cpu().numpy()
            confusion.add(mask, predicted)
            if check is not None:
                check.add(mask, predicted)
            setup.progress(f"scoring {label}", place + 1, len(stored))
        iou = confusion.iou()
        absent = [name for name, value in zip(test.classes, iou, strict=True) if math.isnan(value)]
        if absent:
            setup.note(
                f"{label}: {len(absent)} of {len(iou)} classes occur neither as a label nor as a "
                f"prediction and are left out of the mean, such as {absent[0]}"
            )
        details: dict[str, Any] = {
            "iou": {
                name: number(float(value)) for name, value in zip(test.classes, iou, strict=True)
            }
        }
        if check is not None:
            details["verified"] = check.result(confusion)
        return confusion, details


def _masks(
    request: FeatureRequest, stored: Sequence[Stored], device: torch.device | None = None
) -> Masks:
    """The masks of images whose features are there, shared by all rows of the table."""
    dataset, indices, _ = request
    sizes = stored[0].sizes()
    return labels_of(lambda i: read_mask(dataset, indices[i], sizes[i].tolist()), device)


class SegmentationProbe:
    """A head in training, and what it predicts."""

    def __init__(
        self,
        width: int,
        classes: int,
        settings: Segmentation,
        *,
        seed: int,
        device: torch.device,
        ignore: int = IGNORE_INDEX,
    ) -> None:
        self.classes = classes
        self.ignore = ignore
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

    def step(self, samples: Sequence[DenseSample], labels: Sequence[Tensor]) -> float:
        """Train on a batch; the loss is the mean over all pixels that are not ignored.

        Args:
            labels: masks, uint8 or int64 [H, W].
        """
        masks = [mask.to(self.device) for mask in labels]
        known = [mask != self.ignore for mask in masks]
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
            right = torch.stack([masks[i] for i in places]).flatten()
            right = torch.where(inside, right, 0).long()
            total = total + PixelLoss.apply(large.flatten(1), right, inside)
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


def at_label_size(sample: DenseSample, maps: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """Logits [..., h, w] of the tiles -> [..., height, width], at the size of the labels.

    Straight from the grid if it can be.
    """
    if len(maps) == 1 and sample.tiles[0] == Tile(0, 0, *sample.frame):
        return bilinear(maps[0], size)
    return bilinear(merge(sample, maps), size)


class ConfusionCheck:
    """The same matrix from `sklearn.metrics.confusion_matrix`, summed over the images."""

    def __init__(self, num_classes: int, ignore: int) -> None:
        self._version = require_sklearn().__version__
        self._labels = list(range(num_classes))
        self._ignore = ignore
        self._counts = np.zeros((num_classes, num_classes), dtype=np.int64)

    def add(self, labels: Array, predicted: Array) -> None:
        from sklearn.metrics import confusion_matrix  # type: ignore[import-untyped,import-not-found]

        known = labels != self._ignore
        if known.any():
            self._counts += confusion_matrix(labels[known], predicted[known], labels=self._labels)

    def result(self, ours: Confusion) -> dict[str, Any]:
        hit = np.diag(self._counts)
        union = self._counts.sum(axis=0) + self._counts.sum(axis=1) - hit
        miou = float((hit[union > 0] / union[union > 0]).mean())
        return {
            "with": f"scikit-learn {self._version}",
            "equal_matrix": bool((self._counts == ours.counts).all()),
            "miou": miou,
        }
