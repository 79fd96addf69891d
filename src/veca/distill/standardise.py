"""Targets brought to mean 0 and deviation 1, channel by channel, and back.

Some teachers' channels differ in scale by orders of magnitude; a squared error would then see
only the largest. The numbers are estimated on training images before training and stored beside
the weights (`targets.safetensors`), so that a student's features can be mapped back to the
teacher's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from veca.errors import DistillError
from veca.weights.store import TARGETS
from veca.weights.tensors import read_file, write_file

_FLOOR = 0.05
"""Smallest deviation, as a share of the channels' RMS deviation: a channel that hardly ever moves
would otherwise turn its rare moves into huge targets."""


class Moments(NamedTuple):
    """Per-channel mean and deviation, float32 [D]."""

    mean: Tensor
    std: Tensor

    def standardise(self, features: Tensor) -> Tensor:
        """Features [..., D] of the teacher's -> what the student learns."""
        # One pass over the features, which are the largest tensors of a step.
        return torch.addcmul(-self.mean / self.std, features, 1 / self.std)

    def unstandardise(self, features: Tensor) -> Tensor:
        """Features [..., D] as the student gives them -> the teacher's own scale."""
        return torch.addcmul(self.mean, features, self.std)


class TargetStatistics(NamedTuple):
    """The moments of one teacher's features."""

    cls: Moments
    """Of the global feature."""
    dense: Moments
    """Of the patches' features."""

    def to(self, device: torch.device | str) -> TargetStatistics:
        return TargetStatistics(*(Moments(*(t.to(device) for t in part)) for part in self))

    def unstandardise(self, cls: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        """A student's global [B, D] and dense [B, N, D'] features on the teacher's own scale."""
        return self.cls.unstandardise(cls), self.dense.unstandardise(patches)


class RunningMoments:
    """Sums over batches, in float64, of everything but the last axis."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def add(self, features: Tensor) -> None:
        # In float64, which Apple's GPUs do not have.
        features = features.cpu() if features.device.type == "mps" else features
        flat = features.detach().double().flatten(0, -2)
        count = flat.new_full((flat.shape[1],), len(flat))
        sums = torch.stack([count, flat.sum(0), flat.square().sum(0)])
        self.sums = sums if self.sums is None else self.sums + sums

    def moments(self, total: Tensor | None = None) -> Moments:
        """The moments of all that was added; `total` are the sums over all ranks."""
        total = self.sums if total is None else total
        if total is None:
            raise DistillError("no features to estimate the targets' scale from.")
        count, first, second = total
        mean = first / count
        variance = (second / count - mean.square()).clamp_min(0)
        floor = (variance.mean().sqrt() * _FLOOR).clamp_min(1e-12)
        std = torch.maximum(variance.sqrt(), floor)
        return Moments(mean.float(), std.float())


# ------------------------------------------------------------------------------------- storage


def to_tensors(statistics: Mapping[str, TargetStatistics]) -> dict[str, Tensor]:
    """Flat names for safetensors: "teacher/cls.mean" and so on."""
    return {
        f"{teacher}/{part}.{name}": tensor
        for teacher, both in statistics.items()
        for part, moments in both._asdict().items()
        for name, tensor in moments._asdict().items()
    }


def from_tensors(
    tensors: Mapping[str, Tensor], where: str = "the checkpoint"
) -> dict[str, TargetStatistics]:
    """The inverse of `to_tensors`; `where` names their file in messages."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        teacher, _, rest = name.rpartition("/")
        found.setdefault(teacher, {})[rest] = tensor.float()
    wanted = ["cls.mean", "cls.std", "dense.mean", "dense.std"]
    for teacher, parts in found.items():
        if sorted(parts) != wanted:
            raise DistillError(
                f"{where}: the targets of teacher {teacher!r} must hold {', '.join(wanted)}, got "
                f"{', '.join(sorted(parts))}."
            )
        for name, tensor in parts.items():
            if tensor.ndim != 1 or len(tensor) != len(parts[f"{name.partition('.')[0]}.mean"]):
                raise DistillError(
                    f"{where}: {teacher}/{name} must be one number for each channel, got shape "
                    f"{list(tensor.shape)}."
                )
    return {
        teacher: TargetStatistics(
            Moments(parts["cls.mean"], parts["cls.std"]),
            Moments(parts["dense.mean"], parts["dense.std"]),
        )
        for teacher, parts in found.items()
    }


def save_targets(
    statistics: Mapping[str, TargetStatistics], folder: str | os.PathLike[str]
) -> Path:
    """Write `targets.safetensors` into a folder, all or nothing."""
    path = Path(folder) / TARGETS
    tensors = {name: t.detach().cpu().clone() for name, t in to_tensors(statistics).items()}
    write_file(tensors, path)
    return path


def load_targets(path: str | os.PathLike[str]) -> dict[str, TargetStatistics]:
    """What `save_targets` wrote, by teacher: from a folder or the file itself.

    >>> statistics = load_targets("runs/x/final")["efficientnet-lite2"]
    >>> cls, patches = statistics.unstandardise(out.cls, out.patches)
    """
    path = Path(path).expanduser()
    path = path / TARGETS if path.is_dir() else path
    return from_tensors(read_file(path, DistillError)[0], str(path))


def find_targets(
    names: Sequence[str], widths: Iterable[tuple[int, int]], path: str | os.PathLike[str]
) -> dict[str, TargetStatistics]:
    """The statistics of some teachers in a file, checked against their (global, dense) widths."""
    known = load_targets(path)
    found = {}
    for name, (width, dense_width) in zip(names, widths, strict=True):
        if name not in known:
            raise DistillError(
                f"{path} holds no targets of teacher {name!r}; it holds {', '.join(known)}."
            )
        lengths = len(known[name].cls.mean), len(known[name].dense.mean)
        if lengths != (width, dense_width):
            raise DistillError(
                f"{path}: the targets of teacher {name!r} are {lengths} wide, the teacher's "
                f"features {(width, dense_width)}."
            )
        found[name] = known[name]
    return found
