"""ONNX files by precision: time, size and agreement, beside onnxruntime's own dynamic int8.

    OMP_NUM_THREADS=1 python -m benchmarks export_precision

All files of one network take turns in onnxruntime on one thread; ratios are to the fp32 file and to
"plain int8" in the same round, and the median counts. "plain int8" is what onnxruntime's
quantize_dynamic makes of the fp32 file (per channel, all products). Agreement is that of the checks
of an export, with 8 and all cores, on the photos of the package or of --data, and for "plain int8"
on the same. Writes results/export_precision.csv.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import veca
from benchmarks.common import print_table, write_csv
from benchmarks.export_speed import one_thread
from benchmarks.rows import RESULTS
from veca.bench import BenchPlan, take_turns
from veca.export import ANY, export_model, verify
from veca.export.graph import frozen_copy, report_of
from veca.export.onnx_file import OnnxRunner
from veca.export.precision import NAMES
from veca.quantization import Agreement
from veca.weights import weights_hash

PLAIN = "plain int8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", default="tiny")
    parser.add_argument("--precisions", default="fp32,fp16,bf16,int8")
    parser.add_argument("--pixels", default="224,512")
    parser.add_argument("--cores", type=int, default=64)
    parser.add_argument("--data", default=None, help="photos to compare on")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each size")
    parser.add_argument("--folder", type=Path, help="keeps the files; those in it are measured")
    parser.add_argument("--out", type=Path, default=RESULTS)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = veca.load(options.weights)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        held = files(model, options.folder or Path(folder), options)
        held[PLAIN] = dynamic(held["float32"])
        agreements = {name: compared(path, model, options.data) for name, path in held.items()}
        for pixels in map(int, options.pixels.split(",")):
            images = np.random.default_rng(0).normal(size=(1, 3, pixels, pixels))
            inputs = images.astype(np.float32), np.array(options.cores)
            contenders = {name: one_thread(path, *inputs) for name, path in held.items()}
            times = take_turns(contenders, BenchPlan(seconds=options.seconds))
            for name, ms in times.items():
                rows.append(
                    {
                        "weights": options.weights,
                        "pixels": pixels,
                        "cores": options.cores,
                        "threads": 1,
                        "file": name,
                        "MB": round(held[name].stat().st_size / 1e6, 2),
                        "ms": round(statistics.median(ms), 2),
                        "share of fp32": share(ms, times["float32"]),
                        "share of plain int8": share(ms, times[PLAIN]),
                        "rounds": len(ms),
                        "least CLS": round(agreements[name].cls, 5),
                        "least patches": round(agreements[name].patches, 5),
                    }
                )
    write_csv("export_precision", rows, options.out, device="cpu", key="weights")
    print_table(rows)


def files(model: veca.Veca, folder: Path, options: argparse.Namespace) -> dict[str, Path]:
    """The exported files by what they compute in; those that are in the folder stay."""
    found: dict[str, Path] = {}
    for precision in options.precisions.split(","):
        name = NAMES[precision]
        stem = f"{options.weights}_anycores" + ("" if precision == "fp32" else f"_{name}")
        path = folder / f"{stem}.onnx"
        report = json.loads(report_of(path).read_text()) if path.exists() else {}
        if report.get("weights_sha256") != weights_hash(model):
            (entry,) = export_model(
                model,
                folder,
                cores=ANY,
                precision=precision,
                name=options.weights,
                data=options.data,
            )
            assert entry.path == path
        found[name] = path
    return found


def share(ms: list[float], of: list[float]) -> float:
    """The median of the ratios, round by round."""
    return round(statistics.median(a / b for a, b in zip(ms, of, strict=False)), 3)


def dynamic(path: Path) -> Path:
    """onnxruntime's own dynamic int8 of a file."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = onnx.load(path)
    del whole.metadata_props[:]  # the hash in them is that of another file
    out = path.with_name("plain.onnx")
    kinds = ["MatMul", "Gemm"]
    quantize_dynamic(
        whole, out, per_channel=True, op_types_to_quantize=kinds, weight_type=QuantType.QInt8
    )
    return out


def compared(path: Path, model: veca.Veca, data: str | None) -> Agreement:
    """Agreement of a file with the model in the checks of an export, as `Exported.agreement`."""
    found = verify.checks(
        OnnxRunner(path),
        frozen_copy(model, torch.float32),
        cores=[verify.FEW_CORES, model.config.num_cores],
        sizes=verify.sizes_on_grid(model.config.patch_size),
        photos=verify.photos_for(data),
    )
    points = [point.agreement for point in verify.by_point(found)]
    return Agreement(min(one["cls"] for one in points), min(one["patches"] for one in points))
