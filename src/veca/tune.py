"""Measure weights on this machine with a user's own photos, and choose where on the dial to work.

Every photo is a round: each candidate (size, cores, keep, precision) runs on it once, in turns, and
is timed and compared with the reference there. The reference is the full pass (all cores, every
patch, float32) at the largest size tried; features of smaller images are enlarged bilinearly to its
grid before they are compared. What was measured is kept after each round, bound to the weights, the
machine and the bytes of the photos, so that a second run goes on where the first stopped.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from veca._util.extras import require
from veca._util.files import (
    atomic_write,
    atomic_write_json,
    check_fields,
    read_json,
    remove_leftovers,
)
from veca.bench import BenchPlan, take_turns
from veca.checks import check_budget, check_keep, check_model
from veca.embed.pipeline import checked_what, explained_out_of_memory
from veca.embed.sources import Sources, drawn
from veca.errors import InputError, SourceError, VecaError, at_least
from veca.images import check_size, preprocess
from veca.model import Veca, evaluating
from veca.points import OperatingPoint, machine_name
from veca.precision import check_precision, in_precision

__all__ = ["Candidate", "Measured", "Tuning", "Wish", "plot", "tune"]

SIZES = (256, 384, 512)
KEEPS = (1.0, 0.7, 0.5, 0.35)
TUNED_PRECISIONS = ("fp32", "bf16")
PHOTOS = 12
"""Rounds."""
LIMIT = 300.0
"""No new round after so many seconds."""
MEASUREMENTS = "measurements.json"
_FORMAT = "veca-tune-1"

Progress = Callable[[int, int, str], None]
"""Called with (runs done, runs in all, what is running)."""


class Candidate(NamedTuple):
    """A setting of all dials."""

    size: int
    cores: int
    keep: float
    precision: str

    def __str__(self) -> str:
        return f"{self.size} px, {self.cores} cores, keep {self.keep:g}, {self.precision}"


class Measured(NamedTuple):
    """A candidate over all photos."""

    candidate: Candidate
    ms: float
    """Median time of a batch."""
    images_per_s: float
    cls: float
    """Mean cosine with the reference's global embedding."""
    patches: float | None
    """Mean cosine of the patches; None where only cls was wanted."""

    @property
    def agreement(self) -> float:
        """The lower of the two cosines: what a wish is held to."""
        return self.cls if self.patches is None else min(self.cls, self.patches)

    def __str__(self) -> str:
        return (
            f"{self.candidate}: {self.ms:.3g} ms, {self.images_per_s:.3g} images/s, agreement "
            f"{self.agreement:.4f}"
        )


