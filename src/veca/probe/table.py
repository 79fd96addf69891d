"""The table of a run: for the terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veca._util.files import atomic_write_text
from veca._util.numbers import count
from veca.probe.intervals import Interval
from veca.probe.record import Row, Run, write_run

if TYPE_CHECKING:
    from rich.table import Table

# Beside the score that retention is computed of.
_ALSO = {"segmentation": ("macc", "aacc"), "depth": ("abs_rel", "delta1")}
_PERCENT = {"top1", "mean_class_top1", "miou", "macc", "aacc", "delta1"}
_TITLES = {
    "top1": "top-1 %",
    "mean_class_top1": "mean class %",
    "miou": "mIoU %",
    "macc": "mAcc %",
    "aacc": "pixel acc. %",
    "rmse": "RMSE m",
    "abs_rel": "abs rel",
    "delta1": "delta1 %",
}
_ENDS = ("low", "high", "teacher_low", "teacher_high", "full_low", "full_high")


def metric_title(metric: str) -> str:
    return _TITLES.get(metric, metric)


def is_percent(metric: str) -> bool:
    """Whether tables show a score as a percentage; otherwise in metres."""
    return metric in _PERCENT


def show_metric(metric: str, value: float) -> str:
    """A score as tables show it: percent with two digits, or four digits of metres."""
    return f"{100 * value:.2f}" if is_percent(metric) else f"{value:.4f}"


def show_interval(metric: str, ends: Interval | None) -> str:
    """Half of an interval's width, as tables show it beside the score; empty for None."""
    if ends is None:
        return ""
    return _half_percent(ends) if is_percent(metric) else f"±{(ends[1] - ends[0]) / 2:.3f}"


def shown_metrics(run: Run) -> list[str]:
    return [run.metric, *_ALSO.get(run.task, ())]


def merges(*runs: Run) -> bool:
    """Whether tables tell how many tokens went on: some row of these runs merges."""
    return any(row.merges for run in runs for row in run.rows)


def dials(*runs: Run) -> list[str]:
    """The columns that tell what was turned: besides cores what not all rows have alike."""
    several = any(row.precision is not None for run in runs for row in run.rows)
    return ["cores", *(["keep"] if merges(*runs) else []), *(["precision"] if several else [])]


def turned_to(row: Row, turned: Sequence[str]) -> list[str]:
    """What a row has of `dials`, as text; empty where there is nothing to say."""
    shown = {
        "cores": "" if row.cores is None else str(row.cores),
        "keep": _show_keep(row),
        "precision": row.precision or "",
    }
    return [shown[name] for name in turned]


def header(run: Run, turned: Sequence[str] | None = None) -> list[str]:
    """Titles of the columns.

    Args:
        turned: the `dials` among them; by default those of the run.
    """
    first, *more = (metric_title(metric) for metric in shown_metrics(run))
    scores = [first, "95 %", *more]
    costs = ["interactions", "GFLOPs", "ms"]
    return ["backbone", *(turned or dials(run)), "px", *scores, "of teacher", "of full", *costs]


def cells(run: Run, row: Row, turned: Sequence[str] | None = None) -> list[str]:
    """One row of the table as text; empty where there is nothing to say."""
    first, *more = (show_metric(metric, row.metrics[metric]) for metric in shown_metrics(run))
    scores = [first, show_interval(run.metric, row.interval), *more]
    return [
        row.name,
        *turned_to(row, turned or dials(run)),
        str(row.size or f"{row.input[0]}x{row.input[1]}"),
        *scores,
        _show_kept(row.retention_teacher if row.role != "teacher" else None, row.interval_teacher),
        _show_kept(row.retention_full, row.interval_full),
        "" if row.interactions is None else f"{row.interactions:,}",
        "" if row.flops is None else f"{row.flops / 1e9:.2f}",
        "" if row.ms is None else f"{row.ms:.1f}",
    ]


def ordered(rows: Sequence[Row]) -> list[Row]:
    """By size; the teacher first, then students by budget and share, then baselines."""
    roles = {"teacher": 0, "student": 1, "baseline": 2}

    def place(row: Row) -> tuple[Any, ...]:
        share = 0.0 if row.share is None else row.share
        budget = (row.cores or 0, share, row.agreement or 0.0)
        return (row.size, roles.get(row.role, 3), row.name, *budget)

    return sorted(rows, key=place)


