"""Protocols: every constant of a measurement, as a data file.

A protocol is a TOML file with one section per task. Nothing has a default here: a file holds all
constants of the tasks it describes, an unknown key is refused, and a run stores what it used. The
shipped ones lie in `protocols/`; any other file of the same form works too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from veca._util.settings import SettingsReader, SettingsTables, Words, flat, to_table
from veca.errors import ProbeError, suggest

TASKS = ("knn", "linear", "logreg", "segmentation", "depth")
"""What can be measured; a protocol has a section for each that it describes."""
FEATURES = ("cls", "mean", "cls+mean")
"""The global feature: the first core (a teacher's CLS), the mean of the patches, or both joined."""
NORMALIZE = ("none", "l2", "standardize")
INTERPOLATIONS = ("bicubic", "bilinear")
SCHEDULES = ("cosine", "poly")
DTYPES = ("float32", "bfloat16", "float16")
CROPS = ("none", "dataset", "pixels", "fractions", "bottom")

_READER = SettingsReader(
    ProbeError,
    Words(
        whole="it",
        unknown="unknown key",
        table="a table",
        missing="{full} is missing; a protocol holds every constant.",
        length="have {count} values",
        kinds={kind: f"of type {kind.__name__}" for kind in (bool, int, float, str)},
        not_toml="is not TOML",
        no_file="{path}: the protocol cannot be read (No such file or directory).",
        unreadable="{path}: the protocol cannot be read ({reason}).",
        form="a setting reads KEY=VALUE, such as seed=1; got {line!r}.",
    ),
)


@dataclass(frozen=True)
class Extract:
    """How features are computed and kept."""

    cell: int
    """Pixels of one cell of the feature grid; see `veca.probe.backbone`."""
    dtype: str
    """What the backbones compute in."""
    dense_dtype: str
    """What dense features are kept in: float16 halves the cache and rounds to 11 bits."""
    batch: int
    """Images in a forward pass; no result depends on it beyond rounding."""
    projection: bool
    """Of a VECA network or its dense control: take what comes out of the output projection, in the
    teacher's space and as wide as its features (true), or what goes into it, as wide as the network
    itself (false). Without such a projection both are the same."""

    def __post_init__(self) -> None:
        _at_least("extract.cell", self.cell, 1)
        _at_least("extract.batch", self.batch, 1)
        _choice("extract.dtype", self.dtype, DTYPES)
        _choice("extract.dense_dtype", self.dense_dtype, ("float16", "float32"))


@dataclass(frozen=True)
class Timing:
    """How the milliseconds of the table are measured; see `veca.bench.BenchPlan`."""

    batch: int
    repeats: int
    seconds: float
    limit: float

    def __post_init__(self) -> None:
        _at_least("timing.batch", self.batch, 1)
        _at_least("timing.repeats", self.repeats, 0)


@dataclass(frozen=True)
class CropView:
    """A square from the middle of the image: what a classifier is tested on."""

    size: int
    """Side of the square, in pixels."""
    crop_ratio: float
    """`size` over the short side that the image is resized to first."""
    interpolation: str

    def __post_init__(self) -> None:
        _at_least("view.size", self.size, 1)
        _between("view.crop_ratio", self.crop_ratio, 0.1, 1.0)
        _choice("view.interpolation", self.interpolation, INTERPOLATIONS)


@dataclass(frozen=True)
class CropAugment:
    """Random resized crop and flip; without it, training sees the test view, from the cache."""

    enabled: bool
    scale: tuple[float, float]
    """Share of the image's area."""
    ratio: tuple[float, float]
    """Width over height."""
    flip: float

    def __post_init__(self) -> None:
        _range("augment.scale", self.scale, above=0.0, most=1.0)
        _range("augment.ratio", self.ratio, above=0.0)
        _between("augment.flip", self.flip, 0.0, 1.0)


@dataclass(frozen=True)
class WindowView:
    """The whole image, or windows sliding over it."""

    size: int
    """Short side that the image is resized to, in pixels; 0 keeps its own. Both sides then go to
    the nearest multiple of the cell."""
    window: int
    """Side of the sliding window, in pixels; 0: the whole image at once."""
    stride: int
    interpolation: str

    def __post_init__(self) -> None:
        _at_least("view.size", self.size, 0)
        _at_least("view.window", self.window, 0)
        if self.window:
            _at_least("view.stride", self.stride, 1)
            if self.stride > self.window:
                raise ProbeError(
                    f"view.stride {self.stride} is above view.window {self.window}: pixels between "
                    "the windows would never be seen."
                )
        _choice("view.interpolation", self.interpolation, INTERPOLATIONS)


@dataclass(frozen=True)
class SegmentationAugment:
    """Random scale, crop, flip and colours; without it, training sees the test view."""

    enabled: bool
    scale: tuple[float, float]
    """Times the view's short side."""
    crop: int
    max_class_share: float
    """A crop in which one class takes more of the labelled pixels is drawn again ..."""
    crop_tries: int
    """... at most this often."""
    flip: float
    colour_probability: float
    """Of each of the four colour changes."""
    brightness: float
    """Added, at most; on pixels in 0..1."""
    contrast: tuple[float, float]
    saturation: tuple[float, float]
    hue: float
    """Turned, at most; 1 is the full circle."""
    pad_colour: tuple[float, float, float]
    """Where the image is smaller than the crop; those pixels are ignored in the loss."""

    def __post_init__(self) -> None:
        _range("augment.scale", self.scale, above=0.0)
        _at_least("augment.crop", self.crop, 1)
        _at_least("augment.crop_tries", self.crop_tries, 1)
        _between("augment.max_class_share", self.max_class_share, 0.0, 1.0)
        _between("augment.flip", self.flip, 0.0, 1.0)
        _between("augment.colour_probability", self.colour_probability, 0.0, 1.0)
        _range("augment.contrast", self.contrast)
        _range("augment.saturation", self.saturation)


@dataclass(frozen=True)
class CropRule:
    """A box in an image; see `veca.probe.datasets.Crop`.

    kind "none": all of it; "dataset": what the dataset says of itself; "pixels": (top, bottom,
    left, right) in an image of `size`; "fractions": the same as parts of the image; "bottom":
    (height, width) at the bottom, centred.
    """

    kind: str
    values: tuple[float, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        _choice("crop kind", self.kind, CROPS)
        wanted = {"pixels": 4, "fractions": 4, "bottom": 2}.get(self.kind, 0)
        if len(self.values) != wanted:
            raise ProbeError(
                f"a crop of kind {self.kind!r} takes {wanted} values, got {list(self.values)}."
            )
        if len(self.size) != (2 if self.kind == "pixels" else 0):
            raise ProbeError(
                f"a crop of kind {self.kind!r} got size {list(self.size)}; "
                "[height, width] belongs to 'pixels', [] to the others."
            )


@dataclass(frozen=True)
class DepthView:
    size: int
    """Short side, in pixels; 0 keeps the image's own."""
    interpolation: str
    flip: bool
    """Average the prediction with that of the mirrored image."""
    image_crop: CropRule
    """Image and depth are cut to this box, in training and test."""
    eval_crop: CropRule
    """Box within it that is scored."""

    def __post_init__(self) -> None:
        _at_least("view.size", self.size, 0)
        _choice("view.interpolation", self.interpolation, INTERPOLATIONS)


@dataclass(frozen=True)
class DepthAugment:
    """Rotation, flip, crop and colours; without it, training sees the test view."""

    enabled: bool
    train_crop: CropRule
    """Box that training images are cut to first."""
    rotate: float
    """Degrees, at most, either way."""
    rotate_probability: float
    crop: tuple[int, int]
    """(height, width) of the random crop."""
    flip: float
    colour_probability: float
    gamma: tuple[float, float]
    brightness: tuple[float, float]
    colour: tuple[float, float]
    """Factor of each channel."""

    def __post_init__(self) -> None:
        _at_least("augment.crop", min(self.crop), 1)
        for name in ("rotate_probability", "flip", "colour_probability"):
            _between(f"augment.{name}", getattr(self, name), 0.0, 1.0)
        for name in ("gamma", "brightness", "colour"):
            _range(f"augment.{name}", getattr(self, name), above=0.0)


@dataclass(frozen=True)
class AdamW:
    """AdamW with a linear warm-up, then cosine or polynomial decay to `final_lr`."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float
    """Gradient norm, at most; 0: no clipping."""
    batch: int
    iterations: int
    warmup: int
    warmup_start: float
    """Share of `lr` at the first iteration."""
    schedule: str
    power: float
    """Of the polynomial decay."""
    final_lr: float

    def __post_init__(self) -> None:
        _positive("optimizer.lr", self.lr)
        _at_least("optimizer.batch", self.batch, 1)
        _at_least("optimizer.iterations", self.iterations, 1)
        _at_least("optimizer.warmup", self.warmup, 0)
        _choice("optimizer.schedule", self.schedule, SCHEDULES)


@dataclass(frozen=True)
class Subset:
    """How much of the data is used; 0: all of it. What is taken is drawn with the seed."""

    train: int
    test: int
    """Images of each class (knn, linear, logreg), or images in all (segmentation, depth)."""

    def __post_init__(self) -> None:
        _at_least("subset.train", self.train, 0)
        _at_least("subset.test", self.test, 0)


@dataclass(frozen=True)
class Knn:
    features: str
    k: tuple[int, ...]
    report_k: int
    """The k of the score in the table; fixed here, so that it is not chosen on the test set."""
    temperature: float
    center: bool
    """Subtract the mean of the training features first: for features that are all positive."""
    subset: Subset
    view: CropView

    def __post_init__(self) -> None:
        _choice("knn.features", self.features, FEATURES)
        _positive("knn.temperature", self.temperature)
        for k in self.k:
            _at_least("knn.k", k, 1)
        if self.report_k not in self.k:
            raise ProbeError(f"knn.report_k {self.report_k} is not one of knn.k {list(self.k)}.")


@dataclass(frozen=True)
class Linear:
    features: str
    normalize: str
    learning_rates: tuple[float, ...]
    """All trained at once; the best on the validation images is taken."""
    reference_batch: int
    """Each rate is multiplied by batch / reference_batch; 0: taken as they are."""
    batch: int
    iterations: int
    momentum: float
    weight_decay: float
    final_lr: float
    """Share of the rate at the end of the cosine."""
    init_std: float
    validation: float
    """Share of the training images, class by class, that the rate is chosen on."""
    refit: bool
    """Train once more on all training images, at the chosen rate."""
    subset: Subset
    view: CropView
    augment: CropAugment

    def __post_init__(self) -> None:
        _choice("linear.features", self.features, FEATURES)
        _choice("linear.normalize", self.normalize, NORMALIZE)
        _between("linear.validation", self.validation, 0.0, 0.9)
        _at_least("linear.batch", self.batch, 1)
        _at_least("linear.iterations", self.iterations, 1)
        _at_least("linear.reference_batch", self.reference_batch, 0)
        _rates("linear.learning_rates", self.learning_rates, self.validation)
        if self.augment.enabled and self.normalize == "standardize":
            raise ProbeError(
                "linear.normalize 'standardize' needs the features of all training images, which "
                "linear.augment.enabled never has at once; use 'none' or 'l2'."
            )


@dataclass(frozen=True)
class Logreg:
    features: str
    normalize: str
    c_exponents: tuple[float, float, int]
    """(first, last, count): C is 10 to each of so many equally spaced numbers."""
    max_iterations: int
    tolerance: float
    """Largest entry of the gradient (of the mean loss) at which a solution counts as found."""
    history: int
    """Steps that L-BFGS remembers."""
    validation: float
    refit: bool
    subset: Subset
    view: CropView

    def __post_init__(self) -> None:
        _choice("logreg.features", self.features, FEATURES)
        _choice("logreg.normalize", self.normalize, NORMALIZE)
        _between("logreg.validation", self.validation, 0.0, 0.9)
        _at_least("logreg.max_iterations", self.max_iterations, 1)
        _at_least("logreg.history", self.history, 1)
        _rates("logreg.c_exponents", self.c_values, self.validation)

    @property
    def c_values(self) -> tuple[float, ...]:
        first, last, count = self.c_exponents
        if int(count) != count or count < 1:
            raise ProbeError(f"logreg.c_exponents ends in a whole count, got {count!r}.")
        step = (last - first) / max(1, count - 1)
        return tuple(10.0 ** (first + step * i) for i in range(int(count)))


@dataclass(frozen=True)
class Segmentation:
    dropout: float
    """Share of the channels of an image that is dropped in training."""
    init_std: float
    bn_momentum: float
    bn_eps: float
    optimizer: AdamW
    subset: Subset
    view: WindowView
    augment: SegmentationAugment

    def __post_init__(self) -> None:
        _between("segmentation.dropout", self.dropout, 0.0, 0.99)


@dataclass(frozen=True)
class Depth:
    bins: int
    min_depth: float
    max_depth: float
    """Metres; 0: what the dataset says."""
    bin_floor: float
    """Added to each bin's weight after the relu."""
    init_std: float
    bn_momentum: float
    bn_eps: float
    log_eps: float
    """Added to depths before the logarithm of the loss."""
    mean_weight: float
    """Of the squared mean in the loss sqrt(var(g) + mean_weight * mean(g)^2)."""
    variance_from: int
    """Iterations before the variance term counts."""
    empty_depth: str
    """"error", or "skip": leave out, and count, images in which no pixel is valid."""
    optimizer: AdamW
    subset: Subset
    view: DepthView
    augment: DepthAugment

    def __post_init__(self) -> None:
        _at_least("depth.bins", self.bins, 2)
        _positive("depth.min_depth", self.min_depth)
        if self.max_depth and self.max_depth <= self.min_depth:
            raise ProbeError(f"depth.max_depth {self.max_depth} is not above depth.min_depth.")
        _choice("depth.empty_depth", self.empty_depth, ("error", "skip"))


@dataclass(frozen=True)
class Protocol:
    """Everything that decides a score, but the backbone and the data."""

    name: str
    description: str
    seed: int
    extract: Extract
    timing: Timing
    knn: Knn | None = None
    linear: Linear | None = None
    logreg: Logreg | None = None
    segmentation: Segmentation | None = None
    depth: Depth | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(task for task in TASKS if getattr(self, task) is not None)

    def task(self, name: str) -> Any:
        """The section of a task; an error that says which protocols have one."""
        _choice("task", name, TASKS)
        section = getattr(self, name)
        if section is None:
            others = [p for p in available_protocols() if name in load_protocol(p).tasks]
            raise ProbeError(
                f"protocol {self.name!r} says nothing about {name}, only about "
                f"{', '.join(self.tasks) or 'nothing'}; protocols for {name}: {', '.join(others)}."
            )
        return section

    def only(self, task: str) -> dict[str, Any]:
        """What a run of one task used, as plain JSON types: for its record."""
        self.task(task)
        return {k: v for k, v in self.to_dict().items() if k not in TASKS or k == task}

    def to_dict(self) -> dict[str, Any]:
        return to_table(self)

    def with_settings(self, settings: Iterable[str]) -> Protocol:
        """A copy with constants changed by lines such as "knn.view.size = 448"; TOML values.

        Only constants that the protocol has can be changed. The name gets a "+" to say so.
        """
        changed = SettingsTables(self.to_dict(), where=f"protocol {self.name!r}")
        known = list(flat(changed.table))
        lines = list(settings)
        for line in lines:
            name = line.partition("=")[0].replace(" ", "")
            if "=" in line and not any(f"{key}.".startswith(f"{name}.") for key in known):
                raise ProbeError(f"protocol {self.name!r} has no constant {suggest(name, known)}")
            _READER.change(changed, line)
        if lines and not changed.table["name"].endswith("+"):
            changed.table["name"] += "+"
        return _READER.build(Protocol, changed)

    def with_batch(self, batch: int) -> Protocol:
        """A copy with another number of images in a forward pass; no score depends on it."""
        return dataclasses.replace(self, extract=dataclasses.replace(self.extract, batch=batch))


def available_protocols() -> list[str]:
    """The names of the protocols that come with the package."""
    folder = resources.files("veca.probe") / "protocols"
    return sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".toml"))


