"""Can patches learn to fetch something from a place? With and without moved coordinates.

    PYTHONPATH=src python benchmarks/routing.py --seeds 0 1 2

The teacher says of each patch what the patch at the mirrored place looks like (mean colour and
roughness), so a student has to carry things across the image by position alone. Four students
learn it in one run from the same batches: VECA and a dense ViT, each as published (in training the
patches' coordinates are shifted and stretched, those of the cores are not) and without that. Six
minutes of one core for a seed. Writes results/routing.csv: cosines on crops held out, as the run
goes on.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from common import print_table, write_csv
from rows import RESULTS
from veca.distill import DistillConfig, distill, read_metrics
from veca.teachers import CallableTeacher

STUDENT = {"preset": "tiny", "config": {"depth": 4, "width": 96, "heads": 3}}
STILL = {"rope_rescale": 1.0, "rope_shift": 0.0}
NAMES = {
    "": "VECA",
    "still": "VECA, coordinates left alone",
    "dense": "dense ViT",
    "dense-still": "dense ViT, coordinates left alone",
}


def mirrored(images: Tensor) -> Tensor:
    """[B, 3, H, W] -> [B, 6, H / 16, W / 16]: what the patch at the mirrored place looks like."""
    rough = (images - F.avg_pool2d(images, 3, 1, 1)).abs()
    looks = torch.cat([F.avg_pool2d(x, 16) for x in (images, rough)], dim=1)
    return looks.flip(-1)


def settings(steps: int, seed: int) -> DistillConfig:
    still = {**STUDENT, "config": {**STUDENT["config"], **STILL}}  # type: ignore[dict-item]
    table: dict[str, Any] = {
        "seed": seed,
        "device": "cpu",
        "student": STUDENT,
        "siblings": {
            "still": still,
            "dense": {**STUDENT, "dense": True},
            "dense-still": {**still, "dense": True},
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
    return DistillConfig.from_dict(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    teacher = CallableTeacher(mirrored, width=6, stride=16, name="mirrored")
    rows: list[dict[str, object]] = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            distill(settings(options.steps, seed), folder, teachers=[teacher])
            for record in read_metrics(folder, "validation"):
                for cell in record["grid"]:
                    student = cell.get("student", "")
                    rows.append(
                        {
                            "student": NAMES[student],
                            "cores": "" if student.startswith("dense") else cell["cores"],
                            "seed": seed,
                            "step": record["step"],
                            "cls_cos": cell["cls_cos"],
                            "dense_cos": cell["dense_cos"],
                        }
                    )
    write_csv("routing", rows, options.out, device="cpu")
    print_table([row for row in rows if row["step"] == options.steps])


if __name__ == "__main__":
    main()
