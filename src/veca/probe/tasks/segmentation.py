"""Linear segmentation on dense features."""

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
from veca.probe.augment import random_segment
from veca.probe.backbone import Features
from veca.probe.cache import MemoryCache
from veca.probe.data import labels_of, read_mask
from veca.probe.datasets import Dataset
from veca.probe.extract import DENSE, Stored, Want
from veca.probe.intervals import iou_sums
from veca.probe.metrics import Confusion
from veca.probe.protocol import Segmentation
from veca.probe.schedule import batches
from veca.probe.segmentation import SegmentationProbe, train
from veca.probe.tasks.job import Job, Outcome, at_size, number
from veca.probe.views import FrameView

Sample = tuple[Image.Image, np.ndarray[Any, Any]]
"""An image and its mask."""
Masks = MemoryCache[int, Tensor]


def segmentation(job: Job, settings: Segmentation) -> list[Outcome]:
    data, cell = job.data, job.protocol.extract.cell
    sections = {size: at_size(settings, size, cell) for size in job.sizes}
    views = {size: FrameView(section.view, cell) for size, section in sections.items()}
    wants = [Want(backbone, views[size], DENSE) for backbone, size in job.rows]
    trained: list[SegmentationProbe] = []
    stored: list[Stored] = []
    if settings.augment.enabled:
        trained = _train_live(job, sections, wants)
    else:
        stored = job.extract(data.train, data.train_indices, wants)
    test = job.extract(data.test, data.test_indices, wants)
    masks = _masks(job, stored, data.train, data.train_indices, job.device)
    truths = _masks(job, test, data.test, data.test_indices)
    outcomes = []
    for i, (backbone, size) in enumerate(job.rows):
        details: dict[str, Any] = {
            "features": "patches",
            "view": dataclasses.asdict(sections[size].view),
        }
        if stored:
            probe, loss = _train_stored(job, settings, stored[i], masks, backbone.label)
            details["train_loss"] = number(loss)
        else:
            probe = trained[i]
        confusion, more = _score(job, probe, test[i], truths, backbone.label)
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


def _new(job: Job, settings: Segmentation, width: int) -> SegmentationProbe:
    return SegmentationProbe(
        width,
        job.data.train.num_classes,
        settings,
        seed=job.protocol.seed,
        device=job.device,
    )


def _masks(
    job: Job,
    stored: Sequence[Stored],
    dataset: Dataset,
    indices: Sequence[int],
    device: torch.device | None = None,
) -> Masks:
    """The masks of images whose features are there, shared by all rows of the table."""
    sizes = stored[0].sizes() if stored else np.empty((0, 2))
    return labels_of(lambda i: read_mask(dataset, indices[i], sizes[i].tolist()), device)


def _train_stored(
    job: Job, settings: Segmentation, stored: Stored, masks: Masks, label: str
) -> tuple[SegmentationProbe, float]:
    """Train from the cache; returns the loss at the end as well."""
    data, optimizer = job.data, settings.optimizer
    probe = _new(job, settings, stored.dense(0).maps[0].shape[2])
    order = batches(len(stored), optimizer.batch, optimizer.iterations, job.protocol.seed)
    loss = train(
        probe,
        stored,
        masks,
        order,
        data.train.ignore_index,
        lambda done: job.progress(f"training on {label}", done, optimizer.iterations),
    )
    return probe, loss


def _train_live(
    job: Job, sections: dict[int, Segmentation], wants: Sequence[Want]
) -> list[SegmentationProbe]:
    """Train on random crops."""
    data = job.data
    settings = next(iter(sections.values()))
    ignore, optimizer = data.train.ignore_index, settings.optimizer
    if 0 in sections:
        raise ProbeError("segmentation with random crops needs a short side; give --size.")

    def read(place: int) -> Sample:
        index = data.train_indices[place]
        image = data.train.image(index)
        return image, read_mask(data.train, index, (image.height, image.width)).numpy()

    def make(sample: Sample, size: int, random: np.random.Generator) -> live.Drawn:
        augment, interpolation = sections[size].augment, settings.view.interpolation
        return live.Drawn(*random_segment(*sample, augment, size, interpolation, ignore, random))

    def head(row: int, features: Features) -> SegmentationProbe:
        return _new(job, settings, features.patches.shape[2])

    def step(probe: SegmentationProbe, features: Features, views: list[live.Drawn]) -> None:
        height, width = views[0].pixels.shape[1:]
        samples = live.dense_samples(features, (height, width))
        probe.step(samples, [view.label for view in views], ignore)

    return job.train_live(
        wants,
        read,
        make,
        count=len(data.train_indices),
        batch=optimizer.batch,
        iterations=optimizer.iterations,
        text="segmentation, random crops",
        head=head,
        step=step,
    )


def _score(
    job: Job, probe: SegmentationProbe, stored: Stored, truths: Masks, label: str
) -> tuple[Confusion, dict[str, Any]]:
    """The confusion matrix of the whole test set, and details of it."""
    data = job.data
    classes, ignore = data.test.classes, data.test.ignore_index
    confusion = Confusion(len(classes), ignore)
    check = verify.ConfusionCheck(len(classes), ignore) if job.verify else None
    for place in range(len(stored)):
        sample, mask = stored.dense(place), truths(place).numpy()
        predicted = probe.predict(sample, (mask.shape[0], mask.shape[1])).cpu().numpy()
        confusion.add(mask, predicted)
        if check is not None:
            check.add(mask, predicted)
        job.progress(f"scoring {label}", place + 1, len(data.test_indices))
    iou = confusion.iou()
    absent = [name for name, value in zip(classes, iou, strict=True) if math.isnan(value)]
    if absent:
        job.note(
            f"{label}: {len(absent)} of {len(iou)} classes occur neither as a label nor as a "
            f"prediction and are left out of the mean, such as {absent[0]}"
        )
    details: dict[str, Any] = {
        "iou": {name: number(float(value)) for name, value in zip(classes, iou, strict=True)}
    }
    if check is not None:
        details["verified"] = check.result(confusion)
    return confusion, details
