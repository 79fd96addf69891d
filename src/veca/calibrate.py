"""Measure on photos what "auto" needs to know of weights, and write it beside them.

For each size, photos run through the full pass, with every share of tokens and with every budget of
cores. What an image loses with a share is related to how much its patches differ where the first
windows merge (`veca.content`): a line for each share, on logarithms, by least squares. How far
photos lie above it is allowed for by a margin for each promise. A margin that keeps it on 95 of 100
of the photos at hand would be too small for others about every second time, and by more the fewer
the photos. So it is kept on so many more of them that 95 of 100 unseen photos of the kind keep it
at a confidence of 90 % (an order statistic as a bound of the quantile; no distribution is assumed).

What that is worth is told by photos that had no part in it: each fifth is held out once.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from veca._util.files import atomic_write_json, check_fields, read_json, remove_leftovers
from veca._util.machine import machine
from veca.checks import check_model
from veca.content import (
    KEPT,
    LADDER,
    LEAST_DIFFERENCE,
    Calibration,
    Floats,
    SizeTable,
    least_share,
)
from veca.cost import cost
from veca.embed.pipeline import explained_out_of_memory
from veca.embed.sources import Sources, drawn
from veca.errors import InputError, SourceError, at_least
from veca.images import check_size
from veca.merging import unlikeness
from veca.model import Veca, evaluating
from veca.outputs import VecaOutput
from veca.precision import recorded

__all__ = [
    "HeldOut",
    "Measurements",
    "Records",
    "calibrate",
    "checked",
    "extended",
    "fitted",
    "measure",
]

SIZES = (224, 512)
SHARES = (0.25, 0.3, 0.4, 0.5, 0.7, 0.9)
"""At which the loss is measured; the ladder's other rungs lie between them."""
EIGHTHS = (1, 2, 3, 4, 6)
"""Of the bank: the budgets at which the loss is measured."""
PROMISES = (0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995)
PHOTOS = 150
CORE_PHOTOS = 45
"""Of the photos so many are enough for budgets, in which they hardly differ: with fewer, not even
the greatest loss bounds that of 95 of 100."""
LEAST_PHOTOS = 20
"""Fewer say nothing of 95 in 100."""
FOLDS = 5
CONFIDENCE = 0.9
"""At which a promise is kept on so many photos as said."""
_FORMAT = "veca-calibrate-1"
_STEP, _MOST = 0.02, 6.0  # of margins, on the logarithm of a loss

Progress = Callable[[int, int, str], None]
"""Called with (photos done, photos in all, what is measured)."""


class Measurements(NamedTuple):
    """Of n photos of one size."""

    differences: Floats
    """[n] `veca.merging.unlikeness`."""
    by_share: Floats
    """[n, shares] losses."""
    by_budget: Floats
    """[at most n, budgets] losses."""

    def of(self, photos: Any) -> Measurements:
        """The same of some photos, by a mask or their places; budgets stay as they are."""
        return self._replace(differences=self.differences[photos], by_share=self.by_share[photos])

    def losses(self) -> Floats:
        """[n, rungs of the ladder] at each share that can be chosen; none at all tokens."""
        rungs = LADDER[:-1]
        logs = np.log(np.maximum(self.by_share, 1e-9))
        between = np.array([np.interp(rungs, SHARES, row) for row in logs])
        return np.concatenate([np.exp(between), np.zeros((len(logs), 1))], axis=1)


class HeldOut(NamedTuple):
    """How a promise is kept on photos that the choice had not seen, and what that takes."""

    size: int
    agreement: float
    photos: int
    kept: float
    """The share of photos that keep it."""
    keep: float
    """The mean share of tokens."""
    work: float
    """Operations, over those of the full pass."""
    fixed_keep: float
    """The least share for all that keeps the promise on 95 of 100 of these very photos."""
    fixed_work: float
    oracle_work: float
    """If each photo had the least that keeps the promise."""
    cores: int
    """The budget that "auto" takes: the least for all that keeps the promise on 95 of 100."""
    cores_work: float
    """Operations with it, over those of the full pass."""
    cores_oracle_work: float
    """If each photo had the least budget that keeps the promise."""

    @property
    def saved(self) -> float:
        """Of the work of the fixed share."""
        return 1 - self.work / self.fixed_work

    @property
    def saved_by_oracle(self) -> float:
        return 1 - self.oracle_work / self.fixed_work


