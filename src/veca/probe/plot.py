"""Accuracy against compute, with 95 % intervals: the score at every budget, over interactions and
over measured time, and each budget's retention of the full one's.

The axes do not make noise look like a difference: see `limits`.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from veca._util.extras import require
from veca._util.files import atomic_write
from veca.probe.intervals import Interval
from veca.probe.record import Row, Run, label_of
from veca.probe.table import is_percent, metric_title, ordered, show_metric

# Okabe and Ito's colours, told apart with any kind of colour vision.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_LINE = 80  # characters of a note below one panel
_INK, _PALE = "#30343b", "#e3e5e8"

_WIDTHS = 2.5
"""An axis is at least so many times as high as a typical interval is wide."""
_LEAST, _LEAST_UNKNOWN = 0.02, 0.1
"""How much an axis shows at least: a share of the whole for percentages, of the largest value for
errors. More where noise is not known."""

BARS = "Bands and bars: 95 % intervals of the test images."
PAIRED = (
    "Retention of the full budget has narrower intervals: the same draws count for both, and "
    "chance that moves both alike drops out."
)
SOME_WITHOUT = "Some rows come from records without intervals."
WITHOUT = (
    "These records hold no intervals, so small differences may be chance. A new run of "
    "`veca probe` draws them, but for a perfect score, which has none."
)


@dataclass(frozen=True)
class _Chart:
    """One panel: what is drawn, against what."""

    name: str
    x: Callable[[Row], float | None]
    x_title: str
    y: Callable[[Row], float | None]
    y_title: str
    interval: Callable[[Row], Interval | None]
    limits: tuple[float, float]
    budgets: bool = False
    """Budgets are the x axis; otherwise a cost is, and points are labelled with budgets."""


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each network and size, by budget, under a name for the legend.

    Of several shares of tokens each has a curve, or a point where there is one budget.
    """
    sizes = {row.size for row in rows}
    by_share = _by_share(rows)
    groups: dict[str, list[Row]] = {}
    for row in ordered(rows):
        size = f", {row.size} px" if len(sizes) > 1 else ""
        share = row.keep, row.agreement
        dials = label_of("", None, *((None, None) if by_share else share), row.precision)
        groups.setdefault(f"{row.name}{dials}{size}", []).append(row)
    return groups


def _by_share(rows: Sequence[Row]) -> bool:
    """Whether networks differ in the share of tokens, at one budget."""
    return any(row.merges for row in rows) and len({r.cores for r in rows if r.cores}) == 1


def limits(
    values: Sequence[float],
    intervals: Sequence[Interval | None],
    *,
    percent: bool,
    most: float | None = None,
) -> tuple[float, float]:
    """The ends of an axis that shows all values and intervals without zooming into noise.

    The axis is at least two and a half times as high as a typical interval is wide, so that a
    difference within it looks small. Where no interval is known it shows at least ten points of a
    percentage, or a tenth of the largest error.

    Args:
        most: what no value can exceed; the axis ends a mark's height above it.
    """
    known = [one for one in intervals if one is not None and one[1] > one[0]]
    ends = [*values, *(end for one in known for end in one)]
    low, high = min(ends), max(ends)
    least = (_LEAST if known else _LEAST_UNKNOWN) * (100.0 if percent else high)
    typical = median(one[1] - one[0] for one in known) if known else 0.0
    reach = max(1.12 * (high - low), _WIDTHS * typical, least, 1e-9)
    middle = (low + high) / 2
    low, high = middle - reach / 2, middle + reach / 2
    if most is not None and high > most + reach / 50:
        low, high = low - (high - most - reach / 50), most + reach / 50
    if low < 0:
        low, high = 0.0, high - low
    return low, high


def captions(runs: Sequence[Run]) -> list[str]:
    """What a reader of the plot should know of its intervals."""
    rows = _rows(runs)
    without = sum(row.interval is None for row in rows)
    if without == len(rows):
        return [WITHOUT]
    found = [BARS]
    if _kept(rows):
        found.append(PAIRED)
    if without:
        found.append(SOME_WITHOUT)
    return found


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
    return _png(make_figure(runs, title))


def draw_each(runs: Sequence[Run]) -> list[tuple[str, bytes]]:
    """Each panel as a PNG file of its own, with what it shows."""
    return [(chart.name, _png(_figure(runs, [chart]))) for chart in _charts(runs)]


