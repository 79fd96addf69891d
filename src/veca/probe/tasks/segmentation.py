"""Linear segmentation on dense features."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from veca.probe import live, verify
from veca.probe.augment import random_segment
from veca.probe.backbone import Backbone
from veca.probe.data import Labels, read_mask
from veca.probe.errors import ProbeError
from veca.probe.extract import DENSE, Stored, Want
from veca.probe.metrics import Confusion
from veca.probe.protocol import Segmentation
from veca.probe.schedule import batches
from veca.probe.segmentation import SegmentationProbe, train
from veca.probe.tasks.job import Job, Outcome, at_size, number
from veca.probe.views import FrameView

def segmentation(job: Job, settings: Segmentation) -> list[Outcome]:
    data, cell = job.data, job.protocol.extract.cell
    ignore = data.train.ignore_index
    views = {
        size: FrameView(window_view(settings.view, size, cell), cell) for size in job.sizes
    }
    wants = [Want(backbone, views[size], DENSE) for backbone, size in job.rows]
    live_probes: list[SegmentationProbe] = []
    train: list[Stored] = []
    if settings.augment.enabled:
        live_probes = _segmentation_live(job, settings, wants)
    else:
        train = job.extract(data.train, data.train_indices, wants)
    test = job.extract(data.test, data.test_indices, wants)
    outcomes = []
    for i, (backbone, size) in enumerate(job.rows):
        details: dict[str, Any] = {"features": "patches"}
        if train:
            probe, loss = _train_segmentation(job, settings, train[i], backbone)
            details["train_loss"] = number(loss)
        else:
            probe = live_probes[i]
        confusion = Confusion(data.test.num_classes, ignore)
        check = verify.ConfusionCheck(data.test.num_classes, ignore) if job.verify else None
        for place, index in enumerate(data.test_indices):
            sample = test[i].dense(place)
            mask = read_mask(data.test, index, sample.size).numpy()
            predicted = probe.predict(sample, (mask.shape[0], mask.shape[1])).cpu().numpy()
            confusion.add(mask, predicted)
            if check is not None:
                check.add(mask, predicted)
            job.progress(f"scoring {backbone.label}", place + 1, len(data.test_indices))
        iou = confusion.iou()
        absent = [data.test.classes[k] for k in range(len(iou)) if math.isnan(iou[k])]
        if absent:
            job.note(
                f"{backbone.label}: {len(absent)} of {len(iou)} classes occur neither as a label "
                f"nor as a prediction and are left out of the mean: {', '.join(absent[:5])}"
            )
        details["iou"] = {
            name: number(float(value)) for name, value in zip(data.test.classes, iou, strict=True)
        }
        if check is not None:
            details["verified"] = check.result(confusion)
        first = test[i].dense(0).tiles[0]
        outcomes.append(
            Outcome(backbone, size, (first.height, first.width), confusion.metrics(), details)
        )
    return outcomes


def _train_segmentation(
    job: Job, settings: Segmentation, stored: Stored, backbone: Backbone
) -> tuple[SegmentationProbe, float]:
    data, optimizer = job.data, settings.optimizer
    sizes = stored.sizes()
    masks = Labels[int](lambda p: read_mask(data.train, data.train_indices[p], sizes[p].tolist()))
    probe = SegmentationProbe(
        stored.dense(0).maps[0].shape[2],
        data.train.num_classes,
        settings,
        seed=job.protocol.seed,
        device=job.device,
    )
    order = list(
        batches(len(stored), optimizer.batch, optimizer.iterations, job.protocol.seed)
    )
    text = f"training on {backbone.label}"
    loss = train(
        probe,
        stored,
        masks,
        [batch.tolist() for batch in order],
        data.train.ignore_index,
        lambda done: job.progress(text, done, optimizer.iterations),
    )
    return probe, loss


def _segmentation_live(
    job: Job, settings: Segmentation, wants: Sequence[Want]
) -> list[SegmentationProbe]:
    data, extraction = job.data, job.protocol.extract
    ignore, optimizer = data.train.ignore_index, settings.optimizer
    scaled = {
        size: (
            dataclasses.replace(
                settings.augment,
                crop=_scaled(settings.augment.crop, settings.view.size, size, extraction.cell),
            ),
            size or settings.view.size,
        )
        for size in job.sizes
    }
    if any(not short for _, short in scaled.values()):
        raise ProbeError("segmentation with random crops needs a short side; give --size.")

    def make(place: int, random: Any) -> list[live.Drawn]:
        index = data.train_indices[place]
        image = data.train.image(index)
        mask = read_mask(data.train, index, (image.height, image.width)).numpy()
        state = random.bit_generator.state
        views = []
        for size in job.sizes:
            random.bit_generator.state = state
            augment, short = scaled[size]
            views.append(
                live.Drawn(
                    *random_segment(
                        image, mask, augment, short, settings.view.interpolation, ignore, random
                    )
                )
            )
        return views

    probes: list[SegmentationProbe | None] = [None] * len(wants)
    draws = job.draw(make, len(data.train_indices), optimizer.batch, optimizer.iterations)
    for step, batch in draws:
        for i, (_, size) in enumerate(job.rows):
            views = [one[job.sizes.index(size)] for one in batch]
            found = live.batch_features(
                wants[i], [v.pixels for v in views], extraction.cell, extraction.batch
            )
            side = views[0].pixels.shape[1]
            samples = live.dense_samples(found, (side, side))
            probe = probes[i]
            if probe is None:
                probe = probes[i] = SegmentationProbe(
                    found.patches.shape[2],
                    data.train.num_classes,
                    settings,
                    seed=job.protocol.seed,
                    device=job.device,
                )
            probe.step(samples, [v.label for v in views], ignore)
        job.progress("segmentation, random crops", step + 1, optimizer.iterations)
    return [probe for probe in probes if probe is not None]


def window_view(view: WindowView, size: int, cell: int) -> WindowView:
    """The view at another size: window and stride in the same proportion to it."""
    if not view.window or size in (0, view.size):
        return dataclasses.replace(view, size=size)
    window = _scaled(view.window, view.size, size, cell)
    stride = max(1, round(view.stride * window / view.window))
    return dataclasses.replace(view, size=size, window=window, stride=stride)


def _scaled(length: int, old: int, new: int, cell: int) -> int:
    """A length in the same proportion to a new size, on the grid."""
    if not old or not new or old == new:
        return length
    return max(cell, round(length * new / old / cell) * cell)
