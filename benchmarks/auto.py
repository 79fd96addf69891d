"""keep="auto" and cores="auto" beside the best fixed share or budget, and beside an oracle.

    python -m benchmarks auto --photos SQUARES
    python -m benchmarks auto --held-out

For the shipped weights and each promise, on photos that calibrated nothing: on how many it is kept,
and what it takes. Fixed: the least share of tokens (or budget) for all photos that keeps the
promise on 95 of 100 of these very photos, so chosen in hindsight. Oracle: of each photo the least
that keeps it. Work is operations over those of the full pass. Losses at shares between the measured
ones are interpolated, as `veca calibrate` does.

Time, over that of the full pass: on the first `--timed` photos, float32, one core, in turns, each
the least of `--rounds` in processor seconds, which others on the machine disturb little; one by
one, and in batches of `--batch`. With the oracle's shares given, images of a batch are grouped as
"auto" groups them. Writes results/auto.csv. `python -m research.elastic photos` makes such folders.
`--measured` keeps what was measured of each photo, so that a run that was stopped goes on.

`--held-out` measures nothing: it writes results/calibration.csv from what `veca calibrate` noted in
the shipped calibrations, how promises are kept on photos that were held out of the fit, a fifth at
a time.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import veca
from benchmarks.common import print_table, write_csv
from benchmarks.rows import RESULTS, write_rows
from veca import calibrate as library
from veca.bench import DTYPES
from veca.calibrate import Measurements, Records, budgets
from veca.content import KEPT, Calibration, Floats
from veca.cost import cost
from veca.embed.sources import drawn
from veca.model import Veca

PROMISES = (0.97, 0.98, 0.99)


@torch.inference_mode()
def with_shares(model: Veca, images: Tensor, shares: Sequence[float]) -> None:
    """The pass with a share for each image; those of one share together."""
    for share in sorted(set(shares)):
        some = [i for i, own in enumerate(shares) if own == share]
        model(images[some] if len(some) < len(images) else images, keep=share)


@torch.inference_mode()
def times(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Processor seconds of each call: the least of the rounds, in turns."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            least[name] = min(least[name], time.process_time() - begin)
    return least


def timed(
    model: Veca,
    images: Tensor,
    fixed: Sequence[float],
    oracle: Sequence[Floats],
    batch: int,
    rounds: int,
) -> dict[str, float]:
    """Of all ways at all promises: time over that of the full pass, summed over the images."""
    sums: dict[str, float] = {}
    for start in range(0, len(images) - batch + 1, batch):
        part = images[start : start + batch]
        calls: dict[str, Callable[[], object]] = {"full": partial(model, part)}
        for i, promise in enumerate(PROMISES):
            shares = oracle[i][start : start + batch].tolist()
            calls[f"fixed {promise}"] = partial(model, part, keep=fixed[i])
            calls[f"auto {promise}"] = partial(model, part, keep="auto", agreement=promise)
            calls[f"oracle {promise}"] = partial(with_shares, model, part, shares)
        for name, seconds in times(calls, rounds).items():
            sums[name] = sums.get(name, 0.0) + seconds
    return {name: seconds / sums["full"] for name, seconds in sums.items()}


def shares_rows(
    name: str,
    model: Veca,
    size: int,
    found: Measurements,
    images: Sequence[Tensor],
    options: argparse.Namespace,
) -> list[dict[str, object]]:
    calibration: Calibration = model.calibration
    side = size // model.config.patch_size
    differences = torch.from_numpy(found.differences)
    checks = []
    for promise in PROMISES:
        chosen = np.array(calibration.shares(differences, (side, side), promise))
        budget = calibration.budget((side, side), promise, model.config.num_cores)
        checks.append(library.compared(model, size, found, chosen, promise, budget))
    losses = found.losses()
    least = [library.best_shares(losses, 1 - promise) for promise in PROMISES]
    fixed = [check.fixed_keep for check in checks]
    by_batch = {
        batch: timed(model, torch.stack(list(images)), fixed, least, batch, options.rounds)
        for batch in (1, options.batch)
        if images
    }
    rows = []
    for promise, check in zip(PROMISES, checks, strict=True):
        row: dict[str, object] = {
            "set": f"{name} {size}",
            "weights": name,
            "size": size,
            "dial": "keep",
            "promise": promise,
            "photos": check.photos,
            "losses in": options.precision,
            "kept": check.kept,
            "mean": check.keep,
            "work": check.work,
            "fixed": check.fixed_keep,
            "fixed work": check.fixed_work,
            "oracle work": check.oracle_work,
            "timed": len(images),
        }
        for where, batch in (("alone", 1), ("in batches", options.batch)):
            for way in ("auto", "fixed", "oracle"):
                row[f"{way} time {where}"] = by_batch.get(batch, {}).get(f"{way} {promise}", "")
        rows.append(row)
    return rows


def cores_rows(
    name: str, model: Veca, size: int, found: Measurements, precision: str
) -> list[dict[str, object]]:
    """The budget of the table, beside hindsight and an oracle, counted in operations."""
    c = model.config
    bank = [*library.budgets(model), c.num_cores]
    losses = np.concatenate([found.by_budget, np.zeros((len(found.by_budget), 1))], axis=1)
    full = cost(c, size).veca.flops
    work = np.array([cost(c, size, budget).veca.flops / full for budget in bank])
    side = size // c.patch_size
    rows = []
    for promise in PROMISES:
        kept = losses <= 1 - promise
        kept = np.flip(np.logical_and.accumulate(np.flip(kept, 1), axis=1), 1)
        least = kept.argmax(axis=1)
        fixed = int(np.quantile(least, KEPT, method="inverted_cdf"))
        budget = model.calibration.budget((side, side), promise, c.num_cores)
        place = bank.index(budget)
        rows.append(
            {
                "set": f"{name} {size}",
                "weights": name,
                "size": size,
                "dial": "cores",
                "promise": promise,
                "photos": len(losses),
                "losses in": precision,
                "kept": float(kept[:, place].mean()),
                "mean": budget,
                "work": float(work[place]),
                "fixed": bank[fixed],
                "fixed work": float(work[fixed]),
                "oracle work": float(work[least].mean()),
            }
        )
    return rows


def held_out(names: Sequence[str], out: Path) -> None:
    """What the calibrations of weights say of photos that were held out."""
    rows: list[dict[str, object]] = []
    for name in names:
        calibration = veca.load(name).calibration
        facts = {k: calibration.about[k] for k in ("precision", "cpu", "torch", "veca", "date")}
        for row in calibration.about["held_out"]:
            rows.append({"weights": name, **row, **facts})
    write_rows(out / "calibration.csv", rows)
    print_table(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--photos", type=Path, nargs="+", help="folders of squares")
    parser.add_argument("--weights", nargs="+", default=["tiny", "small"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[512])
    parser.add_argument("--limit", type=int, default=150, help="photos")
    parser.add_argument("--cores", type=int, default=40, help="of them for budgets")
    parser.add_argument("--timed", type=int, default=24, help="of them for the times; may be 0")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=DTYPES, default="float32", help="for the losses")
    parser.add_argument("--measured", type=Path, help="folder that keeps what was measured")
    parser.add_argument("--held-out", action="store_true", help="from the calibrations alone")
    parser.add_argument("--out", type=Path, default=RESULTS)


def run(options: argparse.Namespace) -> int:
    if options.held_out:
        held_out(options.weights, options.out)
        return 0
    if not options.photos:
        print("nothing to measure: give --photos.")
        return 2
    torch.set_num_threads(1)
    for name, size in itertools.product(options.weights, options.sizes):
        model = veca.load(name)
        measuring = veca.load(name, dtype=DTYPES[options.precision])
        place = None
        if options.measured is not None:
            place = options.measured / f"{name}.json"
        number = len(budgets(model))
        records = Records(place, model.calibration.weights_sha256, number)
        found, images = [], []
        for i, (key, photo) in enumerate(itertools.islice(drawn(options.photos), options.limit)):
            found.append(records.row(measuring, key, photo, size, i < options.cores))
            if i < options.timed:
                images.append(model.transform(size)(photo))
        measured = library.as_measurements(found)
        rows = shares_rows(name, model, size, measured, images, options)
        rows += cores_rows(name, model, size, measured, options.precision)
        write_csv("auto", rows, options.out, device="cpu", key="set")
        print_table(rows)
    return 0
