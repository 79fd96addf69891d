"""What a VECA network is made of: one frozen dataclass, and the paper's sizes as presets."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from veca.errors import ConfigError, check_choice, shown, suggest

_MOST = 2**31 - 1
"""Of any size in a configuration; beyond it torch cannot count the elements of a tensor."""
_MOST_BLOCKS = 10_000
"""More than any network has, and few enough to be counted one by one."""

AUTO: Literal["auto"] = "auto"
"""In place of a budget or a share of tokens: as the content of the images asks for."""
DEFAULT_AGREEMENT = 0.98
"""What "auto" promises where no agreement is asked for: the cosine with the pass that saves nothing
which an image's CLS and, on average, its patches keep."""
DEFAULT_SIZE = 512
"""Pixels: the short side that images are scaled to wherever no size is asked for, and both sides
where one shape must make a batch. What needs another (probe protocols, training) says so."""


@dataclasses.dataclass(frozen=True)
class VecaConfig:
    """The architecture of one network.

    Everything that changes the function a set of weights computes is here, so that
    `config.json` beside the weights is enough to rebuild the model.
    """

    depth: int = 12
    """Number of blocks, L."""
    width: int = 384
    """Width of every token, D."""
    heads: int = 6
    """Attention heads; `width / heads` is a multiple of 4."""
    ffn_ratio: float = 2.66667
    """SwiGLU hidden width as a multiple of `width`: it is `int(width * ffn_ratio)`."""
    num_cores: int = 64
    """Size of the ordered core bank, M: the largest budget."""
    patch_size: int = 16
    """Pixels a side of one patch; image sides are multiples of it."""
    in_channels: int = 3
    output_width: int | None = None
    """Width of the features that come out; None means `width` (no output projection)."""

    rope_base: float = 100.0
    """Rotary periods are powers of this, in units of half the image side."""
    rope_zero_fraction: float = 0.125
    """Share of the rotary periods, counted from the longest, that do not rotate at all."""
    rope_shift: float | None = 0.08
    """Training only: patch coordinates move by uniform(-shift, shift) on each axis."""
    rope_jitter: float | None = None
    """Training only: each axis is scaled by exp(uniform(-ln jitter, ln jitter))."""
    rope_rescale: float | None = 2.0
    """Training only: both axes are scaled by one exp(uniform(-ln rescale, ln rescale))."""

    norm_eps: float = 1e-5
    """Of every LayerNorm."""
    dropout: float = 0.0
    """After the attention and in the feed-forward, in training; none as published."""
    core_move_init: float = 0.01
    """Initial value of each layer's step size for the moving cores."""

    merge_before: tuple[int, ...] | None = None
    """With `keep` below 1, the blocks before which windows of patches merge, 1..L, ascending.
    None: `MERGE_BEFORE`, as shares of the depth."""

    image_mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    image_std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """With `image_mean`, what pixels in 0..1 are normalised by, as the weights expect it."""

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads", "num_cores", "patch_size", "in_channels"):
            most = _MOST_BLOCKS if name == "depth" else _MOST
            _require_positive_int(name, getattr(self, name), most)
        if self.output_width is not None:
            _require_positive_int("output_width", self.output_width)
        if self.width % self.heads:
            raise ConfigError(
                f"width {self.width} is not a multiple of heads {self.heads}; "
                "every head needs the same width."
            )
        if self.head_width % 4:
            raise ConfigError(
                f"head width {self.head_width} (width {self.width} / heads {self.heads}) is not a "
                "multiple of 4; axial 2D rotation needs pairs of channels on both axes."
            )
        for name in ("ffn_ratio", "rope_base", "norm_eps"):
            _require_number(name, getattr(self, name), above=0.0)
        if not 1 <= self.width * self.ffn_ratio <= _MOST:
            units = "no" if self.width * self.ffn_ratio < 1 else "too many"
            raise ConfigError(
                f"ffn_ratio {self.ffn_ratio} gives {units} hidden units at width {self.width}."
            )
        _require_number("rope_zero_fraction", self.rope_zero_fraction, at_least=0.0, at_most=1.0)
        _require_number("dropout", self.dropout, at_least=0.0, below=1.0)
        _require_number("core_move_init", self.core_move_init)
        if self.rope_shift is not None:
            _require_number("rope_shift", self.rope_shift, at_least=0.0)
        for name in ("rope_jitter", "rope_rescale"):
            if getattr(self, name) is not None:
                _require_number(name, getattr(self, name), at_least=1.0)
        if self.merge_before is not None:
            blocks = _whole_numbers("merge_before", self.merge_before)
            object.__setattr__(self, "merge_before", blocks)
            if list(blocks) != sorted(set(blocks)) or not blocks or blocks[-1] > self.depth:
                raise ConfigError(
                    f"merge_before must be ascending blocks from 1 to {self.depth}, got {blocks}."
                )
        for name in ("image_mean", "image_std"):
            object.__setattr__(self, name, _three_numbers(name, getattr(self, name)))
        if min(self.image_std) <= 0:
            raise ConfigError(f"image_std must be positive, got {self.image_std}.")

    @property
    def head_width(self) -> int:
        """Width of one attention head, d."""
        return self.width // self.heads

    @property
    def hidden_width(self) -> int:
        """Width of the SwiGLU hidden layer."""
        return int(self.width * self.ffn_ratio)

    @property
    def feature_width(self) -> int:
        """Width of the features that come out of the model."""
        return self.width if self.output_width is None else self.output_width

    @property
    def merge_blocks(self) -> tuple[int, ...]:
        """The blocks before which windows of patches merge when `keep` is below 1."""
        if self.merge_before is not None:
            return self.merge_before
        # Steps fall together in a network with fewer blocks than steps.
        places = (min(round(share * self.depth) + 1, self.depth) for share in MERGE_BEFORE)
        return tuple(sorted(set(places)))

    def replace(self, **changes: Any) -> VecaConfig:
        """A copy with some fields changed; unknown fields are refused."""
        return VecaConfig.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, in the order of the fields.

        What 0.1 does not know is left out where it has its default, so that 0.1 reads the rest.
        """
        fields = dataclasses.asdict(self)
        if self.merge_before is None:
            del fields["merge_before"]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> VecaConfig:
        """Build from plain JSON types; an unknown field is an error that names it."""
        if not isinstance(fields, Mapping):
            raise ConfigError(
                f"a configuration is a mapping of fields, got {type(fields).__name__}."
            )
        known = {field.name for field in dataclasses.fields(cls)}
        for name in fields:
            check_choice("configuration field", name, known, ConfigError)
        return cls(**fields)


def _require_positive_int(name: str, value: object, most: int = _MOST) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= most:  # type: ignore[operator]
        limit = f" and at most {most}" if whole and value > most else ""  # type: ignore[operator]
        raise ConfigError(
            f"{name} must be a whole number of at least 1{limit}, got {shown(value)}."
        )


def _require_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
) -> None:
    number = _finite(value) if isinstance(value, (int, float)) else None
    if number is None:
        raise ConfigError(f"{name} must be a finite number, got {shown(value)}.")
    if not (above < number and at_least <= number and number < below and number <= at_most):
        lower = f"above {above}" if above > -math.inf else f"at least {at_least}"
        upper = f" and below {below}" if below < math.inf else ""
        upper = f" and at most {at_most}" if at_most < math.inf else upper
        raise ConfigError(f"{name} must be {lower}{upper}, got {shown(value)}.")


def _finite(value: object) -> float | None:
    """The number that `value` is, if that is finite as a float."""
    if isinstance(value, (bool, str, bytes)):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _whole_numbers(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list of whole numbers, got {value!r}.")
    for number in (numbers := tuple(value)):
        _require_positive_int(name, number)
    return numbers


def _three_numbers(name: str, value: object) -> tuple[float, float, float]:
    wrong = isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable)
    numbers = [] if wrong else [_finite(x) for x in itertools.islice(value, 4)]  # type: ignore[call-overload]
    red, green, blue = numbers if len(numbers) == 3 else (None, None, None)
    if red is None or green is None or blue is None:
        raise ConfigError(f"{name} must be three finite numbers (R, G, B), got {shown(value)}.")
    return red, green, blue


MERGE_BEFORE = (2 / 12, 4 / 12, 6 / 12, 8 / 12)
"""Shares of the depth that have run when windows of patches merge: of 12 blocks 2, 4, 6 and 8."""

EXTRA_TOKENS = 5
"""Of a dense ViT, beside its patches: CLS and four registers."""

PRESETS: dict[str, VecaConfig] = {
    "veca_tiny_patch16": VecaConfig(width=192, heads=3),
    "veca_small_patch16": VecaConfig(width=384, heads=6),
    "veca_splus_patch16": VecaConfig(width=384, heads=6, ffn_ratio=4.0),
    "veca_base_patch16": VecaConfig(width=768, heads=12),
    "veca_large_patch16": VecaConfig(depth=24, width=1024, heads=16),
}
"""Configurations by name. `tiny` is ours, for laptops and tests; the others are the paper's."""


def preset(name: str) -> VecaConfig:
    """The configuration of a preset: `veca_small_patch16`, or `small` for short."""
    if not isinstance(name, str):
        raise ConfigError(f"a preset is named by a string, got {name!r}.")
    full = name if name in PRESETS else f"veca_{name}_patch16"
    if full not in PRESETS:
        short = len(name) < 10  # answer in the words of the question
        known = [full.split("_")[1] for full in PRESETS] if short else PRESETS
        raise ConfigError(f"unknown preset {suggest(name, known)}")
    return PRESETS[full]