def load_protocol(source: str | Path | Protocol) -> Protocol:
    """A protocol by its name, or from a TOML file of the same form (a path ending in .toml)."""
    if isinstance(source, Protocol):
        return source
    text = str(source)
    if not text.endswith(".toml"):
        if text not in available_protocols():
            raise ProbeError(
                f"unknown protocol {suggest(text, available_protocols())} A file ends in .toml."
            )
        file = resources.files("veca.probe") / "protocols" / f"{text}.toml"
        with resources.as_file(file) as path:
            return _READER.build(Protocol, _READER.read(path, f"protocol {text!r}"))
    return _READER.build(Protocol, _READER.read(text))


def from_dict(table: Mapping[str, Any], where: str = "the protocol") -> Protocol:
    """A protocol from plain types, such as a run's record; unknown and missing keys are errors."""
    return _READER.build(Protocol, SettingsTables(table, where))


def toml_value(text: str, line: str) -> Any:
    """A value as TOML writes it, or a bare word; `line` is what messages quote."""
    value = _READER.value(text)
    if value == text and '"' in text:
        raise ProbeError(f"the value of the setting {line!r} cannot be read as TOML.")
    return value


def _choice(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ProbeError(f"unknown {name} {suggest(str(value), known)}")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ProbeError(f"{name} must be at least {low}, got {value}.")


def _positive(name: str, value: float) -> None:
    if value <= 0:
        raise ProbeError(f"{name} must be above 0, got {value}.")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ProbeError(f"{name} must be from {low} to {high}, got {value}.")


def _range(
    name: str, pair: tuple[float, float], *, above: float = -math.inf, most: float = math.inf
) -> None:
    low, high = pair
    if not (above < low <= high <= most):
        raise ProbeError(f"{name} must be [low, high], got {list(pair)}.")


def _rates(name: str, values: tuple[float, ...], validation: float) -> None:
    if not values or min(values) <= 0:
        raise ProbeError(f"{name} must be numbers above 0, got {list(values)}.")
    if len(values) > 1 and validation <= 0:
        raise ProbeError(
            f"{name} has {len(values)} values to choose from but no validation images; set a "
            "validation share above 0. The test set is never used to choose."
        )
