"""What a task is given and what it gives back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from veca.probe import live
from veca.probe.backbone import Backbone, Features
from veca.probe.data import Data
from veca.probe.datasets import Dataset
from veca.probe.extract import Stored, Summary, Want, extract
from veca.probe.intervals import Sums
from veca.probe.protocol import Protocol, Segmentation

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total)."""

_S = TypeVar("_S")
_H = TypeVar("_H")
_I = TypeVar("_I")


@dataclass
class Outcome:
    """What a task found for one backbone at one size."""

    backbone: Backbone
    size: int
    """Side or short side of the view, in pixels; 0: the images' own."""
    input: tuple[int, int]
    """(height, width) of the pixels that a forward pass takes: for the cost."""
    metrics: dict[str, float]
    sums: Sums
    """Of the score that comes first, by test image in the order of `Data.test_indices`."""
    details: dict[str, Any] = field(default_factory=dict)
    """Chosen settings, scores by class and the like, as JSON types."""


def _silent(text: str, done: int, total: int) -> None:
    pass


@dataclass
class Job:
    """Everything a task needs."""

    protocol: Protocol
    data: Data
    backbones: Sequence[Backbone]
    sizes: Sequence[int]
    cache: Path | None
    device: torch.device
    """Where heads train."""
    stack: ExitStack
    summary: Summary = field(default_factory=Summary)
    notes: list[str] = field(default_factory=list)
    progress: Progress = _silent
    workers: int | None = None
    verify: bool = False

    @property
    def rows(self) -> list[tuple[Backbone, int]]:
        """(backbone, size) in the order of the table."""
        return [(backbone, size) for size in self.sizes for backbone in self.backbones]

    def note(self, text: str) -> None:
        """Say it once."""
        if text not in self.notes:
            self.notes.append(text)

    def extract(
        self, dataset: Dataset, indices: Sequence[int], wants: Sequence[Want]
    ) -> list[Stored]:
        """Features from the cache, or computed into it."""
        text = f"features, {dataset.own_split}"
        return extract(
            dataset,
            indices,
            wants,
            settings=self.protocol.extract,
            cache=self.cache,
            stack=self.stack,
            progress=lambda done, total: self.progress(text, done, total),
            workers=self.workers,
            summary=self.summary,
        )

    def train_live(
        self,
        wants: Sequence[Want],
        read: Callable[[int], _I],
        make: Callable[[_I, int, np.random.Generator], live.Drawn],
        *,
        count: int,
        batch: int,
        iterations: int,
        text: str,
        head: Callable[[int, Features], _H],
        step: Callable[[_H, Features, list[live.Drawn]], object],
    ) -> list[_H]:
        """Train a head for every want on random views of `count` images.

        Args:
            wants: in the order of `rows`.
            read: place -> the image with its label; once in an iteration, for all sizes.
            make: (what was read, size, random numbers) -> a view; every size gets the same numbers.
            head: (row, features of the first batch) -> a fresh head.
            step: trains a head on the features of a batch.
        """
        extraction = self.protocol.extract

        def views(place: int, random: np.random.Generator) -> list[live.Drawn]:
            image, state = read(place), random.bit_generator.state
            made = []
            for size in self.sizes:
                random.bit_generator.state = state
                made.append(make(image, size, random))
            return made

        drawn = live.draw(
            views,
            count,
            batch=batch,
            iterations=iterations,
            seed=self.protocol.seed,
            workers=self.workers,
        )
        heads: list[_H] = []
        for done, samples in enumerate(drawn, 1):
            for row, (want, (_, size)) in enumerate(zip(wants, self.rows, strict=True)):
                at = self.sizes.index(size)
                mine = [sample[at] for sample in samples]
                pixels = [view.pixels for view in mine]
                features = live.batch_features(want, pixels, extraction.cell, extraction.batch)
                if len(heads) == row:
                    heads.append(head(row, features))
                step(heads[row], features, mine)
            self.progress(text, done, iterations)
        return heads


def at_size(section: _S, size: int, cell: int) -> _S:
    """A task's constants at another size: window, stride and crop keep their proportion to it."""
    old: Any = section
    if size == old.view.size:
        return section
    view = dataclasses.replace(old.view, size=size)
    changes: dict[str, Any] = {}
    if isinstance(old, Segmentation) and old.view.size and size:
        factor = size / old.view.size
        if view.window:
            window = scaled(view.window, factor, cell)
            stride = max(1, round(view.stride * window / view.window))
            view = dataclasses.replace(view, window=window, stride=stride)
        crop = scaled(old.augment.crop, factor, cell)
        changes["augment"] = dataclasses.replace(old.augment, crop=crop)
    new: _S = dataclasses.replace(old, view=view, **changes)
    return new


def scaled(length: int, factor: float, cell: int) -> int:
    """A length times a factor, on the grid."""
    return max(cell, round(length * factor / cell) * cell)


def number(value: float) -> float | None:
    """For JSON, which has no nan."""
    return value if math.isfinite(value) else None
