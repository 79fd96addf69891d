"""What the tasks share: what each is given and gives back, random views, choosing, scaling.

A task is made before any feature is there: it checks its settings and says, in `requests`, which
features it needs. `outcomes` takes them, trains and scores. Nothing looks at test labels before the
score.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from veca._util.extras import require
from veca.probe import live
from veca.probe import protocol as protocols
from veca.probe.backbone import Backbone, Features
from veca.probe.data import ProbeData
from veca.probe.datasets import Dataset
from veca.probe.extract import CLS, GLOBAL, Stored, Want
from veca.probe.intervals import Sums, mean_sums
from veca.probe.metrics import accuracy, hits
from veca.probe.views import SquareView

Array = np.ndarray[Any, Any]
Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total)."""

_S = TypeVar("_S")
_I = TypeVar("_I")


class FeatureRequest(NamedTuple):
    """Features of some images of a dataset, for every row of the table."""

    dataset: Dataset
    indices: Sequence[int]
    wants: Sequence[Want]


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
    """Of the score that comes first, by test image in the order of `ProbeData.test_indices`."""
    details: dict[str, Any] = field(default_factory=dict)
    """Chosen settings, scores by class and the like, as JSON types."""


class Task(Protocol):
    """One kind of probe, on one table's backbones and data."""

    requests: list[FeatureRequest]

    def outcomes(self, features: Sequence[Sequence[Stored]]) -> list[Outcome]:
        """Train and score; takes the answer to each request, one `Stored` per want of it.

        Returns:
            One outcome for each of `ProbeSetup.rows`.
        """
        ...


@dataclass
class ProbeSetup:
    """Everything a task is given."""

    protocol: protocols.Protocol
    data: ProbeData
    backbones: Sequence[Backbone]
    sizes: Sequence[int]
    device: torch.device
    """Where heads train."""
    progress: Progress
    workers: int | None = None
    verify: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[Backbone, int]]:
        """(backbone, size) in the order of the table."""
        return [(backbone, size) for size in self.sizes for backbone in self.backbones]

    @property
    def cell(self) -> int:
        return self.protocol.extract.cell

    @property
    def seed(self) -> int:
        return self.protocol.seed

    def note(self, text: str) -> None:
        """Say it once."""
        if text not in self.notes:
            self.notes.append(text)

    def of_training(self, wants: Sequence[Want]) -> FeatureRequest:
        return FeatureRequest(self.data.train, self.data.train_indices, wants)

    def of_test(self, wants: Sequence[Want]) -> FeatureRequest:
        return FeatureRequest(self.data.test, self.data.test_indices, wants)


def random_batches(
    setup: ProbeSetup,
    wants: Sequence[Want],
    read: Callable[[int], _I],
    make: Callable[[_I, int, np.random.Generator], live.Drawn],
    *,
    count: int,
    batch: int,
    iterations: int,
    text: str,
) -> Iterator[tuple[int, Features, list[live.Drawn]]]:
    """(row, features, views) of random views of `count` images: in each iteration every row once.

    Args:
        wants: in the order of `ProbeSetup.rows`.
        read: place -> the image with its label; once in an iteration, for all sizes.
        make: (what was read, size, random numbers) -> a view; every size gets the same numbers.
        text: what progress calls it.
    """
    extraction = setup.protocol.extract

    def views(place: int, random: np.random.Generator) -> list[live.Drawn]:
        image, state = read(place), random.bit_generator.state
        made = []
        for size in setup.sizes:
            random.bit_generator.state = state
            made.append(make(image, size, random))
        return made

    drawn = live.draw(
        views, count, batch=batch, iterations=iterations, seed=setup.seed, workers=setup.workers
    )
    for done, samples in enumerate(drawn, 1):
        for row, (want, (_, size)) in enumerate(zip(wants, setup.rows, strict=True)):
            mine = [sample[setup.sizes.index(size)] for sample in samples]
            pixels = [view.pixels for view in mine]
            yield row, live.batch_features(want, pixels, extraction.cell, extraction.batch), mine
        setup.progress(text, done, iterations)


