"""What the tasks share: what each is given and gives back, random views, and the parts of heads.

A task is made before any feature is there: it checks its settings and says, in `requests`, which
features it needs. `outcomes` takes them, trains and scores. Nothing looks at test labels before the
score.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from veca._util.extras import require
from veca.probe import live
from veca.probe import protocol as protocols
from veca.probe.backbone import Backbone, Features
from veca.probe.cache import MemoryCache
from veca.probe.data import ProbeData, labels_of
from veca.probe.datasets import Dataset
from veca.probe.extract import CLS, GLOBAL, DenseSample, Stored, Want
from veca.probe.intervals import Sums, mean_sums
from veca.probe.metrics import accuracy, hits
from veca.probe.resize import bilinear
from veca.probe.schedule import batches, rate, torch_generator
from veca.probe.views import SquareView

Array = np.ndarray[Any, Any]
Labels = MemoryCache[int, Tensor]
"""Place of an image -> its mask or depth [H, W]."""
Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total)."""

_GROUP_NUMBERS = 2**26  # logits that a GPU makes at once: 256 MiB in float32

_S = TypeVar("_S")
_I = TypeVar("_I")
_H = TypeVar("_H", bound="DenseHead")


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


# Dense tasks: segmentation and depth.


class TokenHead(nn.Module):
    """Batch norm over all tokens of a batch, then one linear layer: a 1x1 convolution."""

    def __init__(
        self,
        width: int,
        outputs: int,
        *,
        init_std: float,
        momentum: float,
        eps: float,
        dropout: float,
        seed: int,
    ) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=eps, momentum=momentum)
        self.project = nn.Linear(width, outputs)
        with torch.no_grad():
            self.project.weight.normal_(std=init_std, generator=torch_generator(seed, "init"))
            self.project.bias.zero_()
        self.dropout = dropout
        self._masks = torch_generator(seed, "dropout")

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Features [h, w, D] of each image -> float32 [outputs, h, w] of each; grids may differ."""
        counts = [features.shape[0] * features.shape[1] for features in maps]
        # The features are frozen. With the norm's scale and shift moved into the projection, only
        # small matrices need gradients: the same function, for a third less work.
        with torch.no_grad():
            tokens = self._normed(maps, counts)
        bias = self.project.weight @ self.norm.bias + self.project.bias
        out = functional.linear(tokens, self.project.weight * self.norm.weight, bias)
        return [
            part.T.unflatten(1, features.shape[:2])
            for part, features in zip(out.split(counts), maps, strict=True)
        ]

    def _normed(self, maps: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        """float32 [tokens, D], after dropout and the norm without its scale and shift."""
        tokens = torch.cat([features.flatten(0, 1) for features in maps]).float()
        if self.training and self.dropout:
            kept = self._channels(len(maps), tokens.shape[1]).to(tokens.device)
            for part, channels in zip(tokens.split(counts), kept, strict=True):
                part *= channels
        return functional.batch_norm(
            tokens,
            self.norm.running_mean,
            self.norm.running_var,
            training=self.training,
            momentum=self.norm.momentum or 0.0,
            eps=self.norm.eps,
        )

    def _channels(self, images: int, width: int) -> Tensor:
        """[images, D]: whole channels of an image are dropped; drawn on the CPU, for any device."""
        kept = torch.rand(images, width, generator=self._masks) >= self.dropout
        return kept.float() / (1 - self.dropout)


class Optimizer:
    """AdamW with the protocol's schedule and clipping."""

    def __init__(self, module: nn.Module, settings: protocols.AdamW) -> None:
        self.settings = settings
        self.module = module
        self._adamw = torch.optim.AdamW(
            module.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._step = 0

    def step(self, loss: Tensor) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = rate(self.settings, self._step)
        self._adamw.zero_grad(set_to_none=True)
        loss.backward()
        if self.settings.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip)
        self._adamw.step()
        self._step += 1


class DenseHead(Protocol):
    """What the dense tasks train."""

    device: torch.device

    def step(self, samples: Sequence[DenseSample], labels: Sequence[Tensor]) -> float:
        """Train on a batch; returns the loss, nan where nothing in it is labelled."""
        ...


