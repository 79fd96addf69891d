"""What choosing the share of tokens by content saves, by predictor and rule of choice.

    python -m research.choosing FOLDER/content_tiny_512.npz

Reads what `python -m research.content measure` found of each photo, leaves out those of the folder
"benchmark", and asks, with each photo held out: how many keep the promise, and how much is saved of
what an oracle saves beside the best fixed share? That share is the least with which 95 of 100 of
these very photos keep it; the oracle knows the least of each. Losses are predicted by ridge on
logarithms. What is chosen keeps the promise, on the photos that choose, either on 95 of 100, or on
so many more that 95 of 100 unseen ones keep it at a confidence of 90 % ("bound"):

- "margin": the least share whose predicted loss, with one margin for all, keeps the promise;
- "price": the share that costs least in work and expected breaks;
- "second", "third": the margin, chosen after one or two steps of merging by .4;
- "threshold": no prediction; each step merges all windows below a threshold, the same for all.

Writes results/choosing.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

import veca
from benchmarks.common import print_table
from benchmarks.rows import write_rows
from research import RESULTS
from veca.calibrate import best_shares, most_of, work_of
from veca.content import KEPT, LADDER, LEAST_DIFFERENCE, Floats

PROMISES = (0.97, 0.98, 0.99)
RUNGS = np.array(LADDER[:-1])
QUANTILES = (0.05, 0.15, 0.25, 0.35, 0.5, 0.65, 0.75, 0.85, 0.95)
FEW = (0.1, 0.3, 0.5, 0.7, 0.9)
FOLDS, DRAWS = 5, 4
PREDICTORS: dict[str, tuple[tuple[str, ...], float]] = {
    "mean": (("mean",), 0.001),
    "quantiles": (("mean", "quantiles"), 0.1),
    "quantiles, edges, looks, lengths": (
        ("mean", "quantiles", "edges", "looks", "weighted", "lengths"),
        0.1,
    ),
    "CLS, mean patch": (("mean", "cls", "patches"), 1.0),
    "all of these": (
        ("mean", "quantiles", "edges", "looks", "weighted", "lengths", "cls", "patches"),
        0.7,
    ),
    "quantiles, next block": (("mean", "quantiles", "weighted", "next"), 0.2),
}
"""What is known of a photo, and the strength of the ridge."""


def features(found: Mapping[str, Any], step: str) -> dict[str, Floats]:
    """What tells, at "first", "second" or "third", each [photos, numbers]."""

    def wide(name: str) -> Floats:
        return np.asarray(found[f"{step} {name}"], dtype=np.float64)

    def logs(x: Floats) -> Floats:
        return np.asarray(np.log(np.maximum(x, 1e-6)))

    def quantiles(x: Floats, at: Sequence[float]) -> Floats:
        return logs(np.nanquantile(x, at, axis=1).T)

    scores = wide("scores")
    scores = np.where(scores < 0, np.nan, scores)  # windows that have merged
    known = np.nan_to_num(scores)
    by_look = [wide(name) * scores.shape[1] for name in ("cls looks", "cores look")]
    mean = np.log(np.nanmean(scores, axis=1, keepdims=True) + LEAST_DIFFERENCE)
    return {
        "mean": mean,
        "quantiles": quantiles(scores, QUANTILES),
        "looks": np.concatenate([quantiles(x, FEW) for x in by_look], axis=1),
        "weighted": np.stack([logs((known * x).mean(axis=1)) for x in by_look], axis=1),
        "lengths": quantiles(wide("lengths"), FEW),
        "edges": quantiles(np.asarray(found["edges"], dtype=np.float64), QUANTILES),
        "cls": wide("cls"),
        "patches": wide("patches"),
        "next": logs(np.asarray(found["plain next"], dtype=np.float64).reshape(len(mean), -1)),
    }


def ridge(x: Floats, y: Floats, other: Floats, strength: float) -> Floats:
    """What is predicted of `other`."""
    mean, scale = x.mean(axis=0), x.std(axis=0) + 1e-6
    a, b = (x - mean) / scale, (other - mean) / scale
    inner = a.T @ a + strength * len(a) * np.eye(a.shape[1])
    return np.asarray(b @ np.linalg.solve(inner, a.T @ (y - y.mean(axis=0))) + y.mean(axis=0))


def held_out(x: Floats, y: Floats, strength: float, folds: int = 10) -> Floats:
    """Of each photo what the others predict."""
    part, out = np.arange(len(x)) % folds, np.zeros_like(y)
    for i in range(folds):
        out[part == i] = ridge(x[part != i], y[part != i], x[part == i], strength)
    return out


def with_margin(bounds: Floats, logs: Floats, allowed: float) -> Any:
    """Of each photo the place of the least share that keeps a loss, as all larger do; else last."""
    kept = np.pad(bounds <= allowed, ((0, 0), (0, logs.shape[1] - bounds.shape[1])))
    kept[:, -1] = True
    kept = np.flip(np.logical_and.accumulate(np.flip(kept, 1), axis=1), 1)
    return kept.argmax(axis=1)


def trial(
    x: Floats, logs: Floats, work: Floats, promise: float, strength: float, way: str, bound: bool
) -> tuple[float, float]:
    """How many of the photos that were held out keep it, and the work they take.

    Args:
        logs: [photos, shares] logarithms of losses; the last share is taken where none will do.
        work: the same shape.
    """
    allowed, n = np.log(1 - promise), len(x)
    kept, taken = [], []
    for draw in range(DRAWS):
        order = np.random.default_rng(draw).permutation(n)
        for fold in range(FOLDS):
            out = order[fold::FOLDS]
            own = np.setdiff1d(order, out)
            need = most_of(len(own)) if bound else int(np.ceil(KEPT * len(own)))
            inner = held_out(x[own], logs[own], strength)
            outer = ridge(x[own], logs[own], x[out], strength)
            spread = (logs[own] - inner).std(axis=0) + 1e-9

            def choose(
                predicted: Floats, dial: float, spread: Floats = spread, photos: Any = None
            ) -> Any:
                if way == "margin":
                    return with_margin(predicted + dial, predicted, allowed)
                breaks = 1 - norm.cdf((allowed - predicted) / spread)
                breaks[:, -1] = 0 if work[0, -1] == 1 else breaks[:, -1]
                return (work[photos] + dial * breaks).argmin(axis=1)

            dials = np.arange(-1, 6, 0.02) if way == "margin" else np.geomspace(0.01, 50, 300)
            for dial in dials:
                chosen = choose(inner, float(dial), photos=own)
                if (logs[own, chosen] <= allowed).sum() >= need:
                    break
            chosen = choose(outer, float(dial), photos=out)
            kept += (logs[out, chosen] <= allowed).tolist()
            taken += work[out, chosen].tolist()
    return float(np.mean(kept)), float(np.mean(taken))


def by_rung(losses: Floats, shares: Floats, work: Floats, most: float) -> tuple[Floats, Floats]:
    """Logarithms of losses and the work at each rung up to `most`: [photos, rungs] both."""
    rungs = RUNGS[most + 1e-9 >= RUNGS]
    logs = np.log(np.maximum(losses.max(axis=2), 1e-9))
    measured = shares[: logs.shape[1]]
    return (
        np.stack([np.interp(rungs, measured, row) for row in logs]),
        np.stack([np.interp(rungs, measured, row) for row in work]),
    )


def linear_work(found: Mapping[str, Any], at_shares: Floats) -> Any:
    """Work by the tokens left after each of the four steps: fitted to the shares', exactly."""

    def parts(left: Floats) -> Floats:
        mean = 2 * left[..., :3].sum(axis=-1) + 4 * left[..., 3]
        return np.stack([np.ones(left.shape[:-1]), mean, left[..., 3]], axis=-1)

    plain = np.asarray(found["plain left"], dtype=np.float64)[0]
    weights = np.linalg.lstsq(parts(plain), at_shares, rcond=None)[0]
    return lambda name: parts(np.asarray(found[f"{name} left"], dtype=np.float64)) @ weights