def at_size(section: _S, size: int, cell: int) -> _S:
    """A task's constants at another size: window, stride and crop keep their proportion to it."""
    old: Any = section
    if size == old.view.size:
        return section
    view = dataclasses.replace(old.view, size=size)
    changes: dict[str, Any] = {}
    if isinstance(old, protocols.Segmentation) and old.view.size and size:
        factor = size / old.view.size
        if view.window:
            window = _scaled(view.window, factor, cell)
            stride = max(1, round(view.stride * window / view.window))
            view = dataclasses.replace(view, window=window, stride=stride)
        crop = _scaled(old.augment.crop, factor, cell)
        changes["augment"] = dataclasses.replace(old.augment, crop=crop)
    new: _S = dataclasses.replace(old, view=view, **changes)
    return new


def _scaled(length: int, factor: float, cell: int) -> int:
    """A length times a factor, on the grid."""
    return max(cell, round(length * factor / cell) * cell)


def number(value: float) -> float | None:
    """For JSON, which has no nan."""
    return value if math.isfinite(value) else None


def require_sklearn() -> Any:
    """scikit-learn, which repeats scores with other code: for `verify`, never for a score."""
    return require("sklearn", "--verify")


# Classification: knn, linear and logreg.


def square_wants(setup: ProbeSetup, view: protocols.CropView, features: str) -> list[Want]:
    """The global features of every row; `features` says which of them ("cls", "cls+mean", ...)."""
    kind = CLS if features == "cls" else GLOBAL
    views = {
        size: SquareView(dataclasses.replace(view, size=size), setup.cell) for size in setup.sizes
    }
    return [Want(backbone, views[size], kind) for backbone, size in setup.rows]


def classified(
    setup: ProbeSetup,
    row: int,
    predicted: Tensor,
    right: Sequence[Sequence[int]],
    details: dict[str, Any],
) -> Outcome:
    """The outcome of predicted classes [test images]; `right`: the labels that count, by image."""
    backbone, size = setup.rows[row]
    metrics = accuracy(predicted, right, setup.data.test.num_classes)
    sums = mean_sums(hits(predicted, right))
    return Outcome(backbone, size, (size, size), metrics, sums, details)


class Scaling(NamedTuple):
    """What is done to features before a classifier sees them."""

    kind: str
    mean: Tensor | None = None
    std: Tensor | None = None

    def apply(self, features: Tensor) -> Tensor:
        if self.kind == "l2":
            return functional.normalize(features, dim=1)
        if self.mean is None or self.std is None:
            return features
        return (features - self.mean.to(features)) / self.std.to(features)


def scaling(kind: str, train: Tensor) -> Scaling:
    """The scaling that a protocol names; statistics come from training features alone."""
    if kind != "standardize":
        return Scaling(kind)
    exact = train.cpu().double()  # not every device has float64
    mean, std = exact.mean(dim=0), exact.std(dim=0, correction=0)
    # A channel that never changes says nothing; left at zero, it cannot blow up at test time.
    std = torch.where(std > 1e-6 * std.max().clamp(min=1e-30), std, torch.inf)
    return Scaling(kind, mean.to(train), std.to(train))


class Selection(NamedTuple):
    """A setting, and how it was chosen."""

    value: float
    """The learning rate (before scaling by the batch), or C."""
    validation_top1: float | None
    """None where there was nothing to choose."""
    tried: dict[str, float]
    """Validation accuracy by setting."""

    def describe(self, name: str) -> dict[str, Any]:
        """For the details of an outcome."""
        return {
            name: self.value,
            "validation_top1": self.validation_top1,
            "tried_on_validation": self.tried,
        }


def choose(values: Sequence[float], accuracies: Sequence[float], losses: Sequence[float]) -> int:
    """The best by accuracy, of equals the one with the lower loss; one that blew up loses."""
    ranking = [
        (not math.isfinite(loss), -accuracy, loss if math.isfinite(loss) else 0.0, value)
        for value, accuracy, loss in zip(values, accuracies, losses, strict=True)
    ]
    return ranking.index(min(ranking))


def agreement(ours: Tensor, theirs: Array, right: Sequence[Sequence[int]]) -> dict[str, float]:
    """How far another classifier's predictions agree, and its score."""
    classes = int(max(theirs.max(), ours.max())) + 1
    classes = max(classes, 1 + max((max(labels) for labels in right if labels), default=0))
    return {
        "equal_predictions": float((ours.cpu().numpy() == theirs).mean()),
        "top1": accuracy(theirs.tolist(), right, classes)["top1"],
    }
