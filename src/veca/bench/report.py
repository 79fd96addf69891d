"""What the rows of a benchmark say: how time grows, on which machine, as a table and a plot."""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from veca._util.extras import require
from veca._util.files import atomic_write
from veca._util.machine import Machine
from veca.bench.measure import DENSE, BenchRow
from veca.errors import InputError


def scaling_exponent(
    rows: Sequence[BenchRow], sizes: Sequence[int] | None = None, *, of: str = "ms"
) -> float:
    """The p for which time grows as N^p, N being the number of patches.

    The least-squares slope of log(`of`) against log(N) over the rows of one contender, or those
    at the given sizes; NaN with fewer than two sizes. `of` may also be "peak_mib".
    """
    labels = sorted({row.label for row in rows})
    if len(labels) > 1:
        raise InputError(f"an exponent is of one contender, got rows of {', '.join(labels)}.")
    points = [
        # N is size^2 up to a factor, which moves the line but not its slope.
        (2 * math.log(row.size), math.log(getattr(row, of)))
        for row in rows
        if (sizes is None or row.size in sizes) and getattr(row, of) > 0
    ]
    if len({x for x, _ in points}) < 2:
        return math.nan
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def scaling_sizes(rows: Sequence[BenchRow]) -> list[int]:
    """The sizes over which to speak of growth: from 512 px, where there are two such.

    In smaller images the work that does not depend on their size still shows.
    """
    sizes = sorted({row.size for row in rows})
    large = [size for size in sizes if size >= 512]
    return large if len(large) > 1 else sizes


def by_contender(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    """The rows of each contender, under its label, in order of size."""
    groups: dict[str, list[BenchRow]] = {}
    for row in sorted(rows, key=lambda row: row.size):
        groups.setdefault(row.label, []).append(row)
    return {label: groups[label] for label in dict.fromkeys(row.label for row in rows)}


def precisions(rows: Sequence[BenchRow]) -> str:
    """What rows were computed in, each once: for a title."""
    return ", ".join(dict.fromkeys(row.precision or row.dtype for row in rows))


def write_csv(path: str | Path, rows: Sequence[BenchRow], where: Machine) -> None:
    """One line a row, the machine's facts as further columns; NaN and None are empty cells."""
    names = [field.name for field in (*fields(BenchRow), *fields(Machine))]
    with atomic_write(path, "w") as file:
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow({k: _cell(v) for k, v in {**asdict(row), **asdict(where)}.items()})


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return "" if value is None else value


# Okabe and Ito's colours, told apart with any kind of colour vision; markers differ as well.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_MARKERS = ("o", "^", "D", "v", "P", "X", "*")


def plot(path: str | Path, rows: Sequence[BenchRow], where: Machine) -> None:
    """Draw time and memory against size as a PNG, both on logarithmic axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib.figure", "the plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    others, yardsticks = 0, iter(itertools.cycle(("--", ":", "-.")))
    for label, group in by_contender(rows).items():
        dense = group[0].model == DENSE
        style: dict[str, Any] = {"color": "black", "marker": "s"}
        if dense:
            style["linestyle"] = next(yardsticks)
        else:
            style = {
                "color": _COLOURS[others % len(_COLOURS)],
                "marker": _MARKERS[others % len(_MARKERS)],
            }
            others += 1
        for axis, field in ((left, "ms"), (right, "peak_mib")):
            exponent = scaling_exponent(group, scaling_sizes(rows), of=field)
            growth = "" if math.isnan(exponent) else f"  ~ N^{exponent:.2f}"
            values = [getattr(row, field) for row in group]
            axis.plot([row.size for row in group], values, label=label + growth, **style)
    sizes = sorted({row.size for row in rows})
    batch = "image" if rows[0].batch == 1 else f"batch of {rows[0].batch}"
    left.set_ylabel(f"time per {batch} (ms)")
    right.set_ylabel("peak of live tensor memory (MiB)")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("image side (pixels)")
        axis.set_xticks(sizes, labels=[str(size) for size in sizes])
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)
    threads = "" if where.gpu else f", {rows[0].threads} thread{'s' * (rows[0].threads != 1)}"
    device = where.gpu or where.cpu
    figure.suptitle(f"{rows[0].network}, {precisions(rows)}, {device}{threads}", fontsize=11)
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=150)
