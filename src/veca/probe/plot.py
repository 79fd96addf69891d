"""Accuracy against compute: the score at every budget, over interactions and over measured time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from veca._util.extras import require
from veca._util.files import atomic_write
from veca.probe.record import Row, Run
from veca.probe.table import metric_title, ordered, show_metric

# Okabe and Ito's colours, told apart with any kind of colour vision.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")

_COSTS = (("interactions", "interactions in one layer"), ("ms", "ms for one image, measured"))
"""What the score is drawn against, where it is known."""


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each network and size, by budget, under a name for the legend."""
    sizes = {row.size for row in rows}
    groups: dict[str, list[Row]] = {}
    for row in ordered(rows):
        size = f", {row.size} px" if len(sizes) > 1 else ""
        groups.setdefault(f"{row.name}{size}", []).append(row)
    return groups


def plot(path: str | Path, runs: Sequence[Run], title: str | None = None) -> Path:
    """Draw runs of one task, dataset and protocol as a PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    picture = draw(runs, title)
    with atomic_write(path, "wb") as file:
        file.write(picture)
    return Path(path)


def draw(runs: Sequence[Run], title: str | None = None) -> bytes:
    """The same picture as the bytes of a PNG file."""
    figures = require("matplotlib.figure", "the plot")
    ticker = require("matplotlib.ticker", "the plot")
    run = runs[0]
    rows = [row for one in runs for row in one.rows]
    metric = run.metric
    scale = 1.0 if metric == "rmse" else 100.0
    panels = [(cost, text) for cost, text in _COSTS if any(getattr(row, cost) for row in rows)]
    panels = panels or [("", "")]  # levels alone, which nothing is drawn against
    figure = figures.Figure(figsize=(5 * len(panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (cost, text) in zip(axes, panels, strict=True):
        drawn = []
        for number, (label, group) in enumerate(curves(rows).items()):
            style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)]}
            if group[0].role == "teacher":
                style = {"color": "black"}
            known = [row for row in group if getattr(row, cost, None)]
            points = [(getattr(row, cost), scale * row.metrics[metric]) for row in known]
            if group[0].cores is None:
                # A network without budgets is a level to compare with, wherever it lies.
                score = scale * group[0].metrics[metric]
                axis.axhline(score, linestyle="--", linewidth=1, label=label, **style)
                axis.plot(*zip(*points, strict=True), "s", **style) if points else None
            elif points:
                axis.plot(*zip(*points, strict=True), "o-", label=label, **style)
                for row, point in zip(known, points, strict=True):
                    axis.annotate(
                        f"{row.cores}", point, (0, 5), textcoords="offset points", fontsize=7
                    )
            drawn += [x for x, _ in points]
        if drawn:
            axis.set_xscale("log")
            axis.minorticks_off()
            axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        else:
            axis.set_xticks([])
        axis.set_xlabel(text)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(
        metric_title(metric) + ("" if run.higher_is_better else " (lower is better)")
    )
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(fontsize=8)
    figure.suptitle(title or run.title, fontsize=11)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def best_text(run: Run) -> str:
    """The best row in words, for a line on the terminal."""
    rows = sorted(run.rows, key=lambda row: run.score(row), reverse=run.higher_is_better)
    score = show_metric(run.metric, run.score(rows[0]))
    return f"best: {rows[0].label}, {metric_title(run.metric)} {score}"
