"""Linear depth with bins: batch norm and a 1x1 convolution to 256 depths, of which the mean is
taken.

The weight of a bin is relu(logit) + 0.1, normalised; the depth of a patch is the weighted mean of
the bins' depths, enlarged to the image. Trained with the scale-invariant loss of log depths.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.errors import ProbeError
from veca.probe import live
from veca.probe.augment import random_depth
from veca.probe.cache import MemoryCache
from veca.probe.data import labels_of
from veca.probe.datasets import Crop, Dataset
from veca.probe.extract import DENSE, DenseSample, Stored, Want
from veca.probe.intervals import mean_sums
from veca.probe.metrics import depth_errors, mean_of
from veca.probe.protocol import Depth
from veca.probe.resize import bilinear
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
from veca.probe.views import crop_of, depth_view

Sample = tuple[Image.Image, Array]
"""An image and its depth."""
Depths = MemoryCache[int, Tensor]


class DepthTask:
    def __init__(self, setup: ProbeSetup, settings: Depth) -> None:
        self.setup, self.settings = setup, settings
        data = setup.data
        self.max_depth = _max_depth(settings, data.test)
        wants, self.train_wants = [], []
        for backbone, size in setup.rows:
            view = at_size(settings, size, setup.cell).view
            wants.append(Want(backbone, depth_view(view, setup.cell, data.test), DENSE))
            # Training needs no mirrored view, which would double what has to be computed.
            upright = dataclasses.replace(view, flip=False)
            seen = depth_view(upright, setup.cell, data.train)
            self.train_wants.append(Want(backbone, seen, DENSE))
        self.requests = [setup.of_test(wants)]
        if not settings.augment.enabled:
            self.requests.insert(0, setup.of_training(self.train_wants))

    def outcomes(self, features: Sequence[Sequence[Stored]]) -> list[Outcome]:
        setup, settings = self.setup, self.settings
        *training, test = features
        probes = self._train_on_random_crops() if settings.augment.enabled else []
        depths = self._depths(self.requests[0], training[0], setup.device) if training else None
        truths = self._depths(self.requests[-1], test)
        outcomes = []
        for i, (backbone, size) in enumerate(setup.rows):
            details: dict[str, Any] = {"features": "patches", "max_depth": self.max_depth}
            if depths is None:
                probe = probes[i]
            else:
                probe, loss = self._train_on_stored(training[0][i], depths, backbone.label)
                details["train_loss"] = number(loss)
            errors, more = self._score(probe, test[i], truths, backbone.label)
            first = test[i].dense(0).tiles[0]
            outcomes.append(
                Outcome(
                    backbone,
                    size,
                    (first.height, first.width),
                    mean_of([one for one in errors if one is not None]),
                    mean_sums([one["rmse"] if one else None for one in errors]),
                    {**details, **more},
                )
            )
        return outcomes

    def _probe(self, width: int) -> DepthProbe:
        setup = self.setup
        return DepthProbe(
            width, self.max_depth, self.settings, seed=setup.seed, device=setup.device
        )

    def _depths(
        self, request: FeatureRequest, stored: Sequence[Stored], device: torch.device | None = None
    ) -> Depths:
        """The depth of images whose features are there, shared by all rows of the table."""
        dataset, indices, _ = request
        crop = crop_of(self.settings.view.image_crop, dataset, "image_crop")
        sizes = stored[0].sizes()
        return labels_of(
            lambda i: _read(self.settings, dataset, indices[i], crop, sizes[i].tolist()), device
        )

    def _train_on_stored(
        self, stored: Stored, depths: Depths, label: str
    ) -> tuple[DepthProbe, float]:
        """A head trained from the cache, and its loss at the end."""
        data = self.setup.data
        probe = self._probe(stored.dense(0).maps[0].shape[2])
        seen: dict[int, bool] = {}

        def read(place: int) -> Tensor:
            found = depths(place)
            if place not in seen:
                seen[place] = bool(torch.isfinite(found).any())
            return found

        loss = train_on_stored(self.setup, probe, stored, read, self.settings.optimizer, label)
        empty = [data.train_indices[place] for place, valid in seen.items() if not valid]
        self._note_empty("training", data.train, empty)
        return probe, loss

    def _train_on_random_crops(self) -> list[DepthProbe]:
        data, settings = self.setup.data, self.settings
        image_crop = crop_of(settings.view.image_crop, data.train, "image_crop")
        train_crop = crop_of(settings.augment.train_crop, data.train, "train_crop")
        empty: set[int] = set()

        def read(place: int) -> Sample:
            index = data.train_indices[place]
            image = data.train.image(index)
            size = (image.height, image.width)
            found = _read(settings, data.train, index, image_crop, size).numpy()
            if not np.isfinite(found).any():
                empty.add(index)
            if image_crop is not None:
                top, bottom, left, right = image_crop.box(*size)
                image = image.crop((left, top, right, bottom))
            return image, found

        def make(sample: Sample, size: int, random: np.random.Generator) -> live.Drawn:
            augment, interpolation = settings.augment, settings.view.interpolation
            return live.Drawn(
                *random_depth(*sample, augment, train_crop, size, interpolation, random)
            )

        probes: list[DepthProbe] = []
        for row, features, views in random_batches(
            self.setup, self.train_wants, read, make, count=len(data.train_indices),
            batch=settings.optimizer.batch, iterations=settings.optimizer.iterations,
            text="depth, random crops",
        ):  # fmt: skip
            if row == len(probes):
                probes.append(self._probe(features.patches.shape[2]))
            height, width = views[0].pixels.shape[1:]
            samples = live.dense_samples(features, (height, width))
            probes[row].step(samples, [view.label for view in views])
        self._note_empty("training", data.train, empty)
        return probes

    def _score(
        self, probe: DepthProbe, stored: Stored, truths: Depths, label: str
    ) -> tuple[list[dict[str, float] | None], dict[str, Any]]:
        """Errors of each test image, None where no depth is valid, and how many there were."""
        setup, data = self.setup, self.setup.data
        scored = crop_of(self.settings.view.eval_crop, data.test, "eval_crop")
        errors: list[dict[str, float] | None] = []
        empty: set[int] = set()
        check = DepthCheck() if setup.verify else None
        for place, index in enumerate(data.test_indices):
            sample, truth = stored.dense(place), truths(place).numpy()
            predicted = probe.predict(sample, (truth.shape[0], truth.shape[1]))
            if scored is not None:
                top, bottom, left, right = scored.box(*truth.shape)
                truth, predicted = truth[top:bottom, left:right], predicted[top:bottom, left:right]
            found = depth_errors(predicted, truth)
            if check is not None:
                check.add(predicted, truth)
            errors.append(found)
            if found is None:
                if self.settings.empty_depth == "error":
                    raise _empty(data.test, index)
                empty.add(index)
            setup.progress(f"scoring {label}", place + 1, len(data.test_indices))
        self._note_empty("test", data.test, empty)
        details: dict[str, Any] = {"scored": len(errors) - len(empty), "skipped": len(empty)}
        if check is not None:
            details["verified"] = check.result()
        return errors, details

    def _note_empty(self, part: str, dataset: Dataset, empty: Iterable[int]) -> None:
        indices = sorted(empty)
        if indices:
            name = dataset.ids[indices[0]]
            self.setup.note(
                f"{len(indices)} {part} images without valid depth left out, such as {name}"
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


def _read(
    settings: Depth, dataset: Dataset, index: int, crop: Crop | None, size: Sequence[int]
) -> Tensor:
    """float32 [H, W] after the crop, checked against the size of the image; may hold only nan."""
    found = dataset.depth(index, allow_empty=settings.empty_depth == "skip")
    if found.shape != tuple(size):
        raise ProbeError(
            f"{dataset.ids[index]}: depth of {found.shape[0]} x {found.shape[1]} pixels for an "
            f"image of {size[0]} x {size[1]}; both need the same size."
        )
    if crop is not None:
        top, bottom, left, right = crop.box(*found.shape)
        found = found[top:bottom, left:right]
    if settings.empty_depth == "error" and not np.isfinite(found).any():
        raise _empty(dataset, index)
    return torch.from_numpy(found.copy())


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
