"""Linear depth with bins: batch norm and a 1x1 convolution to 256 depths, of which the mean is
taken.

The weight of a bin is relu(logit) + 0.1, normalised; the depth of a patch is the weighted mean of
the bins' depths, enlarged to the image. Trained with the scale-invariant loss of log depths.
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
from veca.probe.augment import random_depth
from veca.probe.datasets import Dataset
from veca.probe.extract import DENSE, DenseSample, Stored, Want
from veca.probe.intervals import Sums, mean_sums
from veca.probe.metrics import depth_errors, mean_of
from veca.probe.protocol import Depth
from veca.probe.resize import bilinear
from veca.probe.tasks.dense import DenseTask, Labels, Optimizer, TokenHead, merge, together
from veca.probe.tasks.shared import Array, ProbeSetup, at_size, require_sklearn
from veca.probe.views import crop_of, depth_view


class DepthTask(DenseTask["DepthProbe"]):
    name = "depth"

    def __init__(self, setup: ProbeSetup, settings: Depth) -> None:
        self.max_depth = _max_depth(settings, setup.data.test)
        train = setup.data.train
        self._image_crop = crop_of(settings.view.image_crop, train, "image_crop")
        self._train_crop = None
        if settings.augment.enabled:
            self._train_crop = crop_of(settings.augment.train_crop, train, "train_crop")
        self._scored = crop_of(settings.view.eval_crop, setup.data.test, "eval_crop")
        self._empty: set[int] = set()  # training images without valid depth, as they are met
        wants, train_wants = [], []
        for backbone, size in setup.rows:
            view = at_size(settings, size, setup.cell).view
            wants.append(Want(backbone, depth_view(view, setup.cell, setup.data.test), DENSE))
            # Training needs no mirrored view, which would double what has to be computed.
            upright = dataclasses.replace(view, flip=False)
            seen = depth_view(upright, setup.cell, setup.data.train)
            train_wants.append(Want(backbone, seen, DENSE))
        super().__init__(setup, settings, wants, train_wants)

    def new_head(self, width: int) -> DepthProbe:
        setup = self.setup
        return DepthProbe(
            width, self.max_depth, self.settings, seed=setup.seed, device=setup.device
        )

    def read_label(self, dataset: Dataset, index: int, size: Sequence[int]) -> Tensor:
        """float32 [H, W] after the crop; may hold only nan where such images are skipped."""
        found = dataset.depth(index, allow_empty=self.settings.empty_depth == "skip")
        if found.shape != tuple(size):
            raise ProbeError(
                f"{dataset.ids[index]}: depth of {found.shape[0]} x {found.shape[1]} pixels for an "
                f"image of {size[0]} x {size[1]}; both need the same size."
            )
        crop = crop_of(self.settings.view.image_crop, dataset, "image_crop")
        if crop is not None:
            top, bottom, left, right = crop.box(*found.shape)
            found = found[top:bottom, left:right]
        if not np.isfinite(found).any():
            if self.settings.empty_depth == "error":
                raise _empty(dataset, index)
            if dataset is self.setup.data.train:
                self._empty.add(index)
        return torch.from_numpy(found.copy())

    def random_view(
        self, image: Image.Image, label: Array, size: int, random: np.random.Generator
    ) -> live.Drawn:
        augment, interpolation = self.settings.augment, self.settings.view.interpolation
        if self._image_crop is not None:
            top, bottom, left, right = self._image_crop.box(image.height, image.width)
            image = image.crop((left, top, right, bottom))
        return live.Drawn(
            *random_depth(image, label, augment, self._train_crop, size, interpolation, random)
        )

    def describe(self, size: int) -> dict[str, Any]:
        return {"max_depth": self.max_depth}

    def score(
        self, head: DepthProbe, test: Stored, truths: Labels, row: str
    ) -> tuple[dict[str, float], Sums, dict[str, Any]]:
        setup, data = self.setup, self.setup.data
        self._note_empty("training", data.train, self._empty)
        errors: list[dict[str, float] | None] = []
        empty: set[int] = set()
        check = DepthCheck() if setup.verify else None
        for place, index in enumerate(data.test_indices):
            sample, truth = test.dense(place), truths(place).numpy()
            predicted = head.predict(sample, (truth.shape[0], truth.shape[1]))
            if self._scored is not None:
                top, bottom, left, right = self._scored.box(*truth.shape)
                truth, predicted = truth[top:bottom, left:right], predicted[top:bottom, left:right]
            found = depth_errors(predicted, truth)
            if check is not None:
                check.add(predicted, truth)
            errors.append(found)
            if found is None:
                if self.settings.empty_depth == "error":
                    raise _empty(data.test, index)
                empty.add(index)
            setup.progress(f"scoring {row}", place + 1, len(data.test_indices))
        self._note_empty("test", data.test, empty)
        details: dict[str, Any] = {"scored": len(errors) - len(empty), "skipped": len(empty)}
        if check is not None:
            details["verified"] = check.result()
        metrics = mean_of([one for one in errors if one is not None])
        return metrics, mean_sums([one["rmse"] if one else None for one in errors]), details

    def _note_empty(self, part: str, dataset: Dataset, empty: set[int]) -> None:
        if empty:
            name = dataset.ids[min(empty)]
            self.setup.note(
                f"{len(empty)} {part} images without valid depth left out, such as {name}"
            )


def _max_depth(settings: Depth, dataset: Dataset) -> float:
    """Where the bins end; it must not be short of what is scored."""
    own = float(getattr(dataset, "max_depth", math.inf))
    if not settings.max_depth:
        if not math.isfinite(own):
            raise ProbeError(
                f"{dataset.name} does not say how far its depth goes; set depth.max_depth (metres)."
            )
        return own
    if own > settings.max_depth:
        raise ProbeError(
            f"the protocol's bins end at {settings.max_depth:g} m, but {dataset.name} is scored up "
            f"to {own:g} m; use another protocol, or --set depth.max_depth={own:g}."
        )
    return settings.max_depth


def _empty(dataset: Dataset, index: int) -> ProbeError:
    return ProbeError(
        f"{dataset.ids[index]}: no valid depth in the part that counts; leave the image out, or "
        "use --set depth.empty_depth=skip to have such images skipped and counted."
    )


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

    def step(self, samples: Sequence[DenseSample], labels: Sequence[Tensor]) -> float:
        """Train on a batch; labels are float32 [H, W] in metres, nan where invalid."""
        samples = [sample._replace(maps=sample.maps[:1]) for sample in samples]
        depths = [truth.to(self.device) for truth in labels]
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


class DepthCheck:
    """`sklearn.metrics` on the valid pixels of each image, averaged over the images."""

    def __init__(self) -> None:
        self._version = require_sklearn().__version__
        self._errors: list[tuple[float, float]] = []

    def add(self, predicted: Array, truth: Array) -> None:
        from sklearn import metrics  # type: ignore[import-untyped,import-not-found]

        valid = np.isfinite(truth)
        if valid.any():
            pair = truth[valid].astype(np.float64), predicted[valid].astype(np.float64)
            squared = metrics.mean_squared_error(*pair)
            relative = metrics.mean_absolute_percentage_error(*pair)
            self._errors.append((float(np.sqrt(squared)), float(relative)))

    def result(self) -> dict[str, Any]:
        rmse, abs_rel = np.mean(self._errors, axis=0).tolist()
        return {"with": f"scikit-learn {self._version}", "rmse": rmse, "abs_rel": abs_rel}
