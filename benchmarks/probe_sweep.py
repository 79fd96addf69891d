"""How long the quick sweep takes: Pets, k-NN and linear, eight budgets; then again from the cache.

    python -m benchmarks probe_sweep --pets data/oxford-pets --threads 2

Two runs of one `veca probe` command, each in a process of its own, start of Python included; the
second finds the features of the first in the cache. Wall time is for an idle machine; CPU time
(user and system, of all threads) says what was computed whatever else was running. Fresh `tiny`
weights with an output as wide as the EfficientNet teacher's are made unless --weights are given:
time does not depend on what they have learned. Writes results/probe-sweep.csv.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import veca
from benchmarks.common import print_table, write_csv
from benchmarks.rows import RESULTS
from veca.probe import read_run

TASKS = ("knn", "linear")
BUDGETS = "8,16,...,64"
OUTPUT_WIDTH = 1280


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pets", type=Path, required=True, help="folder of Oxford-IIIT Pet")
    parser.add_argument("--weights", help="a folder of weights; by default fresh ones of `tiny`")
    parser.add_argument("--cores", default=BUDGETS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=RESULTS)


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        weights = options.weights or _fresh(Path(scratch, "tiny"))
        rows = [_measure(which, weights, options, Path(scratch)) for which in ("first", "again")]
    first, again = rows
    for kind in ("wall_s", "cpu_s"):
        again[f"{kind[:-2]}_times_faster"] = first[kind] / again[kind]
    again["same_scores"] = first.pop("scores") == again.pop("scores")
    write_csv("probe-sweep", rows, options.out, device="cpu")
    print_table(rows)


def _fresh(folder: Path) -> str:
    torch.manual_seed(0)
    veca.save(veca.create_model("tiny", output_width=OUTPUT_WIDTH), folder)
    return str(folder)


def _measure(
    which: str, weights: str, options: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """One run of the command, and what it took."""
    words = [
        "probe", ",".join(TASKS), "--data", str(options.pets), "--dataset", "oxford-pets",
        "--weights", weights, "--cores", options.cores, "--protocol", "quick", "--device", "cpu",
        "--threads", str(options.threads), "--cache", str(scratch / "cache"),
        "--out", str(scratch / which),
    ]  # fmt: skip
    for setting in options.set:
        words += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "veca", *words], check=True, env=environment)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    runs = [read_run(scratch / which / f"{task}-oxford-pets") for task in TASKS]
    return {
        "run": which,
        "wall_s": wall,
        "cpu_s": user + system,
        "user_s": user,
        "system_s": system,
        "threads": options.threads,
        "load_average": os.getloadavg()[0],
        "budgets": len(runs[0].rows),
        "images": sum(runs[0].dataset[part]["used"] for part in ("train", "test")),
        "decoded": sum(run.cache["decoded"] for run in runs),
        "features_s": sum(run.seconds["features"] for run in runs),
        "scores": [run.score(row) for run in runs for row in run.rows],
    }
