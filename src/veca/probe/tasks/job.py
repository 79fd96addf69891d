"""What a task is given and what it gives back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from veca.probe import live
from veca.probe.backbone import Backbone
from veca.probe.data import Data
from veca.probe.datasets import Dataset
from veca.probe.extract import Stored, Summary, Want, extract
from veca.probe.protocol import Protocol, Segmentation

_S = TypeVar("_S")

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total)."""


@dataclass
class Outcome:
    """What a task found for one backbone at one size."""

    backbone: Backbone
    size: int
    """Side or short side of the view, in pixels; 0: the images' own."""
    input: tuple[int, int]
    """(height, width) of the pixels that a forward pass takes: for the cost."""
    metrics: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)
    """Chosen settings, scores by class and the like, as JSON types."""


@dataclass
class Job:
    """Everything a task needs."""

    protocol: Protocol
    data: Data
    backbones: Sequence[Backbone]
    sizes: Sequence[int]
    cache: Path | None
    device: torch.device
    stack: ExitStack
    summary: Summary = field(default_factory=Summary)
    notes: list[str] = field(default_factory=list)
    progress: Progress = lambda text, done, total: None
    workers: int | None = None
    verify: bool = False

    @property
    def rows(self) -> list[tuple[Backbone, int]]:
        """(backbone, size) in the order of the table."""
        return [(backbone, size) for size in self.sizes for backbone in self.backbones]

    def extract(
        self, dataset: Dataset, indices: Sequence[int], wants: Sequence[Want]
    ) -> list[Stored]:
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

    def draw(
        self, make: live.Make, count: int, batch: int, iterations: int
    ) -> Iterator[tuple[int, list[Sequence[live.Drawn]]]]:
        """(step, the random views of its batch), for training on random views."""
        drawn = live.draw(
            make,
            count,
            batch=batch,
            iterations=iterations,
            seed=self.protocol.seed,
            workers=self.workers,
        )
        return enumerate(drawn)

    def note(self, text: str) -> None:
        """Say it once."""
        if text not in self.notes:
            self.notes.append(text)


def at_size(section: _S, size: int, cell: int) -> _S:
    """A task's constants at another size: window, stride and crop keep their proportion to it."""
    view: Any = section.view  # type: ignore[attr-defined]
    if size == view.size:
        return section
    changes: dict[str, Any] = {"size": size}
    section = dataclasses.replace(section, view=dataclasses.replace(view, size=size))  # type: ignore[type-var]
    if not isinstance(section, Segmentation) or not view.size:
        return section
    if view.window:
        changes["window"] = _scaled(view.window, size / view.size, cell)
        changes["stride"] = max(1, round(view.stride * changes["window"] / view.window))
    crop = _scaled(section.augment.crop, size / view.size, cell)
    return dataclasses.replace(  # type: ignore[type-var]
        section,
        view=dataclasses.replace(view, **changes),
        augment=dataclasses.replace(section.augment, crop=crop),
    )


def _scaled(length: int, factor: float, cell: int) -> int:
    return max(cell, round(length * factor / cell) * cell)


def number(value: float) -> float | None:
    """For JSON, which has no nan."""
    return value if math.isfinite(value) else None
