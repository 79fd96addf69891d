"""Is a file the model? Both run on the same images, of sizes and batches that were not traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from veca.export.graph import OUTPUTS
from veca.model import Veca

BATCHES = (1, 3)
SIZES = ((224, 224), (256, 384))
"""Height and width in pixels, brought onto the patch grid."""

ABSOLUTE, RELATIVE = 1e-3, 2e-2
"""What a file may differ by: float32 in itself, float16 as a share of the largest value."""

TURNED = 0.02
"""The share of patches that a file that merges may give otherwise: of windows that are alike to the
last digits, rounding decides which merge."""

Runner = Callable[[Tensor, int | None], dict[str, Tensor]]


@dataclass(frozen=True)
class FileCheck:
    """One batch through the file and the model."""

    batch: int
    height: int
    width: int
    cores: int
    differences: dict[str, float]
    """Largest absolute difference of each output; of patches, where windows merge, of all but
    `TURNED`."""
    largest: dict[str, float]
    """Largest absolute value of each output of the model."""

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
        # Written so that NaN, which compares to nothing, does not pass.
        return all(self.differences[name] <= allowed[name] for name in OUTPUTS)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "max_difference": self.max_difference}


def sizes_on_grid(patch: int, sizes: Iterable[tuple[int, int]] = SIZES) -> list[tuple[int, int]]:
    """`sizes` brought to multiples of the patch, two patches at least."""

    def fit(side: int) -> int:
        return max(2, round(side / patch)) * patch

    return list(dict.fromkeys((fit(height), fit(width)) for height, width in sizes))


def check(run: Runner, reference: Veca, images: Tensor, cores: int, keep: float = 1.0) -> FileCheck:
    """Compare a file, at the budget `cores`, with the float32 model."""
    with torch.no_grad():
        out = reference(images, cores=cores, keep=keep)
    expected = dict(zip(OUTPUTS, (out.cls, out.patches, out.cores, out.core_xy), strict=True))
    found = run(images, cores)
    return FileCheck(
        *(images.shape[0], images.shape[2], images.shape[3], cores),
        differences={
            name: _difference(
                found[name], expected[name], TURNED if keep < 1 and name == "patches" else 0.0
            )
            for name in OUTPUTS
        },
        largest={name: float(expected[name].abs().max()) for name in OUTPUTS},
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
    """One check for each budget, size and batch, on images of normal noise."""
    channels = reference.config.in_channels
    generator = torch.Generator().manual_seed(seed)
    for height, width in sizes:
        for batch in batches:
            images = torch.randn(batch, channels, height, width, generator=generator)
            for budget in cores:
                yield check(run, reference, images, budget, keep)


def _difference(found: Tensor, expected: Tensor, but: float) -> float:
    """The largest of all rows, or of all but a share of them."""
    if found.shape != expected.shape:
        return float("inf")
    rows = (found.float().cpu() - expected).abs().nan_to_num(torch.inf, torch.inf).amax(dim=-1)
    rows = rows.flatten().sort().values
    return float(rows[-1 - int(but * len(rows))])