def rich_table(run: Run) -> Table:
    """For the terminal, to fit on 80 columns: without further scores, the intervals of what is kept
    and the FLOPs. The files have all of it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    titles = header(run)
    hidden = {"GFLOPs", *(metric_title(metric) for metric in shown_metrics(run)[1:])}
    shown = [i for i, title in enumerate(titles) if title not in hidden]
    table = Table(title=run.title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("backbone", overflow="fold", min_width=8)
    for i in shown[1:]:
        tall = titles[i].replace("interactions", "inter-\nactions").replace(" ", "\n")
        table.add_column(tall, justify="right", no_wrap=True)
    for row in ordered(run.rows):
        texts = cells(run, dataclasses.replace(row, interval_teacher=None, interval_full=None))
        table.add_row(*(texts[i] for i in shown))
    return table


def markdown(run: Run) -> str:
    """The table, what it was measured with and how to repeat it."""
    head = header(run)
    lines = [f"# {run.title}", "", run.protocol["description"] + ".", ""]
    if run.command:
        lines += ["```", run.command, "```", ""]
    lines.append("| " + " | ".join(head) + " |")
    lines.append("|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|")
    lines += ["| " + " | ".join(cells(run, row)) + " |" for row in ordered(run.rows)]
    lines += ["", explain(run), ""]
    lines += [f"- {note}" for note in [*run.notes, *verified(run)]]
    lines += ["", machine_line(run), ""]
    return "\n".join(lines)


def explain(run: Run) -> str:
    """What the columns mean, in a few sentences."""
    first = run.rows[0].details
    computed_in = [row.precision for row in run.rows if row.precision is not None]
    used = {"cls": "the first core (CLS)", "mean": "the mean of the patches"}
    names = str(first.get("features", "")).split("+")
    features = " and ".join(used.get(name, "patch features") for name in names)
    if not run.protocol.get("extract", {}).get("projection", True):
        features += ", before the output projection"
    better = "higher" if run.higher_is_better else "lower"
    kept = "score over" if run.higher_is_better else "error under"
    return (
        f"{metric_title(run.metric)}: {better} is better, on {features}. 'of teacher' and 'of "
        f"full': {kept} that of the teacher and of the full budget, 100 % being as good. "
        "Interactions: query-key pairs in one layer's attention. ms: median of one image, measured."
        + (" keep: the share of patch tokens that go on after merging." if merges(run) else "")
        + (f" The full budget is that in {computed_in[0]}." if computed_in else "")
        + explain_intervals(run)
    )


def explain_intervals(run: Run) -> str:
    """What the ± mean, as a sentence to follow others; empty where there are none."""
    how = run.resampling
    if all(row.interval is None for row in run.rows) or not how:
        return ""
    units = {
        "images": f"{how['of']:,} test images",
        "groups": f"{how['of']:,} groups of test images that belong together",
        "blocks": f"test images, in {how['of']:,} blocks of {how.get('block')} that follow each "
        "other in time,",
    }
    return (
        f" ±: half of a {100 * how['share']:.0f} % interval, for which the {units[how['drawn']]} "
        f"are drawn again {how['draws']:,} times; its ends are in results.csv. Other training "
        "images, seeds of the probe or trainings of the backbone are not in it."
    )


def verified(run: Run) -> list[str]:
    """What `--verify` found, in words."""
    lines = []
    for row in run.rows:
        found = row.details.get("verified")
        if not isinstance(found, dict):
            continue
        facts = []
        for key, value in found.items():
            if isinstance(value, dict):
                facts.append(f"{key}: {_facts(value)}")
            elif key != "with":
                facts.append(_facts({key: value}))
        lines.append(f"{row.label} against {found['with']}: {'; '.join(facts)}")
    return lines


def _facts(table: dict[str, object]) -> str:
    def show(value: object) -> str:
        return f"{value:.6g}" if isinstance(value, float) else str(value).lower()

    return ", ".join(f"{key.replace('_', ' ')} {show(value)}" for key, value in table.items())


def machine_line(run: Run) -> str:
    m = run.machine
    device = m["gpu"] or f"{m['cpu']}, {m['threads']} thread{'s' * (m['threads'] != 1)}"
    seconds = run.seconds
    return (
        f"{device}; torch {m['torch']}, veca {m['veca']}, Python {m['python']}; {m['date']}; "
        f"{seconds['total']:.0f} s, {seconds['features']:.0f} s of them for features "
        f"({count(run.cache['decoded'], 'image')} decoded)."
    )


def csv_text(run: Run) -> str:
    """One line a row, numbers as they are; every metric, and what tells runs apart."""
    metrics = list(dict.fromkeys(name for row in run.rows for name in row.metrics))
    names = [
        "task", "dataset", "protocol", "backbone", "role", "cores", "keep", "agreement",
        "precision", "size", "height", "width", *metrics, "retention_teacher", "retention_full",
        *_ENDS, "interactions", "flops", "ms", "spread_ms", "device", "threads",
        "torch", "veca", "date",
    ]  # fmt: skip
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    m = run.machine
    for row in ordered(run.rows):
        values = [
            run.task, run.dataset["name"], run.protocol["name"], row.name, row.role, row.cores,
            row.keep, row.agreement, row.precision, row.size, *row.input,
            *(row.metrics.get(name) for name in metrics),
            row.retention_teacher, row.retention_full, *_ends(row.interval),
            *_ends(row.interval_teacher), *_ends(row.interval_full), row.interactions, row.flops,
            row.ms,
            row.spread_ms, m["gpu"] or m["cpu"], m["threads"], m["torch"], m["veca"], m["date"],
        ]  # fmt: skip
        writer.writerow(
            "" if value is None else f"{value:.6g}" if isinstance(value, float) else value
            for value in values
        )
    return out.getvalue()


def _ends(ends: Interval | None) -> tuple[float | None, float | None]:
    return ends or (None, None)


def write_tables(run: Run, folder: str | Path) -> list[Path]:
    """`results.json`, `results.csv` and `results.md`."""
    target = Path(folder)
    atomic_write_text(target / "results.csv", csv_text(run))
    atomic_write_text(target / "results.md", markdown(run))
    return [write_run(run, target), target / "results.csv", target / "results.md"]


def _show_keep(row: Row) -> str:
    if row.keep is None:
        return ""
    return f"{row.keep:g}" if isinstance(row.keep, float) else f"{row.keep} {row.agreement or ''}"


def _show_kept(share: float | None, ends: Interval | None) -> str:
    """A share in percent, with half of its interval's width unless it is that of itself."""
    if share is None:
        return ""
    text = f"{100 * share:.1f} %"
    return text if ends is None or ends[0] == ends[1] else f"{text} {_half_percent(ends)}"


def _half_percent(ends: Interval) -> str:
    return f"±{50 * (ends[1] - ends[0]):.1f}"
