"""Chosen by content: the share of tokens an image needs, and the budget all need, for a promise.

How much a pass loses by merging shows before the first windows merge: in how much the patches of
each window differ, on average over the image. A `Calibration` holds, for weights and sizes of
images, what photos have shown of that: how the loss grows with the difference, for each share of
tokens, and how far photos lie above it. From it follows the least share that keeps a promise on 95
of 100 such photos. Budgets of cores are taken from a table: photos hardly differ in them.

A loss is 1 less the agreement: the cosine of an image with its pass over all tokens (or with all
cores), of its CLS or, on average, of its patches, whichever is lower.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from veca._util.files import check_fields, parse_json, to_json
from veca.config import AUTO
from veca.errors import InputError, VecaWarning, WeightsError, shown

__all__ = [
    "FILE",
    "KEPT",
    "LADDER",
    "Calibration",
    "SizeTable",
    "calibration_of",
    "found_in",
    "joined",
    "least_share",
    "read",
]

FILE = "calibration.json"
"""Beside weights."""
FORMAT = "veca-calibration-1"
LADDER = tuple(step / 20 for step in range(5, 21))
"""The shares that are chosen among: few, so that images of a batch often agree. Windows of 2 x 2
reach all of them."""
KEPT = 0.95
"""On so many photos a promise is kept."""
NEARLY = 1.3
WIDE = 2.0
"""Images of so many times fewer or more patches than a calibrated square are still of its size:
more, as a size is the short side of photos."""

Floats = np.ndarray[Any, np.dtype[np.float64]]
Outputs = TypeVar("Outputs")


class Chosen(NamedTuple):
    """What `cores` and `keep` are for a batch of images, where they are "auto"."""

    cores: int
    keep: tuple[float, ...]
    """The share of patch tokens of each image."""


@dataclass(frozen=True)
class SizeTable:
    """What photos of one size have shown."""

    size: int
    """Pixels a side; they were squares."""
    patches: int
    """Of such a photo."""
    photos: int
    shares: tuple[float, ...]
    """Of tokens, at which the loss was measured, ascending."""
    offsets: tuple[float, ...]
    """At each share: the logarithm of the loss to expect where that of the difference is 0."""
    slopes: tuple[float, ...]
    """And how it grows with the logarithm of the difference."""
    margins: tuple[float, ...]
    """For each of the calibration's promises: how much more is allowed for."""
    budgets: tuple[int, ...]
    """Of cores, at which the loss was measured, ascending."""
    losses: tuple[float, ...]
    """At each budget: what 95 of 100 photos do not exceed."""

    def expected(self, differences: Floats) -> Floats:
        """[B, rungs of the ladder but the last] logarithms of the losses to expect."""
        rungs = LADDER[:-1]
        offsets, slopes = (np.interp(rungs, self.shares, x) for x in (self.offsets, self.slopes))
        return offsets + slopes * np.log(differences + LEAST_DIFFERENCE)[:, None]

    def least_budget(self, loss: float) -> int | None:
        """The least that keeps a loss, as all larger ones do; None where only the bank does."""
        found = None
        for budget, lost in zip(reversed(self.budgets), reversed(self.losses), strict=True):
            if lost > loss:
                break
            found = budget
        return found


LEAST_DIFFERENCE = 1e-4
"""Added before logarithms: an image of one colour has none."""


def least_share(bounds: Floats, loss: float) -> Floats:
    """The least rung of the ladder that keeps a loss, as all above it do.

    Args:
        bounds: [B, rungs but the last] logarithms of losses.
    """
    kept = bounds <= np.log(loss)
    kept = np.flip(np.logical_and.accumulate(np.flip(kept, 1), axis=1), 1)
    first = np.where(kept.any(axis=1), kept.argmax(axis=1), len(LADDER) - 1)
    return np.asarray(LADDER)[first]


