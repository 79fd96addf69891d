"""Passes of distillation recorded as CUDA graphs beside the same passes launched by the host.

    python -m benchmarks recorded

Whole steps at one size with C = 32: EfficientNet-Lite2 in the loop, blocks compiled, NorMuon, the
images in the GPU's memory (random pixels: only speed is measured here). Launched and recorded take
turns, in rounds. Writes results/recorded.csv.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.common import print_table, random_images, write_csv
from benchmarks.rows import RESULTS
from veca.data import InMemoryImages
from veca.distill import DistillConfig
from veca.distill.loop import TrainingRun
from veca.distill.parallel import World, own_torch_state
from veca.distill.step import training_step
from veca.teachers import Teacher, load_teacher

CORES, WARM_UP, STEPS, ROUNDS = 32, 4, 15, 3


def settings(students: list[str], size: int, batch: int, recorded: bool) -> DistillConfig:
    """A run of one student, or of several beside it."""
    first, *others = ({"preset": s, "compile": True, "graphs": recorded} for s in students)
    return DistillConfig.from_dict(
        {
            "student": first,
            "siblings": {other["preset"]: other for other in others},
            "teachers": [{"name": "efficientnet-lite2", "kl": 1.0}],
            "nested": {"budgets": [CORES], "weights": [1.0]},
            "data": {"augment": {"kind": "rrc"}},
            "optimizer": {"name": "normuon", "lr": 1e-3, "clip": 1.0},
            "schedule": {"steps": 1000, "warmup": 10, "batch": batch, "size": size},
            "checkpoint": {"every": 0},
            "follow": {"every": 1000, "tensorboard": False},
        }
    )


@contextmanager
def stepping(
    config: DistillConfig, images: InMemoryImages, teacher: Teacher
) -> Iterator[Callable[[], None]]:
    """A function that makes one step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(device=torch.device("cuda", torch.cuda.current_device()))
        run = TrainingRun(config, Path(folder) / "run", world, images, None, [teacher], False, None)
        steps = iter(run.plan.from_step(0))

        def step() -> None:
            planned = next(steps)
            training_step(run.group, planned, run.loader.batch(planned.number))

        try:
            yield step
        finally:
            run.close()


def milliseconds(step: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / STEPS * 1e3


def compare(
    students: str, size: int, batch: int, images: InMemoryImages, teacher: Teacher
) -> dict[str, object]:
    """Both ways of the same steps, in turns."""
    here = students.split("+")
    plain, graphs = (settings(here, size, batch, recorded) for recorded in (False, True))
    with (
        stepping(plain, images, teacher) as launched,
        stepping(graphs, images, teacher) as recorded,
    ):
        for step in (launched, recorded):
            for _ in range(WARM_UP):
                step()
        rounds = [(milliseconds(launched), milliseconds(recorded)) for _ in range(ROUNDS)]
    before, after = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {
        "students": students,
        "size": size,
        "batch": batch,
        "cores": CORES,
        "launched ms": before,
        "recorded ms": after,
        "images/s": batch / after * 1e3,
        "speed-up": before / after,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--students", nargs="+", default=["small+tiny", "small", "tiny"])
    parser.add_argument("--size", type=int, default=192)
    parser.add_argument("--batch", type=int, default=512)


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    images = random_images(224, device)
    teacher = load_teacher("efficientnet-lite2", device=device, dtype=torch.bfloat16)
    rows: list[dict[str, object]] = []
    with own_torch_state(device):
        for students in options.students:
            rows.append(compare(students, options.size, options.batch, images, teacher))
            write_csv("recorded", rows, options.out)
    print_table(rows)