def rows_of(path: Path, name: str, size: int) -> list[dict[str, object]]:
    stored = np.load(path)
    some = stored["set"] != "benchmark"
    found: dict[str, Any] = {
        key: stored[key] if key in ("shares", "thresholds") else stored[key][some] for key in stored
    }
    n, shares = int(some.sum()), found["shares"]
    work = work_of(veca.load(name), size)
    work_at = linear_work(found, np.interp(shares, LADDER, work))
    tells = {step: features(found, step) for step in ("first", "second", "third")}
    plain, cost = by_rung(found["plain losses"], shares, work_at("plain"), 1)
    plain = np.concatenate([plain, np.full((n, 1), -20.0)], axis=1)
    cost = np.concatenate([cost, np.ones((n, 1))], axis=1)
    options = {"margin": (plain, cost), "price": (plain, cost)}
    for step, most in (("second", 0.85), ("third", 0.7)):
        options[step] = by_rung(found[f"{step} losses"], shares, work_at(step), most)
    rows: list[dict[str, object]] = []
    for promise in PROMISES:
        least = best_shares(np.exp(plain), 1 - promise)
        places = np.searchsorted(LADDER, least - 1e-9)
        fixed = np.quantile(least, KEPT, method="inverted_cdf")
        fixed_work = float(work[np.searchsorted(LADDER, fixed - 1e-9)])
        oracle = float(work[places].mean())
        about = {"weights": name, "size": size, "promise": promise, "photos": n}
        about |= {"fixed": float(fixed), "fixed work": fixed_work, "oracle work": oracle}

        def row(
            way: str, tell: str, bound: bool, kept: float, taken: float, about: Any = about
        ) -> dict[str, object]:
            saved = (about["fixed work"] - taken) / (about["fixed work"] - about["oracle work"])
            facts = {"choice": way, "tells": tell, "allows for": "bound" if bound else "95 of 100"}
            return {**about, **facts, "kept": kept, "work": taken, "saved of oracle": saved}

        for bound in (False, True):
            for way, (logs, work_each) in options.items():
                step = way if way in tells else "first"
                rule = "margin" if way in tells else way
                for tell, (parts, strength) in PREDICTORS.items():
                    if step != "first" and (tell not in ("mean", "all of these")):
                        continue
                    x = np.concatenate([tells[step][part] for part in parts], axis=1)
                    got = trial(x, logs, work_each, promise, strength, rule, bound)
                    rows.append(row(way, tell, bound, *got))
        rows.append(row("threshold", "", False, *at_threshold(found, work_at, promise)))
    return rows


def at_threshold(found: Mapping[str, Any], work_at: Any, promise: float) -> tuple[float, float]:
    """Between the two thresholds on both sides of 95 of 100."""
    lost = np.asarray(found["threshold losses"]).max(axis=2)
    kept, work = (lost <= 1 - promise).mean(axis=0), work_at("threshold").mean(axis=0)
    order = np.argsort(kept)
    return KEPT, float(np.interp(KEPT, kept[order], work[order]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("found", type=Path, nargs="+", help="content_WEIGHTS_SIZE.npz")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for path in options.found:
        _, name, size = path.stem.split("_")
        rows += rows_of(path, name, int(size))
    write_rows(options.out / "choosing.csv", rows)
    print_table(rows)


if __name__ == "__main__":
    main()
