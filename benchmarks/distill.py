"""Throughput of distillation on one GPU: teacher in the loop, seeing the same augmented pixels.

    python -m benchmarks distill

The student is `small` at 192 px, blocks compiled, NorMuon, images in the GPU's memory (random
pixels: only speed is measured here). Each teacher's run is put beside the student alone (a teacher
that answers at once) and the teacher alone. Writes results/distill.csv.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import distill_whole, print_table, random_images, write_csv
from benchmarks.rows import RESULTS
from veca.data import InMemoryImages
from veca.distill import DistillConfig, read_metrics
from veca.teachers import CallableTeacher, Teacher, load_teacher

DEVICE = "cuda"
SIZE, BATCH, STEPS, EVERY = 192, 1024, 120, 10
BUDGETS = (8, 64)
"""Two of the published eight, drawn equally: each one is compiled."""


def settings(name: str, steps: int) -> DistillConfig:
    real = name != "instant"
    return DistillConfig.from_dict(
        {
            "student": {"preset": "small", "compile": True},
            "teachers": [{"name": name, "standardise": real, "standardise_images": 2048,
                          "compile": real}],
            "nested": {"budgets": list(BUDGETS), "weights": [1.0, 1.0]},
            "data": {"augment": {"kind": "rrc"}},
            "optimizer": {"name": "normuon", "lr": 1e-3},
            "schedule": {"steps": steps, "warmup": 10, "batch": BATCH, "size": SIZE},
            "checkpoint": {"every": 0},
            "follow": {"every": EVERY, "tensorboard": False},
        }
    )  # fmt: skip


def dinov3_small(folder: Path) -> str:
    """DINOv3 ViT-S/16 with random weights, in the format of the real ones."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    config: Any = DINOv3ViTConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_register_tokens=4,
    )
    model: Any = DINOv3ViTModel(config)
    model.save_pretrained(folder)
    return str(folder)


def instant(width: int) -> Teacher:
    """A teacher that knows its answer: what is left is the student's own time."""

    def answer(pixels: torch.Tensor) -> Any:
        count, _, height, width_px = pixels.shape
        cells = (height // 16) * (width_px // 16)
        return pixels.new_ones(count, width), pixels.new_ones(count, cells, width)

    return CallableTeacher(answer, width=width, stride=16, name="instant")


def loop_speed(name: str, images: InMemoryImages, teacher: Teacher) -> tuple[float, float]:
    """Images a second and the share of time waited for data, when all is compiled."""
    with tempfile.TemporaryDirectory() as folder:
        distill_whole(settings(name, STEPS), folder, source=images, teachers=[teacher])
        records = [r for r in read_metrics(folder) if "images_per_second" in r]
    settled = records[len(records) // 2 :]
    return (
        statistics.median(r["images_per_second"] for r in settled),
        statistics.median(r["data_wait"] for r in settled),
    )


def teacher_speed(teacher: Teacher) -> float:
    cells = SIZE // 16
    pixels = torch.rand(BATCH, 3, *teacher.input_size((cells, cells)), device=DEVICE)
    for _ in range(3):
        teacher.features(pixels, (cells, cells))
    torch.cuda.synchronize()
    start, rounds = time.perf_counter(), 10
    for _ in range(rounds):
        teacher.features(pixels, (cells, cells))
    torch.cuda.synchronize()
    return rounds * BATCH / (time.perf_counter() - start)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--teachers", nargs="+", default=["efficientnet-lite2", "dinov3-vits16"])


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    images = random_images(256, DEVICE)
    rows: list[dict[str, object]] = []
    for name in options.teachers:
        with tempfile.TemporaryDirectory() as folder:
            source = dinov3_small(Path(folder)) if name.startswith("dinov3") else name
            teacher = load_teacher(source, device=DEVICE, dtype=torch.bfloat16)
        together, waited = loop_speed(name, images, teacher)
        own = teacher_speed(teacher)
        student, _ = loop_speed("instant", images, instant(teacher.width))
        ideal = 1 / (1 / own + 1 / student)
        rows.append(
            {
                "teacher": name,
                "size": SIZE,
                "batch": BATCH,
                "images/s": together,
                "teacher alone images/s": own,
                "student alone images/s": student,
                "share of both in turn": together / ideal,
                "waited for data": waited,
            }
        )
        print_table(rows[-1:])
        write_csv("distill", rows, options.out)
        torch._dynamo.reset()
    print_table(rows)