def calibrate(
    model: Veca,
    photos: Sources,
    *,
    sizes: Sequence[int] = SIZES,
    count: int = PHOTOS,
    measured: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Calibrate weights on `count` of the photos, cut to squares.

    Args:
        model: as loaded; it is not changed. `model.beside` and `veca.save` take the result.
        photos: files, folders, lists, patterns, as `veca.embed` takes them. They should be like
            those that "auto" will see, and as large as the largest size: enlarged photos need less.
        sizes: sides in pixels. Other sizes go by their neighbours.
        measured: a file that keeps what was measured, so that a run that was stopped goes on.

    Raises:
        SourceError: fewer than 20 photos can be read.
    """
    from veca.weights import weights_hash

    check_model(model, "calibrate")
    for size in sizes:
        check_size(size, model.config.patch_size)
    if not sizes:
        raise InputError("sizes is empty; give at least one, such as 512.")
    count = at_least("count", count, LEAST_PHOTOS)
    content = str(model.provenance.get("tensors_sha256") or weights_hash(model))
    records = Records(
        None if measured is None else Path(measured).expanduser(), content, len(budgets(model))
    )
    found: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    small = dict.fromkeys(sizes, 0)
    with evaluating(model):
        for done, (key, photo) in enumerate(drawn(photos)):
            if done == count:
                break
            for size in sizes:
                if progress is not None:
                    progress(done, count, f"{size} px")
                with_cores = done < CORE_PHOTOS
                found[size].append(records.row(model, key, photo, size, with_cores))
                small[size] += min(photo.size) < size
    if len(found[sizes[0]]) < LEAST_PHOTOS:
        raise SourceError(
            f"{len(found[sizes[0]])} photos of {photos} can be read; a calibration needs at least "
            f"{LEAST_PHOTOS}, better {PHOTOS}."
        )
    by_size = {size: as_measurements(rows) for size, rows in sorted(found.items())}
    checks = [row for size, m in by_size.items() for row in checked(model, size, m)]
    about = {
        "photos": {str(size): len(rows) for size, rows in found.items()},
        "photos_for_cores": {str(size): min(len(found[size]), CORE_PHOTOS) for size in found},
        "enlarged": {str(size): small[size] for size in by_size},
        "confidence": CONFIDENCE,
        "precision": recorded(model),
        **{name: asdict(machine(model.device))[name] for name in ("cpu", "gpu", "torch", "veca")},
        "date": machine(model.device).date,
        "held_out": [
            {k: round(v, 4) if isinstance(v, float) else v for k, v in row._asdict().items()}
            for row in checks
        ],
    }
    tables = [fitted(model, size, m) for size, m in by_size.items()]
    return Calibration(content, model.config.merge_blocks, PROMISES, tuple(tables), about)


def extended(found: Calibration, earlier: Calibration | None) -> Calibration:
    """A calibration with the sizes of an earlier one of the same weights that it has not itself."""
    same = earlier is not None and all(
        getattr(earlier, name) == getattr(found, name)
        for name in ("weights_sha256", "merge_blocks", "promises")
    )
    if earlier is None or not same:
        return found
    own = {table.size for table in found.sizes}
    tables = [*found.sizes, *(table for table in earlier.sizes if table.size not in own)]
    about = {**earlier.about, **found.about}
    for name in ("photos", "photos_for_cores", "enlarged"):
        about[name] = {**earlier.about[name], **found.about[name]}
    rest = [row for row in earlier.about["held_out"] if row["size"] not in own]
    about["held_out"] = sorted([*rest, *found.about["held_out"]], key=lambda row: row["size"])
    tables.sort(key=lambda table: table.patches)
    return replace(found, sizes=tuple(tables), about=about)


@torch.inference_mode()
def measure(model: Veca, photo: Image.Image, size: int, with_cores: bool) -> dict[str, Any]:
    """What one photo shows: its difference and its losses."""
    pixels = model.transform(size)(photo).unsqueeze(0).to(model.device)
    with explained_out_of_memory(f"out of memory at {size} px; leave it out of sizes."):
        early = model.before_merging(pixels)
        patches = early.states[-1].tokens[:, model.config.num_cores :]

        def at(keep: float) -> VecaOutput:
            *_, end = model.walk(early, keep=keep)
            return model.output(end)

        full = at(1.0)
        row = {
            "difference": unlikeness(patches, early.states[-1].grid).item(),
            "keep": [loss(at(keep), full) for keep in SHARES],
        }
        if with_cores:
            row["cores"] = [loss(model(pixels, cores), full) for cores in budgets(model)]
    return row


def loss(out: VecaOutput, full: VecaOutput) -> float:
    """1 less the cosine of CLS or, on average, of the patches, whichever is lower; of one image."""
    cls = F.cosine_similarity(out.cls.double(), full.cls.double()).item()
    patches = F.cosine_similarity(out.patches.double(), full.patches.double(), dim=-1).mean().item()
    return max(0.0, 1 - min(cls, patches))


def budgets(model: Veca) -> tuple[int, ...]:
    """That are measured: eighths of the bank."""
    bank = model.config.num_cores
    return tuple(sorted({-(-bank * part // 8) for part in EIGHTHS} - {bank})) or (bank,)


def as_measurements(rows: Sequence[Mapping[str, Any]]) -> Measurements:
    return Measurements(
        np.array([row["difference"] for row in rows]),
        np.array([row["keep"] for row in rows]),
        np.array([row["cores"] for row in rows if "cores" in row]),
    )


def fitted(model: Veca, size: int, measured: Measurements) -> SizeTable:
    """The table that photos of one size give."""
    logs = np.log(np.maximum(measured.by_share, 1e-9))
    x = np.log(measured.differences + LEAST_DIFFERENCE)
    spread = float(((x - x.mean()) ** 2).sum())
    slopes = ((x - x.mean()) @ logs) / spread if spread > 0 else np.zeros(logs.shape[1])
    slopes = np.maximum(slopes, 0)  # more difference never means less loss
    offsets = logs.mean(axis=0) - slopes * x.mean()
    grid = size // model.config.patch_size
    table = SizeTable(
        size=size,
        patches=grid * grid,
        photos=len(x),
        shares=SHARES,
        offsets=tuple(offsets.tolist()),
        slopes=tuple(slopes.tolist()),
        margins=(0.0,) * len(PROMISES),
        budgets=budgets(model),
        losses=tuple(_nearly_all(measured.by_budget).tolist()),
    )
    expected, losses = table.expected(measured.differences), measured.losses()
    margins = tuple(_margin(expected, losses, 1 - promise) for promise in PROMISES)
    return replace(table, margins=margins)


def _margin(expected: Floats, losses: Floats, allowed: float) -> float:
    """The least that keeps a loss on 95 of 100."""
    enough = most_of(len(losses))
    for margin in np.arange(0, _MOST, _STEP):
        chosen = least_share(expected + margin, allowed)
        if (loss_at(losses, chosen) <= allowed).sum() >= enough:
            break
    return float(round(margin, 4))


def loss_at(losses: Floats, chosen: Floats) -> Floats:
    """Of each photo with the share that was chosen for it."""
    return losses[np.arange(len(losses)), np.searchsorted(LADDER, chosen - 1e-9)]


@functools.lru_cache
def most_of(photos: int) -> int:
    """How many of them must keep a promise, so that 95 of 100 unseen ones do, at the confidence.

    The least k such that k or more of n keep what exactly 95 of 100 of all keep only once in ten
    times. Of few photos all, though even that is not enough below 45.
    """
    below, ways = 0.0, [math.lgamma(1 + k) for k in range(photos + 1)]
    for k in range(photos):
        log = ways[photos] - ways[k] - ways[photos - k]
        below += math.exp(log + k * math.log(KEPT) + (photos - k) * math.log(1 - KEPT))
        if below >= CONFIDENCE:
            return k + 1
    return photos


def _nearly_all(losses: Floats) -> Floats:
    """What 95 of 100 photos do not exceed, at each budget."""
    if not len(losses):
        raise InputError("no photo was run with fewer cores.")
    found: Floats = np.sort(losses, axis=0)[most_of(len(losses)) - 1]
    return found


def checked(model: Veca, size: int, measured: Measurements) -> list[HeldOut]:
    """Each promise on photos that were held out, a fifth at a time."""
    folds = np.arange(len(measured.differences)) % FOLDS
    chosen = np.ones((len(PROMISES), len(folds)))
    for fold in range(FOLDS):
        out = folds == fold
        table = fitted(model, size, measured.of(~out))
        for i, promise in enumerate(PROMISES):
            bounds = table.expected(measured.differences[out]) + table.margins[i]
            chosen[i, out] = least_share(bounds, 1 - promise)
    budget_table = fitted(model, size, measured)
    rows = []
    for i, promise in enumerate(PROMISES):
        budget = budget_table.least_budget(1 - promise) or model.config.num_cores
        rows.append(compared(model, size, measured, chosen[i], promise, budget))
    return rows


def compared(
    model: Veca, size: int, measured: Measurements, chosen: Floats, promise: float, cores: int
) -> HeldOut:
    """What shares that were chosen for photos keep and take, beside a fixed one and an oracle."""
    losses, allowed = measured.losses(), 1 - promise
    work = work_of(model, size)
    least = best_shares(losses, allowed)
    fixed = float(np.quantile(least, KEPT, method="inverted_cdf"))

    def mean_work(shares: Floats) -> float:
        return float(work[np.searchsorted(LADDER, np.asarray(shares) - 1e-9)].mean())

    return HeldOut(
        size=size,
        agreement=promise,
        photos=len(chosen),
        kept=float((loss_at(losses, chosen) <= allowed).mean()),
        keep=float(chosen.mean()),
        work=mean_work(chosen),
        fixed_keep=fixed,
        fixed_work=mean_work(np.array([fixed])),
        oracle_work=mean_work(least),
        cores=cores,
        **work_of_budgets(model, size, measured, allowed, cores),
    )


def work_of_budgets(
    model: Veca, size: int, measured: Measurements, allowed: float, cores: int
) -> dict[str, float]:
    """Operations at a budget, and if each photo had its least, over those of the full pass."""
    bank = [*budgets(model), model.config.num_cores]
    full = cost(model.config, size).veca.flops
    work = np.array([cost(model.config, size, budget).veca.flops / full for budget in bank])
    kept = np.ones((len(measured.by_budget), len(bank)), dtype=bool)
    kept[:, : measured.by_budget.shape[1]] = measured.by_budget <= allowed
    kept = np.flip(np.logical_and.accumulate(np.flip(kept, 1), axis=1), 1)
    return {
        "cores_work": float(work[bank.index(cores)]),
        "cores_oracle_work": float(work[kept.argmax(axis=1)].mean()),
    }


def best_shares(losses: Floats, allowed: float) -> Floats:
    """Of each photo the least share that keeps a loss, as all larger ones do."""
    return least_share(np.log(np.maximum(losses[:, :-1], 1e-12)), allowed)


def work_of(model: Veca, size: int) -> Floats:
    """Operations at each rung of the ladder, over those of the full pass."""
    full = cost(model.config, size).veca.flops
    return np.array([cost(model.config, size, keep=k).veca.flops / full for k in LADDER])


class Records:
    """What was measured, by photo and size; on the disk, where there is a file."""

    def __init__(self, path: Path | None, weights: str, budgets: int) -> None:
        """
        Args:
            budgets: how many are measured on a photo.
        """
        self.path, self.weights = path, weights
        self._rows: dict[str, dict[str, Any]] = {}
        if path is not None:
            remove_leftovers(path.parent.glob(f".{path.name}.*.tmp"))
        if path is None or not path.exists():
            return
        stored = read_json(path, InputError)
        kinds = {"format": str, "weights": str, "shares": list, "rows": dict}
        check_fields(stored, kinds, path, InputError)
        about = stored["format"], stored["weights"], stored["shares"]
        if about != (_FORMAT, weights, list(SHARES)):
            raise InputError(
                f"{path} has measurements of other weights or of another version; remove it to "
                "measure anew."
            )
        self._rows = stored["rows"]
        for name, row in self._rows.items():
            if not _is_measured(row, budgets):
                raise InputError(
                    f"{path}: rows.{name} holds no measurements; remove the file to measure anew."
                )

    def row(
        self, model: Veca, photo: str, image: Image.Image, size: int, with_cores: bool
    ) -> dict[str, Any]:
        """What is known of a photo, measured now if need be."""
        name = f"{photo}/{size}"
        there = self._rows.get(name)
        if there is None or (with_cores and "cores" not in there):
            there = self._rows[name] = measure(model, image, size, with_cores)
            if self.path is not None:
                table = {"format": _FORMAT, "weights": self.weights, "shares": list(SHARES)}
                atomic_write_json(self.path, {**table, "rows": self._rows})
        return there


def _is_measured(row: object, budgets: int) -> bool:
    """Whether a row of the file is what `measure` gives."""
    if not isinstance(row, dict):
        return False
    keep, cores = row.get("keep"), row.get("cores", [0.0] * budgets)
    if not isinstance(keep, list) or not isinstance(cores, list):
        return False
    numbers = [row.get("difference"), *keep, *cores]
    plain = all(type(number) in (int, float) and 0 <= number < 1e6 for number in numbers)
    return plain and len(keep) == len(SHARES) and len(cores) == budgets
