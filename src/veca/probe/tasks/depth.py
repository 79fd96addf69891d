"""Linear depth on dense features."""

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
from veca.probe import live, verify
from veca.probe.augment import random_depth
from veca.probe.backbone import Features
from veca.probe.cache import MemoryCache
from veca.probe.data import labels_of
from veca.probe.datasets import Crop, Dataset
from veca.probe.depth import DepthProbe, train
from veca.probe.extract import DENSE, Stored, Want
from veca.probe.intervals import mean_sums
from veca.probe.metrics import depth_errors, mean_of
from veca.probe.protocol import Depth
from veca.probe.schedule import batches
from veca.probe.tasks.job import Job, Outcome, at_size, number
from veca.probe.views import crop_of, depth_view

Sample = tuple[Image.Image, np.ndarray[Any, Any]]
"""An image and its depth."""
Depths = MemoryCache[int, Tensor]


def depth(job: Job, settings: Depth) -> list[Outcome]:
    data, cell = job.data, job.protocol.extract.cell
    furthest = _max_depth(settings, data.test)
    wants, train_wants = [], []
    for backbone, size in job.rows:
        view = at_size(settings, size, cell).view
        wants.append(Want(backbone, depth_view(view, cell, data.test), DENSE))
        # Training needs no mirrored view, which would double what has to be computed.
        upright = dataclasses.replace(view, flip=False)
        train_wants.append(Want(backbone, depth_view(upright, cell, data.train), DENSE))
    trained: list[DepthProbe] = []
    stored: list[Stored] = []
    if settings.augment.enabled:
        trained = _train_live(job, settings, train_wants, furthest)
    else:
        stored = job.extract(data.train, data.train_indices, train_wants)
    test = job.extract(data.test, data.test_indices, wants)
    depths = _depths(settings, stored, data.train, data.train_indices, job.device)
    truths = _depths(settings, test, data.test, data.test_indices)
    outcomes = []
    for i, (backbone, size) in enumerate(job.rows):
        details: dict[str, Any] = {"features": "patches", "max_depth": furthest}
        if stored:
            probe = _new(job, settings, stored[i].dense(0).maps[0].shape[2], furthest)
            loss = _train_stored(job, settings, probe, stored[i], depths, backbone.label)
            details["train_loss"] = number(loss)
        else:
            probe = trained[i]
        errors, more = _score(job, settings, probe, test[i], truths, backbone.label)
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


def _new(job: Job, settings: Depth, width: int, furthest: float) -> DepthProbe:
    return DepthProbe(width, furthest, settings, seed=job.protocol.seed, device=job.device)


def _depths(
    settings: Depth,
    stored: Sequence[Stored],
    dataset: Dataset,
    indices: Sequence[int],
    device: torch.device | None = None,
) -> Depths:
    """The depth of images whose features are there, shared by all rows of the table."""
    crop = crop_of(settings.view.image_crop, dataset, "image_crop")
    sizes = stored[0].sizes() if stored else np.empty((0, 2))
    return labels_of(
        lambda i: _read(settings, dataset, indices[i], crop, sizes[i].tolist()), device
    )


def _train_stored(
    job: Job, settings: Depth, probe: DepthProbe, stored: Stored, depths: Depths, label: str
) -> float:
    """Train from the cache; returns the loss at the end."""
    optimizer = settings.optimizer
    seen: set[int] = set()
    empty: set[int] = set()

    def read(place: int) -> Tensor:
        found = depths(place)
        if place not in seen:
            seen.add(place)
            if not torch.isfinite(found).any():
                empty.add(job.data.train_indices[place])
        return found

    order = batches(len(stored), optimizer.batch, optimizer.iterations, job.protocol.seed)
    loss = train(
        probe,
        stored,
        read,
        order,
        lambda done: job.progress(f"training on {label}", done, optimizer.iterations),
    )
    _note_empty(job, "training", job.data.train, empty)
    return loss


def _train_live(
    job: Job, settings: Depth, wants: Sequence[Want], furthest: float
) -> list[DepthProbe]:
    """Train on random crops."""
    data, optimizer = job.data, settings.optimizer
    image_crop = crop_of(settings.view.image_crop, data.train, "image_crop")
    train_crop = crop_of(settings.augment.train_crop, data.train, "train_crop")
    empty: set[int] = set()

    def read(place: int) -> Sample:
        index = data.train_indices[place]
        image = data.train.image(index)
        found = _read(settings, data.train, index, image_crop, (image.height, image.width)).numpy()
        if not np.isfinite(found).any():
            empty.add(index)
        if image_crop is not None:
            top, bottom, left, right = image_crop.box(image.height, image.width)
            image = image.crop((left, top, right, bottom))
        return image, found

    def make(sample: Sample, size: int, random: np.random.Generator) -> live.Drawn:
        augment, interpolation = settings.augment, settings.view.interpolation
        return live.Drawn(*random_depth(*sample, augment, train_crop, size, interpolation, random))

    def head(row: int, features: Features) -> DepthProbe:
        return _new(job, settings, features.patches.shape[2], furthest)

    def step(probe: DepthProbe, features: Features, views: list[live.Drawn]) -> None:
        height, width = views[0].pixels.shape[1:]
        samples = live.dense_samples(features, (height, width))
        probe.step(samples, [view.label for view in views])

    probes = job.train_live(
        wants,
        read,
        make,
        count=len(data.train_indices),
        batch=optimizer.batch,
        iterations=optimizer.iterations,
        text="depth, random crops",
        head=head,
        step=step,
    )
    _note_empty(job, "training", data.train, empty)
    return probes


def _score(
    job: Job, settings: Depth, probe: DepthProbe, stored: Stored, truths: Depths, label: str
) -> tuple[list[dict[str, float] | None], dict[str, Any]]:
    """Errors of each test image, None where no depth is valid, and how many there were."""
    data = job.data
    scored = crop_of(settings.view.eval_crop, data.test, "eval_crop")
    errors: list[dict[str, float] | None] = []
    empty: set[int] = set()
    check = verify.DepthCheck() if job.verify else None
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
            if settings.empty_depth == "error":
                raise _empty(data.test, index)
            empty.add(index)
        job.progress(f"scoring {label}", place + 1, len(data.test_indices))
    _note_empty(job, "test", data.test, empty)
    details: dict[str, Any] = {"scored": len(errors) - len(empty), "skipped": len(empty)}
    if check is not None:
        details["verified"] = check.result()
    return errors, details


def _note_empty(job: Job, part: str, dataset: Dataset, empty: set[int]) -> None:
    if empty:
        name = dataset.ids[min(empty)]
        job.note(f"{len(empty)} {part} images without valid depth left out, such as {name}")
