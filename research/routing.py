"""Can patches learn to fetch something from a place? And what is in the way of it?

    python -m research.routing --seeds 0 1 2

The teacher says of each patch what the patch at the mirrored place looks like (mean colour and
roughness), so a student has to carry things across the image by position alone. Students learn it
in one run from the same batches: VECA and a dense ViT, each as published (in training the patches'
coordinates are shifted and stretched, those of the cores are not) and without that, and a dense ViT
of half the layers, since from patch to patch VECA needs two, one to a core and one back. Further
runs, of the same batches, have a VECA that never works with fewer than 64 cores, which tells what
it costs to be elastic, and one that learns in each step with 64 cores and with fewer, drawn evenly.
These three have their coordinates left alone. Eleven minutes of one core for a seed. Writes
research/results/routing.csv: cosines on crops held out, as the runs go on; rows of seeds that are
not named again are kept.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import distill_whole, print_table, write_csv
from research import RESULTS
from veca.distill import DistillConfig, read_metrics
from veca.teachers import CallableTeacher

DEPTH = 4
STILL = {"rope_rescale": 1.0, "rope_shift": 0.0}
NAMES = {
    "": "VECA",
    "still": "VECA, coordinates left alone",
    "dense": "dense ViT",
    "dense-still": "dense ViT, coordinates left alone",
    "dense-half": "dense ViT of half the layers, coordinates left alone",
}
NESTED: dict[str, dict[str, Any]] = {
    "VECA, coordinates left alone, always 64 cores": {"budgets": [64]},
    "VECA, coordinates left alone, 64 cores and fewer in each step": {
        "per_step": 2,
        "always": [64],
        "weights": [1, 1, 1, 1, 1, 1, 1, 1],
    },
}
"""Other ways to learn to be elastic, or not to."""


def mirrored(images: Tensor) -> Tensor:
    """[B, 3, H, W] -> [B, 6, H / 16, W / 16]: what the patch at the mirrored place looks like."""
    rough = (images - F.avg_pool2d(images, 3, 1, 1)).abs()
    looks = torch.cat([F.avg_pool2d(x, 16) for x in (images, rough)], dim=1)
    return looks.flip(-1)


def student(*, still: bool = False, dense: bool = False, depth: int = DEPTH) -> dict[str, Any]:
    config = {"depth": depth, "width": 96, "heads": 3, **(STILL if still else {})}
    return {"preset": "tiny", "config": config, "dense": dense}


def settings(steps: int, seed: int, nested: dict[str, Any] | None = None) -> DistillConfig:
    """All students; or VECA alone, which draws its budgets otherwise."""
    table: dict[str, Any] = {
        "seed": seed,
        "device": "cpu",
        "student": student(),
        "siblings": {
            "still": student(still=True),
            "dense": student(dense=True),
            "dense-still": student(still=True, dense=True),
            "dense-half": student(still=True, dense=True, depth=DEPTH // 2),
        },
        "teachers": [{"name": "mirrored", "standardise": True, "standardise_images": 256}],
        "data": {
            "source": "photos:1024",
            "memory_size": 128,
            "hold_out": 64,
            "augment": {"kind": "rrc", "area": [0.35, 1.0]},
        },
        "optimizer": {"name": "normuon", "lr": 3e-3, "lr_min": 1e-4},
        "schedule": {"steps": steps, "warmup": 20, "batch": 32, "size": 96},
        "validation": {"every": 100, "budgets": [8, 64]},
        "follow": {"every": 50, "tensorboard": False},
    }
    if nested is not None:
        table |= {"student": student(still=True), "siblings": {}, "nested": nested}
        table["validation"]["budgets"] = nested.get("budgets", [8, 64])
    return DistillConfig.from_dict(table)


def learnt(config: DistillConfig, names: Mapping[str, str]) -> list[dict[str, object]]:
    """A row for each validation, student and budget of a run; `names` says who a student is."""
    teacher = CallableTeacher(mirrored, width=6, stride=16, name="mirrored")
    with tempfile.TemporaryDirectory() as folder:
        distill_whole(config, folder, teachers=[teacher])
        records = read_metrics(folder, "validation")
    return [
        {
            "student": names[who],
            "cores": "" if who.startswith("dense") else cell["cores"],
            "seed": config.seed,
            "step": record["step"],
            "cls_cos": cell["cls_cos"],
            "dense_cos": cell["dense_cos"],
        }
        for record in records
        for cell in record["grid"]
        for who in (cell.get("student", ""),)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        rows += learnt(settings(options.steps, seed), NAMES)
        for name, nested in NESTED.items():
            rows += learnt(settings(options.steps, seed, nested), {"": name})
    write_csv("routing", rows, options.out, device="cpu", key="seed")
    print_table([row for row in rows if row["step"] == options.steps])


if __name__ == "__main__":
    main()
