"""Everything that decides what the numbers in a folder of embeddings are."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from veca.checks import check_budget
from veca.config import VecaConfig
from veca.embed.pipeline import DTYPES
from veca.errors import at_least, check_choice
from veca.images import Size, check_size
from veca.model import Veca
from veca.weights import weights_hash

LAYOUT = "veca-embeddings-1"


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

    @classmethod
    def of(
        cls,
        model: Veca,
        *,
        cores: int | None,
        size: Size,
        fast_jpeg: bool,
        patches: bool,
        dtype: str,
        batch_size: int,
        shard_rows: int,
    ) -> Settings:
        """Check what a user asked for."""
        check_choice("dtype of the stored features", dtype, DTYPES)
        pixels = check_size(size, model.config.patch_size)
        return cls(
            weights=weights_hash(model),
            config=model.config.to_dict(),
            cores=check_budget(cores, model.config.num_cores),
            size=list(pixels) if isinstance(pixels, tuple) else pixels,
            fast_jpeg=bool(fast_jpeg),
            patches=bool(patches),
            dtype=dtype,
            precision=str(next(model.parameters()).dtype).removeprefix("torch."),
            batch=at_least("batch_size", batch_size),
            shard_rows=at_least("shard_rows", shard_rows),
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Settings:
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

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
    def width(self) -> int:
        """Numbers in an embedding."""
        return self.model_config.feature_width

    def differences(self, there: Settings) -> list[str]:
        """What a folder made with `there` has otherwise, in words."""
        other = there.to_dict()
        return [
            f"{name}: {_short(other[name])} there, {_short(value)} now"
            for name, value in self.to_dict().items()
            if value != other[name]
        ]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:13]}..."
