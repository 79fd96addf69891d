"""Linear depth on dense features."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from veca.probe import live
from veca.probe.augment import random_depth
from veca.probe.backbone import Backbone
from veca.probe.data import Labels
from veca.probe.datasets import Dataset
from veca.probe.depth import DepthProbe, train
from veca.probe.errors import ProbeError
from veca.probe.extract import DENSE, Stored, Want
from veca.probe.metrics import depth_errors, mean_of
from veca.probe.protocol import Depth
from veca.probe.schedule import batches
from veca.probe.tasks.job import Job, Outcome, at_size, number
from veca.probe.views import crop_of, depth_view

def depth(job: Job, settings: Depth) -> list[Outcome]:
    data, cell = job.data, job.protocol.extract.cell
    furthest = _max_depth(settings, data.test)
    views, train_views = {}, {}
    for size in job.sizes:
        view = dataclasses.replace(settings.view, size=size)
        views[size] = depth_view(view, cell, data.test)
        # Training needs no mirrored view, which would double what has to be computed.
        train_views[size] = depth_view(dataclasses.replace(view, flip=False), cell, data.train)
    wants = [Want(backbone, views[size], DENSE) for backbone, size in job.rows]
    train_wants = [Want(backbone, train_views[size], DENSE) for backbone, size in job.rows]
    crop = crop_of(settings.view.image_crop, data.test, "image_crop")
    scored = crop_of(settings.view.eval_crop, data.test, "eval_crop")
    live_probes: list[DepthProbe] = []
    train: list[Stored] = []
    if settings.augment.enabled:
        live_probes = _depth_live(job, settings, train_wants, furthest)
    else:
        train = job.extract(data.train, data.train_indices, train_wants)
    test = job.extract(data.test, data.test_indices, wants)
    outcomes = []
    for i, (backbone, size) in enumerate(job.rows):
        details: dict[str, Any] = {"features": "patches", "max_depth": furthest}
        if train:
            probe, loss = _train_depth(job, settings, train[i], backbone, furthest)
            details["train_loss"] = number(loss)
        else:
            probe = live_probes[i]
        errors, empty = [], []
        for place, index in enumerate(data.test_indices):
            sample = test[i].dense(place)
            truth = _read_depth(data.test, index, crop, sample.size)
            predicted = probe.predict(sample, (truth.shape[0], truth.shape[1]))
            box = (0, truth.shape[0], 0, truth.shape[1])
            top, bottom, left, right = box if scored is None else scored.box(*truth.shape)
            found = depth_errors(
                predicted[top:bottom, left:right], truth[top:bottom, left:right].numpy()
            )
            if found is None:
                _empty_depth(settings, data.test, index)
                empty.append(data.test.ids[index])
            else:
                errors.append(found)
            job.progress(f"scoring {backbone.label}", place + 1, len(data.test_indices))
        if empty:
            details["skipped"] = len(empty)
            note = f"{len(empty)} test images without valid depth left out, such as {empty[0]}"
            if note not in job.notes:
                job.note(note)
        details["scored"] = len(errors)
        first = test[i].dense(0).tiles[0]
        outcomes.append(
            Outcome(backbone, size, (first.height, first.width), mean_of(errors), details)
        )
    return outcomes


def _max_depth(settings: Depth, dataset: Dataset) -> float:
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


def _read_depth(
    dataset: Dataset, index: int, crop: Any, size: tuple[int, int] | None = None
) -> Tensor:
    depth = dataset.depth(index, allow_empty=True)
    if size is not None and depth.shape != tuple(size):
        raise ProbeError(
            f"{dataset.ids[index]}: depth of {depth.shape[0]} x {depth.shape[1]} pixels for an "
            f"image of {size[0]} x {size[1]}; both need the same size."
        )
    if crop is not None:
        top, bottom, left, right = crop.box(*depth.shape)
        depth = depth[top:bottom, left:right]
    return torch.from_numpy(depth.copy())


def _empty_depth(settings: Depth, dataset: Dataset, index: int) -> None:
    if settings.empty_depth == "error":
        raise ProbeError(
            f"{dataset.ids[index]}: no valid depth in the part that counts; leave the image out, "
            "or use --set depth.empty_depth=skip to have such images skipped and counted."
        )


def _train_depth(
    job: Job, settings: Depth, stored: Stored, backbone: Backbone, furthest: float
) -> tuple[DepthProbe, float]:
    data, optimizer = job.data, settings.optimizer
    crop = crop_of(settings.view.image_crop, data.train, "image_crop")
    sizes = stored.sizes()
    empty: set[int] = set()

    def read(place: int) -> Tensor:
        index = data.train_indices[place]
        depth = _read_depth(data.train, index, crop, tuple(sizes[place].tolist()))
        if not torch.isfinite(depth).any():
            _empty_depth(settings, data.train, index)
            empty.add(index)
        return depth

    probe = DepthProbe(
        stored.dense(0).maps[0].shape[2],
        furthest,
        settings,
        seed=job.protocol.seed,
        device=job.device,
    )
    order = batches(len(stored), optimizer.batch, optimizer.iterations, job.protocol.seed)
    text = f"training on {backbone.label}"
    loss = train(
        probe,
        stored,
        Labels[int](read),
        [batch.tolist() for batch in order],
        lambda done: job.progress(text, done, optimizer.iterations),
    )
    _note_empty(job, empty)
    return probe, loss


def _depth_live(
    job: Job, settings: Depth, wants: Sequence[Want], furthest: float
) -> list[DepthProbe]:
    data, extraction, optimizer = job.data, job.protocol.extract, settings.optimizer
    image_crop = crop_of(settings.view.image_crop, data.train, "image_crop")
    train_crop = crop_of(settings.augment.train_crop, data.train, "train_crop")
    empty: set[int] = set()

    def make(place: int, random: Any) -> list[live.Drawn]:
        index = data.train_indices[place]
        image = data.train.image(index)
        depth = _read_depth(data.train, index, None, (image.height, image.width)).numpy()
        if image_crop is not None:
            top, bottom, left, right = image_crop.box(*depth.shape)
            image = image.crop((left, top, right, bottom))
            depth = depth[top:bottom, left:right]
        if not (depth == depth).any():
            _empty_depth(settings, data.train, index)
            empty.add(index)
        state = random.bit_generator.state
        views = []
        for size in job.sizes:
            random.bit_generator.state = state
            views.append(
                live.Drawn(
                    *random_depth(
                        image,
                        depth,
                        settings.augment,
                        train_crop,
                        size,
                        settings.view.interpolation,
                        random,
                    )
                )
            )
        return views

    probes: list[DepthProbe | None] = [None] * len(wants)
    draws = job.draw(make, len(data.train_indices), optimizer.batch, optimizer.iterations)
    for step, batch in draws:
        for i, (_, size) in enumerate(job.rows):
            views = [one[job.sizes.index(size)] for one in batch]
            found = live.batch_features(
                wants[i], [v.pixels for v in views], extraction.cell, extraction.batch
            )
            height, width = views[0].pixels.shape[1:]
            probe = probes[i]
            if probe is None:
                probe = probes[i] = DepthProbe(
                    found.patches.shape[2],
                    furthest,
                    settings,
                    seed=job.protocol.seed,
                    device=job.device,
                )
            probe.step(live.dense_samples(found, (height, width)), [v.label for v in views])
        job.progress("depth, random crops", step + 1, optimizer.iterations)
    _note_empty(job, empty)
    return [probe for probe in probes if probe is not None]


def _note_empty(job: Job, empty: set[int]) -> None:
    if empty:
        name = job.data.train.ids[min(empty)]
        note = f"{len(empty)} training images without valid depth left out, such as {name}"
        if note not in job.notes:
            job.note(note)
