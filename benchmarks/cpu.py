"""VECA on a CPU beside the same network with full attention: time and memory by resolution.

    python -m benchmarks cpu

What `veca bench small --cores 8,64 --threads 1 --device cpu --limit 300` measures, in float32, with
fresh weights. A quarter of an hour at the given sizes. Writes results/cpu.csv after each size.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.rows import RESULTS
from veca import bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="small")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--cores", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="rounds at each size, at least")
    parser.add_argument("--seconds", type=float, default=1.0, help="at each size, at least")
    parser.add_argument("--limit", type=float, default=300.0, help="no new round after these")
    parser.add_argument("--out", type=Path, default=RESULTS)


def run(options: argparse.Namespace) -> None:
    plan = bench.BenchPlan(
        sizes=tuple(options.sizes),
        threads=options.threads,
        repeats=options.repeats,
        seconds=options.seconds,
        limit=options.limit,
    )
    where, rows = bench.machine(), []

    def keep(new: list[bench.BenchRow]) -> None:
        rows.extend(new)
        bench.write_csv(options.out / "cpu.csv", rows, where)

    bench.bench(options.preset, plan, cores=options.cores, progress=print, on_rows=keep)
