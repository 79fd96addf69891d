"""Everything that decides what the numbers in a folder of embeddings are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from veca.checks import check_dials
from veca.config import DEFAULT_SIZE, VecaConfig
from veca.embed.pipeline import DTYPES, WHAT, feature_widths
from veca.errors import InputError, at_least, check_choice
from veca.images import Size, check_size
from veca.model import Veca
from veca.precision import recorded
from veca.weights import weights_hash

LAYOUT = "veca-embeddings-1"

WIDTHS = ("native", "projected", "mixed")
"""How wide features are: before the output projection, after it, or cls after and patches before
it. Where there is no such projection they are one."""
AUTO: Literal["auto"] = "auto"
"""The setting of the folder that is gone on with; else the default."""
AutoSize: TypeAlias = "Size | Literal['auto']"
DEFAULT_WIDTH = "projected"
"""Native patches keep less than 99 % of the segmentation scores: research/results/width."""

_LATER: dict[str, Any] = {"width": "projected", "pca": None, "keep": 1.0, "agreement": None}
"""Settings that 0.1 did not have, and what they were there. They are written down only where they
differ from that, so that the fingerprints of 0.1's folders stay what they are."""


@dataclass(frozen=True)
class Settings:
    """What a folder of embeddings was made with. JSON types only, so that it travels anywhere."""

    weights: str
    """Hash of the model's tensors."""
    config: dict[str, Any]
    cores: int
    """The budget."""
    size: int | list[int] | None
    """Short side, [height, width], or None for each image's own."""
    fast_jpeg: bool
    patches: bool
    dtype: str
    """Of the stored features."""
    precision: str
    """What the model computes in."""
    batch: int
    shard_rows: int
    width: str = "projected"
    """One of `WIDTHS`."""
    pca: dict[str, Any] | None = None
    """What features were reduced by: {"dimensions", "sha256"} of a `veca.embed.pca.Reduction`."""
    keep: float | str = 1.0
    """The share of patch tokens that go on after merging, or "auto"."""
    agreement: float | None = None
    """With "auto": what is promised."""

    @classmethod
    def of(
        cls,
        model: Veca,
        *,
        cores: int | str | None,
        size: AutoSize,
        fast_jpeg: bool,
        patches: bool,
        dtype: str,
        batch_size: int,
        shard_rows: int,
        width: str = AUTO,
        keep: float | str | None = None,
        agreement: float | None = None,
        there: Settings | None = None,
    ) -> Settings:
        """Check what a user asked for; "auto" is what is `there` already, or else the default."""
        check_choice("dtype of the stored features", dtype, DTYPES)
        found = None if there is None else there.to_dict()
        pixels = resolved_size(size, model.config, found)
        dials = check_dials(model, cores, keep, agreement, pixels)
        return cls(
            weights=weights_hash(model),
            config=model.config.to_dict(),
            cores=dials.cores,
            size=pixels,
            fast_jpeg=bool(fast_jpeg),
            patches=bool(patches),
            dtype=dtype,
            precision=recorded(model),
            batch=at_least("batch_size", batch_size),
            shard_rows=at_least("shard_rows", shard_rows),
            width=resolved_width(
                width,
                model.config,
                WHAT if patches else WHAT[:1],
                found,
            ),
            keep=dials.keep,
            agreement=dials.agreement,
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Settings:
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        return without_later(asdict(self))

    @property
    def fingerprint(self) -> str:
        """Tells these settings from others; part of every shard."""
        text = json.dumps([LAYOUT, self.to_dict()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def model_config(self) -> VecaConfig:
        return VecaConfig.from_dict(self.config)

    @property
    def pixels(self) -> Size:
        """`size` as `veca.images` takes it."""
        return (self.size[0], self.size[1]) if isinstance(self.size, list) else self.size

    @property
    def what(self) -> tuple[str, ...]:
        return WHAT if self.patches else WHAT[:1]

    @property
    def dimensions(self) -> int:
        """Numbers in the embedding of an image."""
        return self.widths["cls"]

    @property
    def widths(self) -> dict[str, int]:
        """Numbers in a vector of each kind of feature."""
        return stored_widths(self.model_config, self.width, self.pca)

    def differences(self, there: Settings) -> list[str]:
        """What a folder made with `there` has otherwise, in words."""
        other = asdict(there)
        return [
            f"{name}: {_short(other[name])} there, {_short(value)} now"
            for name, value in asdict(self).items()
            if value != other[name]
        ]


def without_later(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they are written down and hashed; see `_LATER`."""
    return {k: v for k, v in settings.items() if k not in _LATER or v != _LATER[k]}


def with_later(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a folder, also of one of 0.1, with all names."""
    return {**_LATER, **settings}


def stored_widths(config: VecaConfig, width: str, pca: dict[str, Any] | None) -> dict[str, int]:
    """Numbers in a stored vector of each kind of feature."""
    if pca is not None:
        return dict.fromkeys(WHAT, pca["dimensions"])
    return feature_widths(config, width)


def resolved_size(
    size: AutoSize, config: VecaConfig, there: dict[str, Any] | None
) -> int | list[int] | None:
    """The size to use, as JSON has it: what was asked for, or what is there, or the default."""
    if isinstance(size, str):
        if size != AUTO:
            raise InputError(
                f"size must be the short side, (height, width), None or 'auto'; got {size!r}."
            )
        if there is not None:
            found: int | list[int] | None = there["size"]
            return found
        size = DEFAULT_SIZE
    pixels = check_size(size, config.patch_size)
    return list(pixels) if isinstance(pixels, tuple) else pixels


def resolved_width(
    width: str, config: VecaConfig, what: Sequence[str], there: dict[str, Any] | None
) -> str:
    """The width to use, under the one name that settings have for what comes out."""
    check_choice("width of features", width, (AUTO, *WIDTHS))
    if width == AUTO:
        width = DEFAULT_WIDTH if there is None else with_later(there)["width"]
    if config.feature_width == config.width:
        return "projected"
    if width == "mixed" and len(what) == 1:
        return "projected" if what[0] == "cls" else "native"
    return width


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:13]}..."
