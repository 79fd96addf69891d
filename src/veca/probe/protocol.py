"""Protocols: every constant of a measurement, as a data file.

A protocol is a TOML file with one section per task. Nothing has a default here: a file holds all
constants of the tasks it describes, an unknown key is refused, and a run stores what it used. The
shipped ones lie in `protocols/`; any other file of the same form works too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar

from veca._util.limits import (
    Count,
    Whole,
    above_zero,
    at_least,
    between,
    check_limits,
    one_of,
    ordered,
)
from veca._util.settings import SettingsReader, SettingsTables, Words, flat, to_table
from veca.errors import ProbeError, check_choice, suggest

TASKS = ("knn", "linear", "logreg", "segmentation", "depth")
"""What can be measured; a protocol has a section for each that it describes."""
FEATURES = ("cls", "mean", "cls+mean")
"""The global feature: the first core (a teacher's CLS), the mean of the patches, or both joined."""
NORMALIZE = ("none", "l2", "standardize")
INTERPOLATIONS = ("bicubic", "bilinear")
SCHEDULES = ("cosine", "poly")
DTYPES = ("float32", "bfloat16", "float16")
CROPS = ("none", "dataset", "pixels", "fractions", "bottom")

Positive = Annotated[float, above_zero]
Share = Annotated[float, between(0.0, 1.0)]
Ordered = Annotated[tuple[float, float], ordered()]
Factors = Annotated[tuple[float, float], ordered(above=0.0)]
ValidationShare = Annotated[float, between(0.0, 0.9)]
FeatureName = Annotated[str, one_of(FEATURES)]
Normalization = Annotated[str, one_of(NORMALIZE)]
Interpolation = Annotated[str, one_of(INTERPOLATIONS)]

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


class _Section:
    """Constants within the limits that their types state; in messages after what it is `called`."""

    _called: ClassVar[str]

    def __init_subclass__(cls, called: str) -> None:
        cls._called = called

    def __post_init__(self) -> None:
        check_limits(self, ProbeError, self._called)


@dataclass(frozen=True)
class Extract(_Section, called="extract"):
    """How features are computed and kept."""

    cell: Count
    """Pixels of one cell of the feature grid; see `veca.probe.backbone`."""
    dtype: Annotated[str, one_of((*DTYPES, "bf16", "int8"))]
    """What the backbones compute in; "bf16" and "int8" as `veca.precision` has them, for VECA on a
    CPU, while others compute in float32."""
    dense_dtype: Annotated[str, one_of(("float16", "float32"))]
    """What dense features are kept in: float16 halves the cache and rounds to 11 bits."""
    batch: Count
    """Images in a forward pass; no result depends on it beyond rounding."""
    projection: bool
    """Of a VECA network or its dense control: take what comes out of the output projection, in the
    teacher's space and as wide as its features (true), or what goes into it, as wide as the network
    itself (false). Without such a projection both are the same."""


@dataclass(frozen=True)
class Timing(_Section, called="timing"):
    """How the milliseconds of the table are measured; see `veca.bench.BenchPlan`."""

    batch: Count
    repeats: Whole
    seconds: float
    limit: float


@dataclass(frozen=True)
class CropView(_Section, called="view"):
    """A square from the middle of the image: what a classifier is tested on."""

    size: Count
    """Side of the square, in pixels."""
    crop_ratio: Annotated[float, between(0.1, 1.0)]
    """`size` over the short side that the image is resized to first."""
    interpolation: Interpolation


@dataclass(frozen=True)
class CropAugment(_Section, called="augment"):
    """Random resized crop and flip; without it, training sees the test view, from the cache."""

    enabled: bool
    scale: Annotated[tuple[float, float], ordered(above=0.0, most=1.0)]
    """Share of the image's area."""
    ratio: Factors
    """Width over height."""
    flip: Share


@dataclass(frozen=True)
class WindowView(_Section, called="view"):
    """The whole image, or windows sliding over it."""

    size: Whole
    """Short side that the image is resized to, in pixels; 0 keeps its own. Both sides then go to
    the nearest multiple of the cell."""
    window: Whole
    """Side of the sliding window, in pixels; 0: the whole image at once."""
    stride: int
    interpolation: Interpolation

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window:
            if self.stride < 1:
                raise ProbeError(f"view.stride must be at least 1, got {self.stride}.")
            if self.stride > self.window:
                raise ProbeError(
                    f"view.stride {self.stride} is above view.window {self.window}: pixels between "
                    "the windows would never be seen."
                )


@dataclass(frozen=True)
class SegmentationAugment(_Section, called="augment"):
    """Random scale, crop, flip and colours; without it, training sees the test view."""

    enabled: bool
    scale: Factors
    """Times the view's short side."""
    crop: Count
    max_class_share: Share
    """A crop in which one class takes more of the labelled pixels is drawn again ..."""
    crop_tries: Count
    """... at most this often."""
    flip: Share
    colour_probability: Share
    """Of each of the four colour changes."""
    brightness: float
    """Added, at most; on pixels in 0..1."""
    contrast: Ordered
    saturation: Ordered
    hue: float
    """Turned, at most; 1 is the full circle."""
    pad_colour: tuple[float, float, float]
    """Where the image is smaller than the crop; those pixels are ignored in the loss."""


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
        check_choice("crop kind", self.kind, CROPS, ProbeError)
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
class DepthView(_Section, called="view"):
    size: Whole
    """Short side, in pixels; 0 keeps the image's own."""
    interpolation: Interpolation
    flip: bool
    """Average the prediction with that of the mirrored image."""
    image_crop: CropRule
    """Image and depth are cut to this box, in training and test."""
    eval_crop: CropRule
    """Box within it that is scored."""


@dataclass(frozen=True)
class DepthAugment(_Section, called="augment"):
    """Rotation, flip, crop and colours; without it, training sees the test view."""

    enabled: bool
    train_crop: CropRule
    """Box that training images are cut to first."""
    rotate: float
    """Degrees, at most, either way."""
    rotate_probability: Share
    crop: tuple[Count, Count]
    """(height, width) of the random crop."""
    flip: Share
    colour_probability: Share
    gamma: Factors
    brightness: Factors
    colour: Factors
    """Factor of each channel."""


@dataclass(frozen=True)
class AdamW(_Section, called="optimizer"):
    """AdamW with a linear warm-up, then cosine or polynomial decay to `final_lr`."""

    lr: Positive
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float
    """Gradient norm, at most; 0: no clipping."""
    batch: Count
    iterations: Count
    warmup: Whole
    warmup_start: float
    """Share of `lr` at the first iteration."""
    schedule: Annotated[str, one_of(SCHEDULES)]
    power: float
    """Of the polynomial decay."""
    final_lr: float


@dataclass(frozen=True)
class Subset(_Section, called="subset"):
    """How much of the data is used; 0: all of it. What is taken is drawn with the seed."""

    train: Whole
    test: Whole
    """Images of each class (knn, linear, logreg), or images in all (segmentation, depth)."""


@dataclass(frozen=True)
class Knn(_Section, called="knn"):
    features: FeatureName
    k: tuple[Count, ...]
    report_k: int
    """The k of the score in the table; fixed here, so that it is not chosen on the test set."""
    temperature: Positive
    center: bool
    """Subtract the mean of the training features first: for features that are all positive."""
    subset: Subset
    view: CropView

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.report_k not in self.k:
            raise ProbeError(f"knn.report_k {self.report_k} is not one of knn.k {list(self.k)}.")


@dataclass(frozen=True)
class Linear(_Section, called="linear"):
    features: FeatureName
    normalize: Normalization
    learning_rates: tuple[float, ...]
    """All trained at once; the best on the validation images is taken."""
    reference_batch: Whole
    """Each rate is multiplied by batch / reference_batch; 0: taken as they are."""
    batch: Count
    iterations: Count
    momentum: float
    weight_decay: float
    final_lr: float
    """Share of the rate at the end of the cosine."""
    init_std: float
    validation: ValidationShare
    """Share of the training images, class by class, that the rate is chosen on."""
    refit: bool
    """Train once more on all training images, at the chosen rate."""
    subset: Subset
    view: CropView
    augment: CropAugment

    def __post_init__(self) -> None:
        super().__post_init__()
        _rates("linear.learning_rates", self.learning_rates, self.validation)
        if self.augment.enabled and self.normalize == "standardize":
            raise ProbeError(
                "linear.normalize 'standardize' needs the features of all training images, which "
                "linear.augment.enabled never has at once; use 'none' or 'l2'."
            )


@dataclass(frozen=True)
class Logreg(_Section, called="logreg"):
    features: FeatureName
    normalize: Normalization
    c_exponents: tuple[float, float, int]
    """(first, last, count): C is 10 to each of so many equally spaced numbers."""
    max_iterations: Count
    tolerance: float
    """Largest entry of the gradient (of the mean loss) at which a solution counts as found."""
    history: Count
    """Steps that L-BFGS remembers."""
    validation: ValidationShare
    refit: bool
    subset: Subset
    view: CropView

    def __post_init__(self) -> None:
        super().__post_init__()
        _rates("logreg.c_exponents", self.c_values, self.validation)

    @property
    def c_values(self) -> tuple[float, ...]:
        first, last, count = self.c_exponents
        if int(count) != count or count < 1:
            raise ProbeError(f"logreg.c_exponents ends in a whole count, got {count!r}.")
        step = (last - first) / max(1, count - 1)
        return tuple(10.0 ** (first + step * i) for i in range(int(count)))


@dataclass(frozen=True)
class Segmentation(_Section, called="segmentation"):
    dropout: Annotated[float, between(0.0, 0.99)]
    """Share of the channels of an image that is dropped in training."""
    init_std: float
    bn_momentum: float
    bn_eps: float
    optimizer: AdamW
    subset: Subset
    view: WindowView
    augment: SegmentationAugment


@dataclass(frozen=True)
class Depth(_Section, called="depth"):
    bins: Annotated[int, at_least(2)]
    min_depth: Positive
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
    empty_depth: Annotated[str, one_of(("error", "skip"))]
    """"error", or "skip": leave out, and count, images in which no pixel is valid."""
    optimizer: AdamW
    subset: Subset
    view: DepthView
    augment: DepthAugment

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_depth and self.max_depth <= self.min_depth:
            raise ProbeError(f"depth.max_depth {self.max_depth} is not above depth.min_depth.")


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
        check_choice("task", name, TASKS, ProbeError)
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


def _rates(name: str, values: tuple[float, ...], validation: float) -> None:
    if not values or min(values) <= 0:
        raise ProbeError(f"{name} must be numbers above 0, got {list(values)}.")
    if len(values) > 1 and validation <= 0:
        raise ProbeError(
            f"{name} has {len(values)} values to choose from but no validation images; set a "
            "validation share above 0. The test set is never used to choose."
        )
