"""Is a file the model? Both run on the same photos, at sizes and batches that were not traced."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from veca.export.graph import OUTPUTS
from veca.images import find_images
from veca.images.bundled import bundled_photos
from veca.model import Veca
from veca.quantization import Agreement

BATCHES = (1, 3)
SIZES = ((224, 224), (256, 384))
"""Height and width in pixels, brought onto the patch grid."""
MOST_PHOTOS = 64
"""Of those a user gives; the first ones, in natural order."""

ABSOLUTE = 1e-3
"""What an output of a file in float32 may differ by."""
FEW_CORES = 8
LOOSER = 5
"""A gate holds for the mean over all photos. Those of one check may disagree so many times as much,
and so may fewer than `FEW_CORES` in a file for any budget: with one core everything passes through
one token, and its rounding is felt everywhere."""
PLACES = 0.1
"""What the place of a core, in [-1, 1], may differ by in any other file."""

Runner = Callable[..., dict[str, Tensor]]
"""images, cores, keep -> the outputs."""
Photo: TypeAlias = "str | os.PathLike[str]"


@dataclass(frozen=True)
class FileCheck:
    """One batch through the file and the model."""

    batch: int
    height: int
    width: int
    cores: int
    keep: float
    differences: dict[str, float]
    """Largest absolute difference of each output."""
    largest: dict[str, float]
    """Largest absolute value of each output of the model."""
    agreement: dict[str, float]
    """Mean cosine with the model's: of "cls", "patches" and "core_tokens"."""

    @property
    def max_difference(self) -> float:
        return max(self.differences.values())

    def wrong(self, gate: Agreement | None) -> str | None:
        """The output that does not pass, and why in words; None where all do.

        Args:
            gate: None: equal to rounding.
        """
        # Written so that NaN, which compares to nothing, does not pass.
        if gate is None:
            worst = max(OUTPUTS, key=lambda name: _orderly(self.differences[name]))
            if self.differences[worst] <= ABSOLUTE:
                return None
            return (
                f"its {worst} differ from the model's by {self.differences[worst]:.2g}, more than "
                f"{ABSOLUTE:g}"
            )
        floors = {"cls": gate.cls, "patches": gate.patches, "core_tokens": gate.patches}
        for name, floor in floors.items():
            if not self.agreement[name] >= floor:
                return (
                    f"the agreement of its {name} with the float32 model's is "
                    f"{self.agreement[name]:.4f}, below the gate of {floor:g}"
                )
        if not self.differences["core_xy"] <= PLACES:
            return f"its cores stand up to {self.differences['core_xy']:.2g} from the model's"
        return None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "max_difference": self.max_difference}


def looser(gate: Agreement) -> Agreement:
    """The gate for a single check, and for few cores of a file for any budget."""
    return Agreement(*(max(0.0, 1 - LOOSER * (1 - least)) for least in gate))


def mean_of(checks: Sequence[FileCheck]) -> FileCheck:
    """Checks with one budget and share of tokens as one: over all their photos."""
    photos = sum(check.batch for check in checks)
    first = checks[0]
    return replace(
        first,
        batch=photos,
        differences={n: max(c.differences[n] for c in checks) for n in first.differences},
        agreement={
            n: sum(c.batch * c.agreement[n] for c in checks) / photos for n in first.agreement
        },
    )


def by_point(checks: Iterable[FileCheck]) -> list[FileCheck]:
    """`mean_of` for each budget and share of tokens."""
    points: dict[tuple[int, float], list[FileCheck]] = {}
    for check in checks:
        points.setdefault((check.cores, check.keep), []).append(check)
    return [mean_of(group) for group in points.values()]


def _orderly(number: float) -> float:
    return math.inf if math.isnan(number) else number


def sizes_on_grid(patch: int, sizes: Iterable[tuple[int, int]] = SIZES) -> list[tuple[int, int]]:
    """`sizes` brought to multiples of the patch, two patches at least."""

    def fit(side: int) -> int:
        return max(2, round(side / patch)) * patch

    return list(dict.fromkeys((fit(height), fit(width)) for height, width in sizes))


def photos_for(data: Photo | Sequence[Photo] | None) -> list[Path]:
    """The photos that files are checked on: a user's, or those that come with the package."""
    return bundled_photos() if data is None else find_images(data)[:MOST_PHOTOS]


def check(run: Runner, reference: Veca, images: Tensor, cores: int, keep: float = 1.0) -> FileCheck:
    """Compare a file, at the budget `cores`, with the float32 model."""
    with torch.no_grad():
        out = reference(images, cores=cores, keep=keep)
    expected = dict(zip(OUTPUTS, (out.cls, out.patches, out.cores, out.core_xy), strict=True))
    found = run(images, cores, keep)
    return FileCheck(
        *(images.shape[0], images.shape[2], images.shape[3], cores, keep),
        differences={name: _difference(found[name], expected[name]) for name in OUTPUTS},
        largest={name: float(expected[name].abs().max()) for name in OUTPUTS},
        agreement={name: _agreement(found[name], expected[name]) for name in OUTPUTS[:3]},
    )


def checks(
    run: Runner,
    reference: Veca,
    *,
    cores: Sequence[int],
    keeps: Sequence[float] = (1.0,),
    sizes: Sequence[tuple[int, int]],
    batches: Sequence[int] = BATCHES,
    photos: Sequence[Photo] | None = None,
) -> Iterable[FileCheck]:
    """One check for each size, batch, budget and share of tokens, on photos in turn.

    A model of other than three channels, for which there are no photos, sees normal noise.
    """
    batch_of = _batches(reference, bundled_photos() if photos is None else photos)
    for size, batch in itertools.product(sizes, batches):
        images = batch_of(size, batch)
        for budget, keep in itertools.product(cores, keeps):
            yield check(run, reference, images, budget, keep)


def _batches(reference: Veca, photos: Sequence[Photo]) -> Callable[[tuple[int, int], int], Tensor]:
    """What gives the next photos, or noise, as [count, channels, H, W]."""
    channels = reference.config.in_channels
    if channels != 3:
        generator = torch.Generator().manual_seed(0)
        return lambda size, count: torch.randn(count, channels, *size, generator=generator)
    endless: Iterator[Photo] = itertools.cycle(photos)

    def following(size: tuple[int, int], count: int) -> Tensor:
        return reference.preprocess(list(itertools.islice(endless, count)), size).pixels

    return following


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    difference = (found.float().cpu() - expected).abs().max()
    return float("inf") if difference.isnan() else float(difference)


def _agreement(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return -1.0
    return float(F.cosine_similarity(found.float().cpu(), expected, dim=-1).mean())