@dataclass(frozen=True)
class Calibration:
    """What `veca calibrate` found for weights; lies beside them as calibration.json."""

    weights_sha256: str
    """The hash of their tensors as stored."""
    merge_blocks: tuple[int, ...]
    """The rule of merging that was measured."""
    promises: tuple[float, ...]
    """Agreements for which photos were looked at, ascending. Any between them can be had."""
    sizes: tuple[SizeTable, ...]
    """By their patches, ascending."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Which photos, when and with what, and how the promises are kept on held-out ones."""

    def shares(
        self, differences: Tensor, grid: tuple[int, int], agreement: float
    ) -> tuple[float, ...]:
        """The share of tokens that each image of a batch needs.

        Args:
            agreement: from `of_each`.
            differences: [B] `veca.merging.unlikeness` before the first windows merge.
        """
        values = differences.double().cpu().numpy()
        bounds = [
            table.expected(values) + self._margin(table, agreement) for table in self._tables(grid)
        ]
        return tuple(least_share(np.maximum.reduce(bounds), 1 - agreement).tolist())

    def budget(self, grid: tuple[int, int], agreement: float, num_cores: int) -> int:
        """The least budget of cores that keeps the promise on 95 of 100 photos."""
        found = [table.least_budget(1 - agreement) for table in self._tables(grid)]
        return max(num_cores if budget is None else budget for budget in found)

    def of_each(self, agreement: float, dials: int = 1) -> float:
        """What each of so many dials promises, so that they lose no more together.

        Raises:
            InputError: it is a promise that cannot be given.
        """
        each = 1 - (1 - agreement) / dials
        least, most = (1 - (1 - one) * dials for one in (self.promises[0], self.promises[-1]))
        if not least - 1e-9 <= agreement <= most + 1e-9:
            both = " for cores and keep together" if dials > 1 else ""
            raise InputError(
                f"this calibration can promise an agreement from {least:g} to {most:g}{both}, got "
                f"{agreement:g}; ask for one of these, or give cores and keep as numbers."
            )
        return min(max(each, self.promises[0]), self.promises[-1])

    def _margin(self, table: SizeTable, agreement: float) -> float:
        """That of the nearest promises on both sides, whichever is larger."""
        places = (
            np.searchsorted(self.promises, agreement, "right") - 1,
            np.searchsorted(self.promises, agreement),
        )
        return max(table.margins[int(place)] for place in places)

    def _tables(self, grid: tuple[int, int]) -> list[SizeTable]:
        """Those of the calibrated sizes on both sides: the more careful one will hold."""
        patches = grid[0] * grid[1]
        for table in self.sizes:
            if table.patches / NEARLY <= patches <= table.patches * WIDE:
                return [table]
        for below, above in itertools.pairwise(self.sizes):
            if below.patches < patches < above.patches:
                return [below, above]
        nearest = self.sizes[0] if patches < self.sizes[0].patches else self.sizes[-1]
        warnings.warn(
            f"images of {grid[0]} x {grid[1]} patches are beyond the sizes that were calibrated; "
            f"what is chosen is what photos of {nearest.size} px need. veca calibrate --sizes "
            "measures others.",
            VecaWarning,
            stacklevel=2,
        )
        return [nearest]

    def to_bytes(self) -> bytes:
        """As the file holds it."""
        sizes = {}
        for table in self.sizes:
            keep = {name: list(getattr(table, name)) for name in _KEEP}
            cores = {name: list(getattr(table, name)) for name in _CORES}
            facts = {"patches": table.patches, "photos": table.photos}
            sizes[str(table.size)] = {**facts, "keep": keep, "cores": cores}
        fields = {
            "format": FORMAT,
            "weights_sha256": self.weights_sha256,
            "merge_blocks": list(self.merge_blocks),
            "promises": list(self.promises),
            "sizes": sizes,
            "about": dict(self.about),
        }
        return to_json(fields).encode()


_KEEP = ("shares", "offsets", "slopes", "margins")
_CORES = ("budgets", "losses")


