"""Results files in, Markdown out: what all tables and plots share."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Rows = list[dict[str, str]]


def read(source: str) -> Rows:
    """The rows of a results file, or of all below a folder, with its folder's name as `probe`."""
    if not (RESULTS / source).is_dir():
        return read_csv(RESULTS / f"{source}.csv")
    files = sorted((RESULTS / source).glob("**/results.csv"))
    return [{**row, "probe": file.parent.name} for file in files for row in read_csv(file)]


def read_csv(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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
