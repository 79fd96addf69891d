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
from benchmarks.rows import RESULTS, read_csv
from benchmarks.tables import PLAIN
from veca import bench
from veca.bench import BenchPlan, take_turns
from veca.export import export_model
from veca.images import find_images
from veca.model import Veca
from veca.outputs import VecaOutput
from veca.precision import at_precision
from veca.quantization import linear_layers, mean_agreement, photo_batches

KEEP = {"tiny": 0.4, "small": 0.45}
"""The first of the points of docs/choosing-a-budget.md."""
CSV = "cpu_precision.csv"
SPEED = ("rounds", "ms", "times faster", "floor ms", "of floor")
AGREES = ("photos", "cls", "patches")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--photos", type=Path, help="squares that chose nothing: precisions")
    parser.add_argument("--weights", nargs="+", default=["tiny", "weights/veca_small_patch16"])
    parser.add_argument("--pixels", type=int, nargs="+", default=[224, 512], help="with --photos")
    parser.add_argument("--rounds", type=int, default=25, help="with --photos; 0: no times")
    parser.add_argument(
        "--agree", type=int, default=100, help="photos to compare on; 0: the file's"
    )
    parser.add_argument("--onnx", type=Path, default=Path("onnx"), help="exported files, kept")
    parser.add_argument(
        "--threads-of-precisions", type=int, nargs="+", default=[1, 2], help="with --photos"
    )
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
    found = find_images([str(options.photos)])
    photos = found[:: max(1, len(found) // (options.agree or 1))][: options.agree or 1]
    for name, size in itertools.product(options.weights, options.pixels):
        model, called = veca.load(name), Path(name).name
        runs = contenders(model, called, size, options.onnx)
        torch.set_num_threads(1)
        agreements = {
            label: mean_agreement(call, model, photo_batches(model, photos, size))
            for label, call in runs.items()
            if label != PLAIN and options.agree
        }
        (image,) = photo_batches(model, photos[:1], size)
        for threads in options.threads_of_precisions:
            torch.set_num_threads(threads)
            times, floor = timed(runs, model, image, options.rounds)
            key = f"{called} {size} {threads}"
            path = options.out / CSV
            there = read_csv(path) if path.is_file() else []
            before = {r["contender"]: r for r in there if r["set"] == key}
            rows: list[dict[str, Any]] = []
            for label in runs:
                row: dict[str, Any] = {
                    "set": key,
                    "weights": called,
                    "size": size,
                    "threads": threads,
                    "contender": label,
                }
                old = before.get(label, {})
                row |= {at: old.get(at, "") for at in (*SPEED, *AGREES)}
                if label in times:
                    ratios = [a / b for a, b in zip(times[PLAIN], times[label], strict=True)]
                    ms = statistics.median(times[label])
                    values = (options.rounds, ms, statistics.median(ratios), floor, ms / floor)
                    row |= {at: f"{v:.4g}" for at, v in zip(SPEED, values, strict=True)}
                if label in agreements:
                    cls, patches = agreements[label]
                    row |= dict(
                        zip(AGREES, (len(photos), f"{cls:.5f}", f"{patches:.5f}"), strict=True)
                    )
                rows.append(row)
                print(*row.values(), flush=True)
            write_csv("cpu_precision", rows, options.out, device="cpu", key="set")


def contenders(model: Veca, called: str, size: int, onnx: Path) -> dict[str, Callable[..., Any]]:
    """By label; one without a compiler first takes what it needs from none."""
    int8 = at_precision(model, "int8", compile=True)
    keep = KEEP["small" if "small" in called else "tiny"]
    found: dict[str, Callable[..., Any]] = {
        PLAIN: model,
        "bf16": at_precision(model, "bf16"),
        "int8": int8,
        "int8, no compiler": at_precision(model, "int8", compile=False),
        "int8, keep": partial(int8, keep=keep),
    }
    file = onnx / f"{called}_cores{model.config.num_cores}.onnx"
    if not file.exists():
        export_model(model, onnx, cores=model.config.num_cores, name=called)
    rounded = file.with_name(f"{file.stem}_dynamic.onnx")
    if not rounded.exists():
        from onnxruntime.quantization import quantize_dynamic

        quantize_dynamic(file, rounded, op_types_to_quantize=["MatMul"], per_channel=True)
    for label, path in (("onnxruntime", file), ("onnxruntime, dynamic int8", rounded)):
        found[label] = partial(_by_onnxruntime, path, {})
    return found


def _by_onnxruntime(path: Path, sessions: dict[int, Any], images: Tensor) -> VecaOutput:
    """What a file of the export says, with as many threads as torch has now."""
    import onnxruntime

    threads = torch.get_num_threads()
    if threads not in sessions:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        sessions[threads] = onnxruntime.InferenceSession(str(path), options)
    outputs = ["core_tokens", "patches", "core_xy"]
    found = sessions[threads].run(outputs, {"images": images.numpy()})
    tokens, patches, xy = map(torch.from_numpy, found)
    return VecaOutput(tokens, patches, xy, (images.shape[2] // 16, images.shape[3] // 16))


def timed(
    runs: dict[str, Callable[..., Any]], model: Veca, image: Tensor, rounds: int
) -> tuple[dict[str, list[float]], float]:
    """Milliseconds by contender in turns, and of the matrix floor: nothing with no rounds.

    The floor is what the products of all linear layers take in int8, each of the shapes at the best
    of its rounds, with q, k and v as one product.
    """
    if not rounds:
        return {}, 0.0
    calls: dict[str, Callable[[], object]] = {
        label: partial(call, image) for label, call in runs.items()
    }
    side = model.config.patch_size
    tokens = model.config.num_cores + image.shape[-2] // side * (image.shape[-1] // side)
    weights: dict[tuple[int, int], list[Tensor]] = {}
    for name, layer in linear_layers(model).items():
        if not name.endswith(("attn.k", "attn.v")):
            width, joined = layer.in_features, 3 if name.endswith("attn.q") else 1
            weight = torch.ones(joined * layer.out_features, width, dtype=torch.int8)
            weights.setdefault((len(weight), width), []).append(weight.t())
    for shape, layers in weights.items():
        rows = torch.ones(tokens, shape[1], dtype=torch.int8)
        out = torch.empty(tokens, shape[0], dtype=torch.int32)
        calls[f"floor {shape}"] = partial(_products, rows, layers, out)
    times = take_turns(calls, BenchPlan(repeats=rounds, seconds=0.0))
    floor = sum(min(times.pop(f"floor {shape}")) for shape in weights)
    return times, floor


def _products(rows: Tensor, weights: list[Tensor], out: Tensor) -> None:
    for weight in weights:
        torch._int_mm(rows, weight, out=out)
