"""Records of probes as one flat file, a row a network, budget and probe.

    python -m benchmarks collect research/results/probes

Every results.json below the folder, as `veca probe` leaves them, goes into results/probes.csv with
its place in the folder as `record` and the last part of that as `probe`. Columns are those of the
results.csv of each run, and the hash of the weights; what a probe does not measure is empty.
"""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

from benchmarks.rows import RESULTS, Rows, write_rows
from veca.probe import read_run
from veca.probe.table import csv_text

FIRST = (
    *("record", "probe", "task", "dataset", "protocol", "backbone", "role", "cores"),
    *("keep", "agreement", "precision", "size", "height", "width"),
)
LAST = (
    *("retention_teacher", "retention_full"),
    *("low", "high", "teacher_low", "teacher_high", "full_low", "full_high"),
    *("interactions", "flops", "ms", "spread_ms"),
    *("device", "threads", "torch", "veca", "date", "weights_sha256"),
)
"""What the table of any run has; its metrics are between them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="with records below it")
    parser.add_argument("--out", type=Path, default=RESULTS / "probes.csv")


def run(options: argparse.Namespace) -> None:
    rows = [row for file in records(options.folder) for row in rows_of(file, options.folder)]
    if not rows:
        raise SystemExit(f"no results.json below {options.folder}.")
    metrics = dict.fromkeys(name for row in rows for name in row if name not in FIRST + LAST)
    write_rows(options.out, rows, [*FIRST, *metrics, *LAST])
    print(f"{len(rows)} rows of {len({row['record'] for row in rows})} records in {options.out}")


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/results.json"))


def rows_of(file: Path, folder: Path) -> Rows:
    run = read_run(file)
    place = {
        "record": file.parent.relative_to(folder).as_posix(),
        "probe": file.parent.name,
    }
    networks = run.backbones
    return [
        {**place, **row, "weights_sha256": networks[row["backbone"]].get("weights_sha256", "")}
        for row in csv.DictReader(io.StringIO(csv_text(run)))
    ]