def make_figure(runs: Sequence[Run], title: str | None = None) -> Any:
    """The plot as a figure of matplotlib, to be changed before it is saved."""
    note = captions(runs)[0].replace("`", "")
    return _figure(runs, _charts(runs), title or runs[0].title, note)


def _rows(runs: Sequence[Run]) -> list[Row]:
    return [row for run in runs for row in run.rows]


def _kept(rows: Sequence[Row]) -> list[Row]:
    """Rows whose share of the full budget is known with an interval."""
    return [row for row in rows if row.retention_full is not None and row.interval_full is not None]


def _charts(runs: Sequence[Run]) -> list[_Chart]:
    run, rows = runs[0], _rows(runs)
    percent = is_percent(run.metric)
    scale = 100.0 if percent else 1.0

    def score(row: Row) -> float:
        return scale * row.metrics[run.metric]

    def interval(row: Row) -> Interval | None:
        return _scaled(row.interval, scale)

    title = metric_title(run.metric) + ("" if run.higher_is_better else " (lower is better)")
    ends = limits(
        [score(r) for r in rows],
        [interval(r) for r in rows],
        percent=percent,
        most=100.0 if percent else None,
    )

    def chart(cost: str, text: str) -> _Chart:
        name = f"{title} against {text}" if cost else title
        return _Chart(name, lambda r: getattr(r, cost, None), text, score, title, interval, ends)

    costs = (("interactions", "interactions in one layer"), ("ms", "ms for one image, measured"))
    found = [chart(cost, text) for cost, text in costs if any(getattr(r, cost) for r in rows)]
    if not found:  # no cost is known; networks without budgets are levels that need none
        found = [chart("cores", "cores") if any(row.cores for row in rows) else chart("", "")]
    kept = _kept(rows)
    if any(row.interval_full and row.interval_full[1] > row.interval_full[0] for row in kept):
        dial, of_dial = "cores", "cores"
        if _by_share(rows):
            dial, of_dial = "share of patch tokens", "share"
        shares = [100.0 * (row.retention_full or 0.0) for row in kept]
        shown = limits(
            [*shares, 100.0], [_scaled(row.interval_full, 100.0) for row in kept], percent=True
        )
        found.append(
            _Chart(
                f"Kept of the full budget, by {dial}",
                lambda r: getattr(r, of_dial, None),
                dial,
                lambda r: None if r not in kept else 100.0 * (r.retention_full or 0.0),
                "retention of the full budget, %",
                lambda r: _scaled(r.interval_full, 100.0),
                shown,
                budgets=True,
            )
        )
    return found


def _scaled(ends: Interval | None, scale: float) -> Interval | None:
    return None if ends is None else (scale * ends[0], scale * ends[1])


def _figure(runs: Sequence[Run], charts: Sequence[_Chart], title: str = "", note: str = "") -> Any:
    figures = require("matplotlib.figure", "the plot")
    figure = figures.Figure(figsize=(5.2 * len(charts), 4.4), layout="constrained")
    axes = figure.subplots(1, len(charts), squeeze=False)[0]
    groups = curves(_rows(runs))
    for axis, chart in zip(axes, charts, strict=True):
        _draw_chart(axis, chart, groups)
    entries: dict[str, Any] = {}
    for axis in axes:
        entries.update({text: mark for mark, text in zip(*_legend(axis), strict=True)})
    if entries:
        figure.legend(
            entries.values(), entries.keys(), loc="outside upper left", fontsize=8.5,
            frameon=False, ncols=2 * len(charts), labelcolor=_INK, borderaxespad=0.6,
            title=title or None, title_fontsize=11, alignment="left",
        )  # fmt: skip
    elif title:
        figure.suptitle(title, fontsize=11, color=_INK)
    if note:
        lines = textwrap.fill(note, _LINE * len(charts))
        figure.supxlabel(lines, fontsize=8, color="#6a7079", x=0.01, ha="left")
    return figure


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160)
    return file.getvalue()


def _legend(axis: Any) -> tuple[Iterable[Any], Iterable[str]]:
    marks, texts = axis.get_legend_handles_labels()
    return marks, texts


