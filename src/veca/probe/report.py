"""Many runs on one page: tables and plots, grouped by what can be compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veca._util.html import Page, data_uri
from veca.errors import MissingExtraError
from veca.probe.metrics import retention
from veca.probe.plot import captions, draw_each
from veca.probe.record import Row, Run, find_runs, scoring_constants
from veca.probe.table import (
    cells,
    dials,
    explain,
    header,
    machine_line,
    metric_title,
    ordered,
    show_metric,
    verified,
)


@dataclass(frozen=True)
class Group:
    """Runs of one task on the same images with the same constants: their rows compare."""

    title: str
    runs: list[Run]

    @property
    def rows(self) -> list[tuple[Run, Row]]:
        """In the order of the table. A run without the teacher is put beside that of another."""
        pairs = [(run, self._beside_teacher(run, row)) for run in self.runs for row in run.rows]
        order = ordered([row for _, row in pairs])
        return sorted(pairs, key=lambda pair: order.index(pair[1]))

    def _beside_teacher(self, run: Run, row: Row) -> Row:
        if row.retention_teacher is not None:
            return row
        teachers = {
            (other.name, run.score(other))
            for one in self.runs
            for other in one.rows
            if other.role == "teacher" and other.size == row.size
        }
        if len(teachers) != 1:
            return row  # none, or several that do not agree
        ((_, reference),) = teachers
        kept = retention(run.score(row), reference, run.metric)
        return dataclasses.replace(row, retention_teacher=kept)


@dataclass(frozen=True)
class ProbeReport:
    page: Path
    """One file: the pictures are in it."""
    groups: list[Group]
    missing_plots: str = ""
    """Why there are no pictures, if so."""


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs that can be compared; protocols or data that differ at all are kept apart."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        constants = scoring_constants(run.protocol)
        used = {k: v for k, v in constants.items() if k not in ("name", "description")}
        key = json.dumps([run.task, run.dataset, used], sort_keys=True)
        groups.setdefault(key, []).append(run)
    titles = [members[0].title for members in groups.values()]
    named = []
    for (key, members), title in zip(groups.items(), titles, strict=True):
        if titles.count(title) > 1:
            # Same names, other constants or other images: told apart by a short hash.
            title += f" [{hashlib.sha256(key.encode()).hexdigest()[:6]}]"
        named.append(Group(title, members))
    return sorted(named, key=lambda group: group.title)


def write_report(
    folder: str | Path, out: str | Path | None = None, *, command: str = ""
) -> ProbeReport:
    """Join every run in a folder and below into one HTML page.

    Args:
        out: the page; by default `report.html` in the folder.
        command: what made the page, for its foot.
    """
    root = Path(folder).expanduser()
    groups = group_runs([run for _, run in find_runs(root)])
    target = Path(out).expanduser() if out is not None else root / "report.html"
    page = Page(
        "Probes of frozen backbones",
        "Each part holds runs on the same images with the same constants; scores of different "
        "parts do not compare.",
    )
    page.heading("Summary")
    page.table(
        ["task", "dataset", "protocol", "score", "teacher", "best student", "retention",
         "with fewest cores", "retention"],
        _all(groups),
    )  # fmt: skip
    missing = ""
    for group in groups:
        missing = _add_group(page, group, missing)
    if missing:
        page.text(f"No plots: {missing}", "note")
    page.made_by(command)
    page.write(target)
    return ProbeReport(target, groups, missing)


def _add_group(page: Page, group: Group, missing: str) -> str:
    """A part of the page; returns why plots are missing, if they are."""
    run = group.runs[0]
    page.heading(group.title)
    description = run.protocol["description"]
    page.text(f"{description[:1].upper()}{description[1:]}.")
    try:
        if not missing:
            plots = [(data_uri(png), name) for name, png in draw_each(group.runs)]
            page.pictures(plots, " ".join(captions(group.runs)))
    except MissingExtraError as error:
        missing = str(error)
    turned = dials(*group.runs)
    page.table(header(run, turned), [cells(one, row, turned) for one, row in group.rows])
    page.text(explain(next((one for one in group.runs if one.resampling), run)), "small")
    for note in dict.fromkeys(n for one in group.runs for n in [*one.notes, *verified(one)]):
        page.text(note, "small")
    for one in group.runs:
        if one.command:
            page.code(one.command)
        page.text(machine_line(one), "small")
    return missing


def _all(groups: Sequence[Group]) -> list[list[str]]:
    """One line a group: the teacher, the best student with its retention, and the same network
    at its smallest budget."""
    lines = []
    for group in groups:
        run = group.runs[0]
        rows = [row for _, row in group.rows]
        sign = -1 if run.higher_is_better else 1
        teachers = [row for row in rows if row.role == "teacher"]
        students = sorted(
            (row for row in rows if row.role == "student"), key=lambda row: sign * run.score(row)
        )
        fewest = sorted(
            (
                row
                for row in students
                if (row.name, row.size) == (students[0].name, students[0].size)
            ),
            key=lambda row: (row.cores or 0, row.share or 1.0),
        )
        lines.append(
            [
                run.task,
                run.dataset["name"],
                run.protocol["name"],
                metric_title(run.metric),
                _named(run, teachers[:1]),
                _named(run, students[:1]),
                _retention(students[:1]),
                _named(run, fewest[:1]),
                _retention(fewest[:1]),
            ]
        )
    return lines


def _named(run: Run, rows: Sequence[Row]) -> str:
    return ", ".join(f"{show_metric(run.metric, run.score(r))} ({r.label})" for r in rows)


def _retention(rows: Sequence[Row]) -> str:
    shares: list[Any] = [row.retention_teacher for row in rows if row.retention_teacher is not None]
    return f"{100 * shares[0]:.1f} %" if shares else ""
