"""Results files in, Markdown out: what all tables and plots share."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from veca._util.files import atomic_write

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Rows = list[dict[str, str]]


def read(source: str) -> Rows:
    """The rows of a results file; of "probes/RECORDS" those of the records whose names begin so."""
    name, _, records = source.partition("/")
    rows = read_csv(RESULTS / f"{name}.csv")
    return (
        [row for row in rows if f"{row['record']}/".startswith(f"{records}/")] if records else rows
    )


def read_csv(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(
    path: Path, rows: Sequence[Mapping[str, object]], columns: Sequence[str] | None = None
) -> Path:
    """A results file, whole or not at all; cells that a row does not have are empty."""
    with atomic_write(path, "w") as file:
        table = csv.DictWriter(file, columns or list(rows[0]), lineterminator="\n", restval="")
        table.writeheader()
        table.writerows(rows)
    return path


def others(path: Path, key: str, fresh: Sequence[Mapping[str, object]]) -> Rows:
    """The rows that a file has besides those about to be written: `key` has another value there."""
    named = {str(row[key]) for row in fresh}
    return [row for row in read_csv(path) if row[key] not in named] if path.is_file() else []


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, align: str = "---:") -> str:
    lines = [header, [align] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: str | float) -> str:
    """Three digits that count."""
    value = float(value)
    digits = max(0, 3 - len(str(int(abs(value)))) if abs(value) >= 1 else 3)
    return f"{value:.{digits}f}"
