"""What runs of `veca distill` reached on images held out, as one table.

    python -m research.training NAME=RUN ...

RUN is a run's folder, or its metrics.jsonl. Writes benchmarks/results/training.csv: a row for each
validation, student, size and budget. Rows of runs that are not named again are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.common import print_table
from benchmarks.rows import RESULTS, others, write_rows

COLUMNS = (
    *("run", "step", "samples", "student", "size", "cores"),
    *("cls_cos", "dense_cos", "cls_mse", "dense_mse", "kl", "agree"),
)
"""The last two only where the teacher's own classifier judged."""


def rows_of(name: str, path: Path) -> list[dict[str, object]]:
    """All validations of one run."""
    file = path if path.is_file() else path / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    batches = {r["step"]: r["batch"] for r in records if r["kind"] == "train"}
    rows: list[dict[str, object]] = []
    for record in records:
        if record["kind"] != "validation":
            continue
        samples = sum(batch for step, batch in batches.items() if step <= record["step"])
        for cell in record["grid"]:
            numbers = {key: f"{cell[key]:.4f}" if key in cell else "" for key in COLUMNS[6:]}
            rows.append(
                {
                    "run": name,
                    "step": record["step"],
                    "samples": samples,
                    "student": cell.get("student", ""),
                    "size": cell["size"],
                    "cores": cell["cores"],
                    **numbers,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="NAME=FOLDER")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    named = dict(item.split("=", 1) for item in options.runs)
    fresh = [row for name, path in named.items() for row in rows_of(name, Path(path))]
    file = options.out / "training.csv"
    write_rows(file, [*others(file, "run", fresh), *fresh], COLUMNS)
    print_table(fresh)


if __name__ == "__main__":
    main()