@dataclass(frozen=True)
class Wish:
    """What a point has to do. Among those that do it, the one that agrees best is chosen, or the
    fastest where only an agreement is asked for.
    """

    latency_ms: float | None = None
    """A batch takes at most so long."""
    throughput: float | None = None
    """Images a second, at least."""
    agreement: float | None = None
    """With the reference, 0 to 1, at least; CLS and patches."""

    def __post_init__(self) -> None:
        for name in ("latency_ms", "throughput"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{name} must be a number above 0, got {value!r}.")
        if self.agreement is not None and not 0 <= self.agreement <= 1:
            raise InputError(f"agreement must be from 0 to 1, got {self.agreement!r}.")

    def __bool__(self) -> bool:
        return any(x is not None for x in (self.latency_ms, self.throughput, self.agreement))

    def __str__(self) -> str:
        words = []
        if self.latency_ms is not None:
            words.append(f"takes at most {self.latency_ms:g} ms")
        if self.throughput is not None:
            words.append(f"makes {self.throughput:g} images/s")
        if self.agreement is not None:
            words.append(f"agrees {self.agreement:g}")
        return " and ".join(words)

    def missed_by(self, point: Measured) -> float:
        """The largest factor by which a point falls short of it; 0 where it does all."""
        short = [0.0]
        if self.latency_ms is not None:
            short.append(point.ms / self.latency_ms - 1)
        if self.throughput is not None:
            short.append(self.throughput / point.images_per_s - 1)
        if self.agreement is not None:
            # A tenth of the way to 1 weighs as much as a tenth of the time.
            short.append((self.agreement - point.agreement) / max(1e-6, 1 - point.agreement))
        return max(short)


@dataclass(frozen=True)
class Tuning:
    """What was measured, and where."""

    weights: str
    weights_sha256: str
    machine: str
    reference: Candidate
    points: tuple[Measured, ...]
    """Every candidate, the fastest first."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Photos, images a batch, threads, what was computed, and how many photos are smaller than the
    reference."""

    def pareto(self) -> list[Measured]:
        """Those that no other beats in time and agreement, the fastest first."""
        best, front = -1.0, []
        for point in sorted(self.points, key=lambda p: (p.ms, -p.agreement)):
            if point.agreement > best:
                best = point.agreement
                front.append(point)
        return front

    def choose(self, wish: Wish) -> OperatingPoint:
        """The point that does what is wished.

        Raises:
            InputError: none does; the nearest is named.
        """
        if not wish:
            raise InputError("a point is chosen by a latency, a throughput or an agreement.")
        good = [point for point in self.points if wish.missed_by(point) <= 0]
        if not good:
            nearest = min(self.points, key=wish.missed_by)
            raise InputError(f"no point that was tried {wish}; the nearest is {nearest}.")
        if wish.latency_ms is None and wish.throughput is None:
            return self.point(min(good, key=lambda p: (p.ms, -p.agreement)))
        return self.point(max(good, key=lambda p: (p.agreement, -p.ms)))

    def point(self, chosen: Measured) -> OperatingPoint:
        """One of the `points`, bound to the weights and the machine."""
        one = chosen.candidate
        patches = {} if chosen.patches is None else {"patches": chosen.patches}
        return OperatingPoint(
            weights=self.weights,
            weights_sha256=self.weights_sha256,
            machine=self.machine,
            size=one.size,
            cores=one.cores,
            keep=one.keep,
            precision=one.precision,
            measured={
                "ms": chosen.ms,
                "images_per_s": chosen.images_per_s,
                "cls": chosen.cls,
                **patches,
                "reference": str(self.reference),
                **self.conditions,
            },
        )


def tune(
    model: Veca,
    photos: Sources,
    out: str | os.PathLike[str],
    *,
    sizes: Sequence[int] = SIZES,
    cores: Sequence[int] | None = None,
    keep: Sequence[float] = KEEPS,
    precisions: Sequence[str] = TUNED_PRECISIONS,
    what: Sequence[str] = ("cls", "patches"),
    count: int = PHOTOS,
    batch_size: int = 1,
    limit: float = LIMIT,
    sha256: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Tuning:
    """Measure all candidates on `count` of the photos, in turns; run it again to go on.

    Args:
        model: on the device to measure; it is not changed.
        photos: files, folders, lists, patterns, as `veca.embed` takes them. Which of them are
            measured depends on their names alone.
        out: folder that keeps the measurements.
        cores: budgets; by default an eighth, a quarter, a half and all of the bank.
        precisions: "fp32", "bf16", "fp16" (GPUs), "int8" (CPUs).
        what: ("cls",) measures what the global embedding alone takes, as `veca embed` computes it.
        batch_size: how often each photo stands in a batch.
        limit: no new round after so many seconds; one is always made.
        sha256: the hash of the weights as stored, by default that of the model's tensors.
        overwrite: start over.

    Raises:
        SourceError: there are no photos, or none can be read.
        InputError: a candidate that cannot be, or `out` holds measurements of something else.
    """
    from veca.weights import weights_hash

    check_model(model, "tune")
    candidates = _candidates(model, sizes, cores, keep, precisions)
    reference = Candidate(max(sizes), model.config.num_cores, 1.0, "fp32")
    wanted = checked_what(what)
    records = _Records(
        Path(out).expanduser() / MEASUREMENTS,
        {
            "weights": sha256 or weights_hash(model),
            "machine": machine_name(model.device),
            "threads": torch.get_num_threads(),
            "batch_size": at_least("batch_size", batch_size),
            "what": ",".join(wanted),
            "reference": list(reference),
        },
        overwrite=overwrite,
    )
    runs = _Runs(model, wanted, batch_size, reference)
    count, chosen = at_least("count", count), drawn(photos)
    total, done, begun = count * len(candidates), 0, time.monotonic()
    used: list[str] = []
    small = 0
    with evaluating(model):
        for key, photo in chosen:
            found = records.round(key)
            missing = [one for one in candidates if one not in found]
            if missing and used and time.monotonic() - begun > limit:
                break
            try:
                images = runs.images(photo, {one.size for one in (*missing, reference)})
            except VecaError:
                continue  # what cannot be read is passed over, whoever reads it
            if missing:
                tell = _telling(progress, done, total)
                found |= runs.round(images, missing, tell)
                records.keep(key, found)
            done += len(candidates)
            used.append(key)
            small += min(photo.size) < reference.size
            if len(used) == count:
                break
    if not used:
        raise SourceError(f"none of {photos} could be read as an image; give photos to measure on.")
    rounds = [records.round(key) for key in used]
    points = [_summary(one, [found[one] for found in rounds], batch_size) for one in candidates]
    return Tuning(
        weights=model.name or "veca",
        weights_sha256=str(records.about["weights"]),
        machine=str(records.about["machine"]),
        reference=reference,
        points=tuple(sorted(points, key=lambda point: point.ms)),
        conditions={
            "photos": len(used),
            "enlarged": small,
            "batch_size": batch_size,
            "threads": records.about["threads"],
            "what": records.about["what"],
        },
    )


def _candidates(
    model: Veca,
    sizes: Sequence[int],
    cores: Sequence[int] | None,
    keep: Sequence[float],
    precisions: Sequence[str],
) -> list[Candidate]:
    bank = model.config.num_cores
    for name, values in (("sizes", sizes), ("keep", keep), ("precisions", precisions)):
        if not values:
            raise InputError(f"{name} is empty; give at least one.")
    for size in sizes:
        check_size(size, model.config.patch_size)
    precisions = [check_precision(precision) for precision in precisions]
    if "int8" in precisions and model.device.type != "cpu":
        raise InputError(f"int8 is for CPUs, and this model is on {model.device}; leave it out.")
    budgets = sorted({-(-bank // part) for part in (8, 4, 2, 1)}) if cores is None else cores
    budgets = [check_budget(budget, bank) for budget in budgets]
    shares = [check_keep(share) for share in keep]
    tried = itertools.product(sizes, budgets, shares, precisions)
    return list(dict.fromkeys(Candidate(*one) for one in tried))


class _Runs:
    """Runs candidates on a photo."""

    def __init__(
        self, model: Veca, what: Sequence[str], batch_size: int, reference: Candidate
    ) -> None:
        plain = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
        self._models = {"fp32": plain}
        self._what, self._batch, self._reference = tuple(what), batch_size, reference
        self._config = model.config
        self.device = model.device
        self._plan = BenchPlan(device=str(model.device), repeats=1, seconds=0.0)
        self._warm: set[tuple[Candidate, tuple[int, ...]]] = set()

    def images(self, photo: Image.Image, sizes: set[int]) -> dict[int, Tensor]:
        """[batch, 3, H, W] of a photo at each size."""
        found = {}
        for size in sizes:
            pixels = preprocess(photo, size, model=self._config).pixels
            found[size] = pixels.to(self.device).expand(self._batch, -1, -1, -1).contiguous()
        return found

    @torch.inference_mode()
    def round(
        self,
        images: Mapping[int, Tensor],
        candidates: Sequence[Candidate],
        tell: Callable[[str], None],
    ) -> dict[Candidate, dict[str, float | None]]:
        """Time of each candidate in ms, and its cosines with the reference."""
        wanted = self._features(self._reference, images)
        found: dict[Candidate, dict[str, float | None]] = {}
        for one in candidates:
            tell(str(one))
            inputs = images[one.size].to(self._model(one.precision).dtype)
            shape = (one, tuple(inputs.shape))

            def call(one: Candidate = one, inputs: Tensor = inputs) -> object:
                return self._run(one, inputs)

            with explained_out_of_memory(f"out of memory at {one}; try smaller --sizes."):
                # A first run at a shape pays for what later ones find ready.
                taken = take_turns({"": call}, self._plan, warm_up=shape not in self._warm)[""]
                self._warm.add(shape)
                cls, patches = self._compared(self._features(one, images), wanted)
            found[one] = {"ms": taken[0], "cls": cls, "patches": patches}
        return found

    def _model(self, precision: str) -> Veca:
        if precision not in self._models:
            self._models[precision] = in_precision(copy.deepcopy(self._models["fp32"]), precision)
        return self._models[precision]

    def _run(self, one: Candidate, inputs: Tensor) -> Any:
        model = self._model(one.precision)
        if self._what == ("cls",):
            return model.cores_only(inputs, one.cores, one.keep, first=1)
        return model(inputs, cores=one.cores, keep=one.keep)

    def _features(
        self, one: Candidate, images: Mapping[int, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        out = self._run(one, images[one.size][:1].to(self._model(one.precision).dtype))
        patches = None if self._what == ("cls",) else out.feature_map().float()
        return out.cls.float(), patches

    @staticmethod
    def _compared(
        found: tuple[Tensor, Tensor | None], wanted: tuple[Tensor, Tensor | None]
    ) -> tuple[float, float | None]:
        cls = F.cosine_similarity(found[0], wanted[0]).item()
        if found[1] is None or wanted[1] is None:
            return cls, None
        patches = found[1]
        if patches.shape != wanted[1].shape:
            grid = tuple(wanted[1].shape[-2:])
            patches = F.interpolate(patches, grid, mode="bilinear", align_corners=False)
        return cls, F.cosine_similarity(patches, wanted[1], dim=1).mean().item()


class _Records:
    """Measurements on the disk: by photo, then by candidate."""

    def __init__(self, path: Path, about: dict[str, Any], *, overwrite: bool) -> None:
        self.path, self.about = path, about
        self._rounds: dict[str, dict[str, dict[str, float | None]]] = {}
        remove_leftovers(path.parent.glob(".*.tmp"))
        if overwrite or not path.exists():
            return
        stored = read_json(path, InputError)
        check_fields(stored, {"format": str, "about": dict, "rounds": dict}, path, InputError)
        there = stored["about"]
        other = [name for name, value in about.items() if there.get(name) != value]
        if stored["format"] != _FORMAT or other:
            name = other[0] if other else "format"
            raise InputError(
                f"{path} has measurements of other {name} ({there.get(name)}, now "
                f"{about.get(name)}); choose another --out, or --overwrite them."
            )
        self._rounds = stored["rounds"]
        for photo in self._rounds:
            self.round(photo)  # what is odd is told before anything is measured

    def round(self, photo: str) -> dict[Candidate, dict[str, float | None]]:
        """What is known of a photo."""
        rows = self._rounds.get(photo, {})
        try:
            return {_parsed(text): _checked(row) for text, row in rows.items()}
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
            raise InputError(
                f"{self.path}: rounds.{photo} holds no measurements; remove that file, or choose "
                "another --out."
            ) from error

    def keep(self, photo: str, found: Mapping[Candidate, dict[str, float | None]]) -> None:
        """Note a round; it is on the disk, whole, when this returns."""
        self._rounds[photo] = {
            "/".join(map(str, one)): {name: row[name] for name in ("ms", "cls", "patches")}
            for one, row in found.items()
        }
        table = {"format": _FORMAT, "about": self.about, "rounds": self._rounds}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(self.path, table)


def _parsed(text: str) -> Candidate:
    """A candidate, from its name in the file."""
    size, cores, keep, precision = text.split("/")
    return Candidate(int(size), int(cores), float(keep), precision)


def _checked(row: Mapping[str, Any]) -> dict[str, float | None]:
    """What was measured of a candidate; ValueError and the like if it cannot have been."""
    found = {name: float(row[name]) for name in ("ms", "cls")}
    patches = row["patches"]
    if not 0 < found["ms"] < math.inf or not -2 < found["cls"] < 2:
        raise ValueError
    return {**found, "patches": None if patches is None else float(patches)}


def _summary(
    one: Candidate, rows: Sequence[Mapping[str, float | None]], batch_size: int
) -> Measured:
    def values(name: str) -> list[float]:
        return [float(row[name]) for row in rows if row[name] is not None]  # type: ignore[arg-type]

    ms, patches = statistics.median(values("ms")), values("patches")
    return Measured(
        one,
        ms,
        1000 * batch_size / ms,
        statistics.fmean(values("cls")),
        statistics.fmean(patches) if patches else None,
    )


def _telling(progress: Progress | None, done: int, total: int) -> Callable[[str], None]:
    numbers = itertools.count(done)
    return (lambda text: progress(next(numbers), total, text)) if progress else lambda text: None


def plot(
    path: str | os.PathLike[str], tuning: Tuning, chosen: OperatingPoint | None = None
) -> None:
    """Draw agreement against time as a PNG: every candidate, the front, and the chosen point.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib.figure", "the plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axis = figure.subplots()
    marks = dict(zip(sorted({p.candidate.size for p in tuning.points}), "o^sDvPX*", strict=False))
    for size, mark in marks.items():
        here = [point for point in tuning.points if point.candidate.size == size]
        axis.scatter(
            [p.ms for p in here],
            [p.agreement for p in here],
            s=22,
            c="#9aa5b1",
            marker=mark,
            label=f"{size} px",
        )
    front = tuning.pareto()
    axis.step(
        [p.ms for p in front],
        [p.agreement for p in front],
        where="post",
        color="#0072B2",
        label="nothing is better",
    )
    if chosen is not None:
        measured = chosen.measured
        level = min(measured["cls"], measured.get("patches", 1.0))
        axis.scatter(
            [measured["ms"]], [level], s=90, c="#D55E00", marker="*", label="chosen", zorder=3
        )
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.minorticks_off()
    batch = tuning.conditions["batch_size"]
    axis.set_xlabel(f"time per {'image' if batch == 1 else f'batch of {batch}'} (ms)")
    axis.set_ylabel("agreement with the full pass")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    axis.set_title(f"{tuning.weights} on {tuning.machine}", fontsize=10)
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