def _draw_chart(axis: Any, chart: _Chart, groups: dict[str, list[Row]]) -> None:
    drawn: list[float] = []
    lines = [label for label, group in groups.items() if group[0].cores is not None]
    for number, (label, group) in enumerate(groups.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        if group[0].role == "teacher":
            colour = "black"
        if group[0].cores is None:
            if not chart.budgets:
                drawn += _draw_level(axis, chart, label, group[0], colour)
            continue
        # Curves of several networks share their budgets: they stand a little apart.
        aside = 1.04 ** (lines.index(label) - (len(lines) - 1) / 2) if chart.budgets else 1.0
        drawn += _draw_curve(axis, chart, label, group, colour, aside)
    if chart.budgets:
        axis.axhline(100, linestyle="--", linewidth=1, color=_INK)
    else:
        _label_budgets(axis, chart, [row for label in lines for row in groups[label]])
    _finish(axis, chart, drawn)


def _draw_level(axis: Any, chart: _Chart, label: str, row: Row, colour: str) -> list[float]:
    """A network without budgets: a level to compare with, wherever it lies."""
    score, ends, x = chart.y(row), chart.interval(row), chart.x(row)
    axis.axhline(score, linestyle="--", linewidth=1.2, label=label, color=colour)
    if ends is not None:
        axis.axhspan(*ends, color=colour, alpha=0.07, linewidth=0)
    if not x:
        return []
    axis.plot([x], [score], "s", color=colour, markersize=5)
    _draw_bars(axis, [(x, score or 0.0, ends)], colour)
    return [x]


def _draw_curve(
    axis: Any, chart: _Chart, label: str, group: Sequence[Row], colour: str, aside: float
) -> list[float]:
    """A network at its budgets."""
    points = [
        (aside * x, y, chart.interval(row), row)
        for row in group
        if (x := chart.x(row)) and (y := chart.y(row)) is not None
    ]
    if not points:
        return []
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    axis.plot(
        xs, ys, "o-", label=label, color=colour, linewidth=1.8, markersize=5.5,
        markeredgecolor="white", markeredgewidth=0.8, zorder=3,
    )  # fmt: skip
    known = [(x, ends) for x, _, ends, _ in points if ends is not None]
    if not chart.budgets and len(known) == len(points) > 1:
        low, high = zip(*(ends for _, ends in known), strict=True)
        axis.fill_between(xs, low, high, color=colour, alpha=0.13, linewidth=0)
    else:
        _draw_bars(axis, [point[:3] for point in points], colour)
    return xs


def _label_budgets(axis: Any, chart: _Chart, rows: Sequence[Row]) -> None:
    """The number of cores above each point; once where several networks cost the same."""
    highest: dict[tuple[float, str], float] = {}
    by_share = _by_share(rows)
    for row in rows:
        x, y = chart.x(row), chart.y(row)
        if x and y is not None:
            place = (x, f"K={row.keep}" if by_share else f"{row.cores}")
            highest[place] = max(y, highest.get(place, y))
    for (x, text), y in highest.items():
        axis.annotate(
            text, (x, y), (0, 6), textcoords="offset points", fontsize=7.5, ha="center",
            color=_INK, zorder=4,
        )  # fmt: skip


def _draw_bars(
    axis: Any, points: Sequence[tuple[float, float, Interval | None]], colour: str
) -> None:
    for x, _, ends in points:
        if ends is not None:
            axis.plot([x, x], ends, color=colour, linewidth=1.2, zorder=2)
            axis.plot([x, x], ends, "_", color=colour, markersize=6, zorder=2)


def _finish(axis: Any, chart: _Chart, drawn: Sequence[float]) -> None:
    ticker = require("matplotlib.ticker", "the plot")
    if drawn:
        axis.set_xscale("log")
        axis.minorticks_off()
        if chart.budgets:
            axis.xaxis.set_major_locator(ticker.LogLocator(base=2))
        else:
            axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.margins(x=0.08)
    else:
        axis.set_xticks([])
    axis.set_ylim(*chart.limits)
    axis.set_xlabel(chart.x_title, color=_INK)
    axis.set_ylabel(chart.y_title, color=_INK)
    axis.grid(color=_PALE, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=_INK, labelsize=8.5, length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#9aa0a8")


def best_text(run: Run) -> str:
    """The best row in words, for a line on the terminal."""
    rows = sorted(run.rows, key=lambda row: run.score(row), reverse=run.higher_is_better)
    score = show_metric(run.metric, run.score(rows[0]))
    return f"best: {rows[0].label}, {metric_title(run.metric)} {score}"
