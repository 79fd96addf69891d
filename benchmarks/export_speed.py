"""Exported files beside their model, on a CPU: is an open budget as fast as a fixed one?

    python -m benchmarks export_speed

The shipped tiny weights, one image, one thread for each contender; they take turns, and the median
counts. Writes results/export_speed.csv.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

import veca
from benchmarks.common import print_table, write_csv
from benchmarks.rows import RESULTS
from veca.bench import BenchPlan, take_turns
from veca.export import ANY, export_model


def one_thread(file: Path, *inputs: np.ndarray) -> Callable[[], object]:
    """A call that runs an ONNX file."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    feed = {entry.name: value for entry, value in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: session.run(None, feed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--cores", default="8,64")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each budget")
    parser.add_argument("--out", type=Path, default=RESULTS)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = veca.load("veca_tiny_patch16")
    images = torch.randn(1, 3, options.pixels, options.pixels)
    rows = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        (any_budget,) = export_model(model, folder, cores=ANY, name="any")
        for cores in map(int, options.cores.split(",")):
            (one_budget,) = export_model(model, folder, cores=cores, name="one")
            contenders: dict[str, Callable[[], object]] = {
                "torch ms": partial(model, images, cores=cores),
                "fixed budget ms": one_thread(one_budget.path, images.numpy()),
                "open budget ms": one_thread(any_budget.path, images.numpy(), np.array(cores)),
            }
            times = take_turns(contenders, BenchPlan(seconds=options.seconds))
            medians = {name: statistics.median(ms) for name, ms in times.items()}
            rows.append({"pixels": options.pixels, "cores": cores, "threads": 1, **medians})
    write_csv("export_speed", rows, options.out, device="cpu")
    print_table(rows)
