"""Training on random views: features are computed as training goes on, since no view comes twice.

Each image is decoded once in an iteration, for every size; each size's pixels go once to every
backbone and budget; and all heads of the table train side by side on the same draws.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from veca.embed.pipeline import read_ahead
from veca.probe.backbone import Features, guarded_features
from veca.probe.extract import CLS, DenseSample, Want
from veca.probe.schedule import batches, generator
from veca.probe.views import Tile, to_unit


class Drawn(NamedTuple):
    """One random view."""

    pixels: Tensor
    """uint8 [3, H, W]."""
    label: Any


Make = Callable[[int, np.random.Generator], Sequence[Drawn]]
"""(place of the image, random numbers) -> one view per size."""


def draw(
    make: Make,
    count: int,
    *,
    batch: int,
    iterations: int,
    seed: int,
    workers: int | None = None,
) -> Iterator[list[Sequence[Drawn]]]:
    """For every iteration the random views of its batch, made in advance by threads."""
    threads = min(8, os.cpu_count() or 1) if workers is None else workers

    def one(job: tuple[int, int, int]) -> Sequence[Drawn]:
        step, slot, place = job
        return make(place, generator(seed, "augment", step, slot))

    jobs = (
        (step, slot, int(place))
        for step, order in enumerate(batches(count, batch, iterations, seed))
        for slot, place in enumerate(order)
    )
    with closing(read_ahead(one, jobs, workers=threads, ahead=3 * batch)) as views:
        for _ in range(iterations):
            yield list(islice(views, batch))


def batch_features(want: Want, pixels: Sequence[Tensor], cell: int, chunk: int) -> Features:
    """Features of a batch of views of one size, a chunk at a time."""
    parts, cls_only = [], want.kind == CLS
    for start in range(0, len(pixels), chunk):
        stacked = to_unit(torch.stack(list(pixels[start : start + chunk])), want.backbone.device)
        grid = want.backbone.grid_for((stacked.shape[2], stacked.shape[3]), cell)
        parts.append(guarded_features(want.backbone, stacked, grid, cls_only=cls_only))
    # Joining copies: tensors made in inference mode could not enter a head that learns.
    cls = torch.cat([part.cls for part in parts])
    return Features(cls, torch.cat([part.patches for part in parts]), parts[0].grid)


def dense_samples(features: Features, size: tuple[int, int]) -> list[DenseSample]:
    """The same form that cached features have: one tile, the whole view."""
    tile = Tile(0, 0, *size)
    return [
        DenseSample(size, size, (tile,), (patches.unflatten(0, features.grid),))
        for patches in features.patches
    ]


def global_features(features: Features, choice: str) -> Tensor:
    """[B, D]: "cls", "mean" or "cls+mean"."""
    parts = {"cls": lambda: features.cls, "mean": lambda: features.patches.mean(dim=1)}
    return torch.cat([parts[name]() for name in choice.split("+")], dim=1)
