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
from veca.probe.data import read_mask
from veca.probe.datasets import IGNORE_INDEX, Dataset
from veca.probe.extract import DENSE, DenseSample, Stored, Want
from veca.probe.intervals import Sums, iou_sums
from veca.probe.metrics import Confusion
from veca.probe.protocol import Segmentation
from veca.probe.resize import argmax_at, bilinear
from veca.probe.tasks.dense import DenseTask, Labels, Optimizer, TokenHead, merge, together
from veca.probe.tasks.shared import Array, ProbeSetup, at_size, number, require_sklearn
from veca.probe.views import FrameView, Tile


class SegmentationTask(DenseTask["SegmentationProbe"]):
    name = "segmentation"

    def __init__(self, setup: ProbeSetup, settings: Segmentation) -> None:
        self.sections = {size: at_size(settings, size, setup.cell) for size in setup.sizes}
        views = {size: FrameView(one.view, setup.cell) for size, one in self.sections.items()}
        wants = [Want(backbone, views[size], DENSE) for backbone, size in setup.rows]
        super().__init__(setup, settings, wants, wants)
        if settings.augment.enabled and 0 in self.sections:
            raise ProbeError("segmentation with random crops needs a short side; give --size.")

    def new_head(self, width: int) -> SegmentationProbe:
        train, setup = self.setup.data.train, self.setup
        return SegmentationProbe(
            width,
            train.num_classes,
            self.settings,
            seed=setup.seed,
            device=setup.device,
            ignore=train.ignore_index,
        )

    def read_label(self, dataset: Dataset, index: int, size: Sequence[int]) -> Tensor:
        return read_mask(dataset, index, size)

    def random_view(
        self, image: Image.Image, label: Array, size: int, random: np.random.Generator
    ) -> live.Drawn:
        augment, interpolation = self.sections[size].augment, self.settings.view.interpolation
        ignore = self.setup.data.train.ignore_index
        return live.Drawn(
            *random_segment(image, label, augment, size, interpolation, ignore, random)
        )

    def describe(self, size: int) -> dict[str, Any]:
        return {"view": dataclasses.asdict(self.sections[size].view)}

    def score(
        self, head: SegmentationProbe, test: Stored, truths: Labels, row: str
    ) -> tuple[dict[str, float], Sums, dict[str, Any]]:
        classes, ignore = self.setup.data.test.classes, self.setup.data.test.ignore_index
        confusion = Confusion(len(classes), ignore)
        check = ConfusionCheck(len(classes), ignore) if self.setup.verify else None
        for place in range(len(test)):
            sample, mask = test.dense(place), truths(place).numpy()
            predicted = head.predict(sample, (mask.shape[0], mask.shape[1])).cpu().numpy()
            confusion.add(mask, predicted)
            if check is not None:
                check.add(mask, predicted)
            self.setup.progress(f"scoring {row}", place + 1, len(test))
        iou = list(zip(classes, confusion.iou().tolist(), strict=True))
        absent = [name for name, value in iou if math.isnan(value)]
        if absent:
            self.setup.note(
                f"{row}: {len(absent)} of {len(iou)} classes occur neither as a label nor as a "
                f"prediction and are left out of the mean, such as {absent[0]}"
            )
        details: dict[str, Any] = {"iou": {name: number(value) for name, value in iou}}
        if check is not None:
            details["verified"] = check.result(confusion)
        return confusion.metrics(), iou_sums(confusion.images), details


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