@functools.lru_cache(maxsize=16)
def read(text: bytes, where: str = FILE) -> Calibration:
    """The calibration in a file's bytes, checked."""
    table = parse_json(text, where, WeightsError)
    kinds = {"format": str, "weights_sha256": str, "merge_blocks": list, "promises": list}
    check_fields(table, {**kinds, "sizes": dict, "about": dict}, where, WeightsError)
    if table["format"] != FORMAT:
        raise WeightsError(f"{where} is no calibration of this veca (format {shown(FORMAT)}).")
    sizes = []
    for name, part in table["sizes"].items():
        place = f"{where}, size {name}"
        number = int(name) if name.isdecimal() and len(name) < 7 else 0
        fields = {f"{group}.{one}": list for group, one in _LISTS}
        check_fields(part, {"patches": int, "photos": int, **fields}, place, WeightsError)
        lists = {one: _numbers(part[group][one], f"{place}: {one}") for group, one in _LISTS}
        sizes.append(SizeTable(number, part["patches"], part["photos"], **cast(Any, lists)))
    found = Calibration(
        table["weights_sha256"],
        cast("tuple[int, ...]", _numbers(table["merge_blocks"], f"{where}: merge_blocks")),
        _numbers(table["promises"], f"{where}: promises"),
        tuple(sorted(sizes, key=lambda size: size.patches)),
        table["about"],
    )
    _check_lengths(found, where)
    return found


_LISTS = [*(("keep", name) for name in _KEEP), *(("cores", name) for name in _CORES)]


def _numbers(values: Sequence[object], where: str) -> tuple[Any, ...]:
    plain = all(type(v) in (int, float) and abs(cast(float, v)) < 1e12 for v in values)
    if not values or not plain:
        raise WeightsError(f"{where} must be numbers, got {shown(values)}.")
    return tuple(values)


def _check_lengths(found: Calibration, where: str) -> None:
    ascending = [
        found.promises,
        *(t.shares for t in found.sizes),
        *(t.budgets for t in found.sizes),
    ]
    fits = all(
        len(t.shares) == len(t.offsets) == len(t.slopes)
        and len(t.margins) == len(found.promises)
        and len(t.budgets) == len(t.losses)
        and t.size > 0 < t.patches
        for t in found.sizes
    )
    if not found.sizes or not fits or any(list(x) != sorted(set(x)) for x in ascending):
        raise WeightsError(f"{where} is damaged: its tables do not fit together; fetch it again.")


def found_in(beside: Mapping[str, bytes]) -> Calibration | None:
    """The calibration among the files beside weights, if there is one."""
    return read(beside[FILE]) if FILE in beside else None


def calibration_of(
    beside: Mapping[str, bytes], name: str | None, merge_blocks: tuple[int, ...]
) -> Calibration:
    """That of weights, from the files beside them.

    Raises:
        InputError: they carry none, or one of another rule of merging.
    """
    found = found_in(beside)
    weights = f"the weights {name}" if name else "these weights"
    how = "veca calibrate WEIGHTS --data PHOTOS makes one"
    if found is None:
        raise InputError(
            f"{AUTO!r} needs a calibration, and {weights} carry none; {how}, or give cores and "
            "keep as numbers."
        )
    if found.merge_blocks != merge_blocks:
        raise InputError(
            f"the calibration of {weights} was made for merging before the blocks "
            f"{found.merge_blocks}, not {merge_blocks}; {how}."
        )
    return found


def joined(parts: Sequence[Outputs], order: Sequence[Tensor]) -> Outputs:
    """Outputs for parts of a batch, as one for the batch.

    Args:
        parts: tensors, tuples of them or lists of these; what is no tensor is the same in all.
        order: for each part, the places of its images.
    """
    first: Any = parts[0]
    if isinstance(first, Tensor):
        tensors = cast("Sequence[Tensor]", parts)
        back = torch.cat(list(order)).argsort()
        return cast(Outputs, torch.cat(list(tensors)).index_select(0, back))
    if isinstance(first, list) or hasattr(first, "_fields"):
        inside = [joined(part, order) for part in zip(*cast(Any, parts), strict=True)]
        return cast(Outputs, inside if isinstance(first, list) else type(first)(*inside))
    return cast(Outputs, first)
