"""How far exported files are from the model: every preset, budget, size and batch.

    OMP_NUM_THREADS=1 python -m benchmarks export_matrix

Fresh weights of every preset (each parameter moved by normal noise of 0.02, so that zeros and ones
hide nothing) are exported, and every file runs beside the float32 model on photos. Rows are added
to results/export.csv after each file, and what is there already is not done again. Two CPU
cores take hours, most of them for `large`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import RESULTS, read_csv, write_rows
from veca import PRESETS, Veca, create_model
from veca.bench import machine
from veca.export import ANY, FORMATS, Exported, export_model
from veca.export.precision import NAMES

SIZES = ((224, 224), (256, 384), (512, 512), (1024, 768))
BUDGETS: tuple[int | str, ...] = (1, 8, 64, ANY)
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks export_matrix"
SHORT = {name: short for short, name in NAMES.items()}
KEY = ("preset", "format", "dtype", "file_cores")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--cores", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16"])
    parser.add_argument("--out", type=Path, default=RESULTS / "export.csv")


def run(args: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = [*read_csv(args.out)] if args.out.is_file() else []
    done = {tuple(row[name] for name in KEY) for row in rows}
    for to in args.formats.split(","):
        for preset in args.presets.split(","):
            model = None
            for budget in args.cores.split(","):
                if (preset, to, args.dtype, budget) in done:
                    continue
                model = model or moved(preset)
                print(f"{time.strftime('%H:%M:%S')} {preset} {to} {budget}", flush=True)
                cores = budget if budget == ANY else int(budget)
                rows += measure(model, preset, to, cores, args.dtype)
                write_rows(args.out, rows)
    worst = max(float(row["max_difference"]) for row in rows)
    print(f"{len(rows)} checks, the largest difference is {worst:.2e}; wrote {args.out}")


def moved(preset: str) -> Veca:
    """A fresh model whose every parameter is away from its initial value."""
    torch.manual_seed(0)
    model = create_model(preset).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def measure(
    model: Veca, preset: str, to: str, cores: int | str, dtype: str
) -> list[dict[str, Any]]:
    """Export one file; a row for each size, batch and budget it was checked at."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (entry,) = export_model(
            model,
            folder,
            to=to,
            cores=cores,
            precision=SHORT[dtype],
            check_sizes=SIZES,
            name=preset,
        )
    return list(_rows(entry, preset, time.monotonic() - started))


def _rows(entry: Exported, preset: str, seconds: float) -> Iterable[dict[str, Any]]:
    facts = asdict(machine("cpu"))
    for check in entry.checks:
        yield {
            "preset": preset,
            "format": entry.format,
            "dtype": entry.dtype,
            "file_cores": str(entry.cores),
            "cores": check.cores,
            "batch": check.batch,
            "height": check.height,
            "width": check.width,
            **{name: f"{value:.3e}" for name, value in check.differences.items()},
            "max_difference": f"{check.max_difference:.3e}",
            "largest_value": f"{max(check.largest.values()):.4g}",
            "file_mb": f"{entry.bytes / 1e6:.1f}",
            "export_and_check_s": f"{seconds:.0f}",
            "command": COMMAND,
            **facts,
        }
