"""Is a file the model? Both run on the same images, of sizes and batches that were not traced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from veca.export.graph import OUTPUTS
from veca.images.bundled import bundled_photos
from veca.model import Veca

BATCHES = (1, 3)
SIZES = ((224, 224), (256, 384))
"""Height and width in pixels, brought onto the patch grid."""

ABSOLUTE, RELATIVE = 1e-3, 2e-2
"""What a file may differ by: float32 in itself, float16 as a share of the largest value."""

TURNED = 0.1
"""The share of tokens that may differ by more in a float16 file that merges: of windows that differ
nearly as much, the rounding of half precision decides which merge. In float32 none may: there it
decides nothing that could be seen, on photos or on noise."""

Runner = Callable[[Tensor, int | None], dict[str, Tensor]]


@dataclass(frozen=True)
class FileCheck:
    """One batch through the file and the model."""

    batch: int
    height: int
    width: int
    cores: int
    differences: dict[str, float]
    """Largest absolute difference of each output."""
    largest: dict[str, float]
    """Largest absolute value of each output of the model."""
    images: str = "noise"
    """Or "photos"."""
    turned: dict[str, float] = field(default_factory=dict)
    """Where windows merge: the share of each output's tokens that differ by more than a float16
    file's may."""

    @property
    def max_difference(self) -> float:
        return max(self.differences.values())

    def allowed(self, dtype: torch.dtype) -> dict[str, float]:
        """What each output may differ by, in a file of `dtype`."""
        if dtype == torch.float32:
            return dict.fromkeys(OUTPUTS, ABSOLUTE)
        return {name: RELATIVE * self.largest[name] for name in OUTPUTS}

    def passes(self, dtype: torch.dtype) -> bool:
        allowed = self.allowed(dtype)
        if self.turned and dtype == torch.float16:
            known = all(math.isfinite(difference) for difference in self.differences.values())
            return known and all(share <= TURNED for share in self.turned.values())
        # Written so that NaN, which compares to nothing, does not pass.
        return all(self.differences[name] <= allowed[name] for name in OUTPUTS)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "max_difference": self.max_difference}


def sizes_on_grid(patch: int, sizes: Iterable[tuple[int, int]] = SIZES) -> list[tuple[int, int]]:
    """`sizes` brought to multiples of the patch, two patches at least."""

    def fit(side: int) -> int:
        return max(2, round(side / patch)) * patch

    return list(dict.fromkeys((fit(height), fit(width)) for height, width in sizes))


def check(
    run: Runner,
    reference: Veca,
    images: Tensor,
    cores: int,
    keep: float = 1.0,
    kind: str = "noise",
) -> FileCheck:
    """Compare a file, at the budget `cores`, with the float32 model.

    Args:
        kind: what the images are, for the record.
    """
    with torch.no_grad():
        out = reference(images, cores=cores, keep=keep)
    expected = dict(zip(OUTPUTS, (out.cls, out.patches, out.cores, out.core_xy), strict=True))
    found = run(images, cores)
    return FileCheck(
        *(images.shape[0], images.shape[2], images.shape[3], cores),
        differences={name: _difference(found[name], expected[name]) for name in OUTPUTS},
        largest={name: float(expected[name].abs().max()) for name in OUTPUTS},
        images=kind,
        turned={name: _turned(found[name], expected[name]) for name in OUTPUTS if keep < 1},
    )


def checks(
    run: Runner,
    reference: Veca,
    *,
    cores: Sequence[int],
    keep: float = 1.0,
    sizes: Sequence[tuple[int, int]],
    batches: Sequence[int] = BATCHES,
    seed: int = 0,
) -> Iterable[FileCheck]:
    """One check for each budget, size and batch, on images of normal noise.

    Where windows merge, on photos as well: flat areas have windows that hardly differ.
    """
    channels = reference.config.in_channels
    generator = torch.Generator().manual_seed(seed)
    for size in sizes:
        for batch in batches:
            images = {"noise": torch.randn(batch, channels, *size, generator=generator)}
            if keep < 1 and channels == 3:
                images["photos"] = _photos(reference, batch, size)
            for kind, pixels in images.items():
                for budget in cores:
                    yield check(run, reference, pixels, budget, keep, kind)


def _photos(reference: Veca, count: int, size: tuple[int, int]) -> Tensor:
    """Some that come with the package, as the model wants them: [count, 3, H, W]."""
    photos = itertools.islice(itertools.cycle(bundled_photos()), count)
    return reference.preprocess(list(photos), size).pixels


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    difference = (found.float().cpu() - expected).abs().max()
    return float("inf") if difference.isnan() else float(difference)


def _turned(found: Tensor, expected: Tensor) -> float:
    """The share of tokens that differ by more than rounding to half precision explains."""
    if found.shape != expected.shape:
        return 1.0
    rows = (found.float().cpu() - expected).abs().amax(dim=-1)
    return float((rows > RELATIVE * expected.abs().max()).float().mean())