class DenseTask(ABC, Generic[_H]):
    """A head on the patches and a label for every pixel, for every row of the table."""

    name: ClassVar[str]

    def __init__(
        self, setup: ProbeSetup, settings: Any, wants: Sequence[Want], train_wants: Sequence[Want]
    ) -> None:
        self.setup, self.settings, self.train_wants = setup, settings, train_wants
        self.requests = [setup.of_test(wants)]
        if not settings.augment.enabled:
            self.requests.insert(0, setup.of_training(train_wants))

    @abstractmethod
    def new_head(self, width: int) -> _H:
        """A fresh head for features of this width."""

    @abstractmethod
    def read_label(self, dataset: Dataset, index: int, size: Sequence[int]) -> Tensor:
        """The mask or depth [H, W] of an image, checked against (height, width) of the image."""

    @abstractmethod
    def random_view(
        self, image: Image.Image, label: Array, size: int, random: np.random.Generator
    ) -> live.Drawn: ...

    @abstractmethod
    def describe(self, size: int) -> dict[str, Any]:
        """Constants of a row, for its details."""

    @abstractmethod
    def score(
        self, head: _H, test: Stored, truths: Labels, row: str
    ) -> tuple[dict[str, float], Sums, dict[str, Any]]:
        """Metrics, the sums of the first of them, and details of a trained head."""

    def outcomes(self, features: Sequence[Sequence[Stored]]) -> list[Outcome]:
        setup = self.setup
        *training, test = features
        heads = [] if training else self._train_on_random_crops()
        labels = self._labels(self.requests[0], training[0], setup.device) if training else None
        truths = self._labels(self.requests[-1], test)
        outcomes = []
        for i, (backbone, size) in enumerate(setup.rows):
            details = {"features": "patches", **self.describe(size)}
            if labels is None:
                head = heads[i]
            else:
                head = self.new_head(training[0][i].dense(0).maps[0].shape[2])
                loss = self._train_on_stored(head, training[0][i], labels, backbone.label)
                details["train_loss"] = number(loss)
            metrics, sums, more = self.score(head, test[i], truths, backbone.label)
            tile = test[i].dense(0).tiles[0]
            pixels = (tile.height, tile.width)
            outcomes.append(Outcome(backbone, size, pixels, metrics, sums, {**details, **more}))
        return outcomes

    def _labels(
        self, request: FeatureRequest, stored: Sequence[Stored], device: torch.device | None = None
    ) -> Labels:
        """The labels of images whose features are there, shared by all rows of the table."""
        dataset, indices, _ = request
        sizes = stored[0].sizes()
        return labels_of(lambda i: self.read_label(dataset, indices[i], sizes[i].tolist()), device)

    def _train_on_stored(self, head: _H, stored: Stored, labels: Labels, row: str) -> float:
        """Train from cached features; returns the mean loss of the last tenth of the batches."""
        settings = self.settings.optimizer
        losses = []
        held = stored.held(head.device)
        order = batches(len(stored), settings.batch, settings.iterations, self.setup.seed)
        for done, batch in enumerate(order, 1):
            samples = [held(int(place)) for place in batch]
            losses.append(head.step(samples, [labels(int(place)) for place in batch]))
            self.setup.progress(f"training on {row}", done, settings.iterations)
        last = [loss for loss in losses[-max(1, len(losses) // 10) :] if loss == loss]
        return sum(last) / len(last) if last else math.nan

    def _train_on_random_crops(self) -> list[_H]:
        """A head for every row; all see the same crops."""
        data, settings = self.setup.data, self.settings.optimizer

        def read(place: int) -> tuple[Image.Image, Array]:
            index = data.train_indices[place]
            image = data.train.image(index)
            label = self.read_label(data.train, index, (image.height, image.width))
            return image, label.numpy()

        heads: list[_H] = []
        for row, features, views in random_batches(
            self.setup,
            self.train_wants,
            read,
            lambda sample, size, random: self.random_view(*sample, size, random),
            count=len(data.train_indices),
            batch=settings.batch,
            iterations=settings.iterations,
            text=f"{self.name}, random crops",
        ):
            if row == len(heads):
                heads.append(self.new_head(features.patches.shape[2]))
            height, width = views[0].pixels.shape[1:]
            samples = live.dense_samples(features, (height, width))
            heads[row].step(samples, [view.label for view in views])
        return heads


def together(
    samples: Sequence[DenseSample], labels: Sequence[Tensor], outputs: int, device: torch.device
) -> list[list[int]]:
    """The places of a batch in groups of one shape, to be computed at once; in a fixed order.

    A GPU wants few large pieces of work. On a CPU every image is a group of its own, which stays
    in the cache.
    """
    limit = _GROUP_NUMBERS if device.type != "cpu" else 0
    groups: dict[tuple[Any, ...], list[list[int]]] = {}
    for i, (sample, label) in enumerate(zip(samples, labels, strict=True)):
        tiles = tuple(tuple(features.shape[:2]) for features in sample.maps)
        found = groups.setdefault((sample.frame, sample.tiles, tiles, tuple(label.shape)), [])
        if found and (len(found[-1]) + 1) * outputs * label.numel() <= limit:
            found[-1].append(i)
        else:
            found.append([i])
    return [places for found in groups.values() for places in found]


def merge(sample: DenseSample, maps: Sequence[Tensor]) -> Tensor:
    """Outputs [..., h, w] of the tiles, enlarged to their pixels and averaged where they overlap.

    Mirrored tiles are turned back. -> [..., height, width] of the frame.
    """
    height, width = sample.frame
    total = maps[0].new_zeros(*maps[0].shape[:-2], height, width)
    count = maps[0].new_zeros(height, width)
    for tile, values in zip(sample.tiles, maps, strict=True):
        large = bilinear(values, (tile.height, tile.width))
        rows = slice(tile.top, tile.top + tile.height)
        columns = slice(tile.left, tile.left + tile.width)
        total[..., rows, columns] += large.flip(-1) if tile.flipped else large
        count[rows, columns] += 1
    return total / count
