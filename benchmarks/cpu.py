"""Precisions on a CPU side by side, and VECA beside the same network with full attention.

    python -m benchmarks cpu --photos SQUARES
    python -m benchmarks cpu

With photos: the shipped weights as they are and in each precision, with 64 cores, on one thread and
on two: time in turns, as the median of the ratios to the plain model in float32, and the mean
agreement with it. "floor" is what `torch._int_mm` takes for the linear layers' shapes. A few
minutes of an idle machine. Writes results/cpu_precision.csv after each size; rows
of other weights and sizes that are there stay.

Without: what `veca bench small --cores 8,64 --threads 1 --device cpu --limit 300` measures, in
float32, with fresh weights. A quarter of an hour. Writes results/cpu.csv after each size.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import veca
from benchmarks.common import write_csv
from benchmarks.rows import RESULTS
from benchmarks.tables import PLAIN
from veca import bench
from veca.bench import BenchPlan, take_turns
from veca.images import find_images
from veca.model import Veca
from veca.precision import at_precision
from veca.quantization import linear_layers, mean_agreement, photo_batches

KEEP = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--photos", type=Path, help="squares that chose nothing: precisions")
    parser.add_argument("--weights", nargs="+", default=["tiny", "weights/veca_small_patch16"])
    parser.add_argument("--pixels", type=int, nargs="+", default=[224, 512], help="with --photos")
    parser.add_argument("--rounds", type=int, default=15, help="with --photos")
    parser.add_argument("--agree", type=int, default=100, help="photos to compare on")
    parser.add_argument("--compiled", action="store_true", help="also compiled")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--cores", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="rounds at each size, at least")
    parser.add_argument("--seconds", type=float, default=1.0, help="at each size, at least")
    parser.add_argument("--limit", type=float, default=300.0, help="no new round after these")
    parser.add_argument("--out", type=Path, default=RESULTS)


def run(options: argparse.Namespace) -> None:
    if options.photos is not None:
        precisions(options)
        return
    plan = BenchPlan(
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


@torch.inference_mode()
def precisions(options: argparse.Namespace) -> None:
    photos = find_images([str(options.photos)])
    photos = photos[:: max(1, len(photos) // options.agree)][: options.agree]
    rows: list[dict[str, Any]] = []
    for name, size in itertools.product(options.weights, options.pixels):
        model = veca.load(name)
        runs = contenders(model, compiled=options.compiled)
        torch.set_num_threads(1)
        agreement = {
            label: mean_agreement(call, model, photo_batches(model, photos, size))
            for label, call in runs.items()
            if label != PLAIN
        }
        (image,) = photo_batches(model, photos[:1], size)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            times = timed(runs, model, image, options.rounds)
            floor = statistics.median(times.pop("floor"))
            for label, taken in times.items():
                ratios = [a / b for a, b in zip(times[PLAIN], taken, strict=True)]
                found = agreement.get(label)
                rows.append(
                    {
                        "set": f"{Path(name).name} {size}",
                        "weights": Path(name).name,
                        "size": size,
                        "threads": threads,
                        "contender": label,
                        "photos": len(photos),
                        "rounds": options.rounds,
                        "ms": f"{statistics.median(taken):.2f}",
                        "times faster": f"{statistics.median(ratios):.3f}",
                        "cls": "" if found is None else f"{found.cls:.5f}",
                        "patches": "" if found is None else f"{found.patches:.5f}",
                        "floor ms": f"{floor:.2f}",
                        "of floor": f"{statistics.median(taken) / floor:.2f}",
                    }
                )
                print(*rows[-1].values(), flush=True)
            write_csv("cpu_precision", rows, options.out, device="cpu", key="set")


def contenders(model: Veca, *, compiled: bool) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {PLAIN: model}
    for precision in ("bf16", "int8"):
        found[precision] = at_precision(model, precision)
        if compiled:
            found[f"{precision}, compiled"] = at_precision(model, precision, compile=True)
    found[f"int8, keep {KEEP:g}"] = partial(found["int8"], keep=KEEP)
    return found


def timed(
    runs: dict[str, Callable[..., Any]], model: Veca, image: Tensor, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds by contender, and of the matrix floor, in turns."""
    calls: dict[str, Callable[[], object]] = {
        label: partial(call, image) for label, call in runs.items()
    }
    side = model.config.patch_size
    tokens = model.config.num_cores + image.shape[-2] // side * (image.shape[-1] // side)
    products = [
        (torch.ones(tokens, layer.in_features, dtype=torch.int8), layer.weight.to(torch.int8).t())
        for layer in linear_layers(model).values()
    ]
    calls["floor"] = lambda: [torch._int_mm(a, b) for a, b in products]
    return take_turns(calls, BenchPlan(repeats=rounds, seconds=0.0))
