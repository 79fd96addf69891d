"""An operating point: size, cores, keep and precision that were chosen for weights on a machine.

`veca tune` writes one as `point.json`; commands and `veca.load` take it. Torch is not needed to
read one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from veca._util.files import atomic_write_json, check_fields, read_json
from veca.config import AUTO
from veca.errors import ConfigError, VecaWarning

__all__ = ["OperatingPoint", "machine_name", "read_point"]

FORMAT = "veca-point-1"
PRECISIONS = ("fp32", "bf16", "fp16", "int8", "float32", "bfloat16", "float16")
"""The last three are what 0.1 called them."""
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("weights", "weights_sha256", "machine", "precision"), str),
    **{"size": int, "cores": (int, str), "keep": (int, float, str), "measured": dict},
}


@dataclass(frozen=True)
class OperatingPoint:
    """Where on the dial to work, and what was measured there."""

    weights: str
    """Their name, as they were asked for."""
    weights_sha256: str
    """Their hash, as `veca.weights.weights_hash` gives it."""
    machine: str
    """The processor or GPU that was measured, as `machine_name` calls it."""
    size: int
    """Short side of the images, in pixels."""
    cores: int | str
    """The budget, or "auto"."""
    keep: float | str
    """The share of patch tokens that go on, or "auto"."""
    precision: str
    """What the model computes in."""
    agreement: float | None = None
    """The promise of "auto"; None where nothing is chosen by content."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """`ms` (median time of a batch), `images_per_s`, `cls` and `patches` (mean cosines with the
    reference), and under what conditions."""

    def __post_init__(self) -> None:
        for name in ("weights", "weights_sha256", "machine"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} of a point must be text, got {getattr(self, name)!r}.")
        if not _whole(self.size):
            raise ConfigError(f"size of a point must be a number of pixels, got {self.size!r}.")
        if not _whole(self.cores) and self.cores != AUTO:
            raise ConfigError(f"cores of a point must be a budget or 'auto', got {self.cores!r}.")
        share = isinstance(self.keep, (int, float)) and not isinstance(self.keep, bool)
        if self.keep != AUTO and not (share and 0 < float(self.keep) <= 1):
            raise ConfigError(f"keep of a point must be a share or 'auto', got {self.keep!r}.")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision of a point must be one of {', '.join(PRECISIONS)}.")
        if self.agreement is not None and not isinstance(self.agreement, (int, float)):
            raise ConfigError(f"agreement of a point must be a number, got {self.agreement!r}.")
        if not isinstance(self.measured, Mapping):
            raise ConfigError("what was measured at a point must be a table.")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, whole or not at all."""
        atomic_write_json(path, {"format": FORMAT, **asdict(self)})

    def warn_of_others(self, *, weights: str, sha256: str, machine: str) -> None:
        """Warn, naming both, where it was made for other weights or on another machine."""
        if sha256 != self.weights_sha256:
            warnings.warn(
                f"the point was chosen for the weights {self.weights} ({self.weights_sha256[:8]}) "
                f"and is used with {weights} ({sha256[:8]}); run veca tune for these.",
                VecaWarning,
                stacklevel=3,
            )
        if machine != self.machine:
            warnings.warn(
                f"the point was measured on {self.machine} and is used on {machine}; its features "
                "are the same, its times are not: run veca tune here.",
                VecaWarning,
                stacklevel=3,
            )


def read_point(path: str | os.PathLike[str] | OperatingPoint) -> OperatingPoint:
    """A point of `veca tune`, checked."""
    if isinstance(path, OperatingPoint):
        return path
    table = read_json(Path(path).expanduser(), ConfigError)
    if table.pop("format", None) != FORMAT:
        raise ConfigError(f"{path} is no operating point of veca tune (no format {FORMAT!r}).")
    check_fields(table, _FIELDS, path, ConfigError)
    try:
        return OperatingPoint(**{name: table[name] for name in _FIELDS}, agreement=_promise(table))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _promise(table: Mapping[str, Any]) -> Any:
    return table.get("agreement")  # a field that may be missing, or null


def machine_name(device: object = "cpu") -> str:
    """What points are bound to: the GPU, or the processor and how many there are."""
    from veca._util.machine import machine

    about = machine(str(device))
    return about.gpu or f"{about.cpu}, {about.cpu_count} CPUs"


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
