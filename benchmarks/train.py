"""A training step of the student: the fast path against eager SDPA, in one run.

    python -m benchmarks train

Forward, backward and AdamW of `base` under bfloat16 autocast. "fast" takes the Triton attention
and compiled blocks; "sdpa" is the same model, eager, on two SDPA calls. Writes results/train.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

import veca
from benchmarks.common import peak_memory, print_table, time_side_by_side, write_csv
from benchmarks.rows import RESULTS

SHAPES = ((128, 256), (16, 768))


def stepper(batch: int, size: int, *, fast: bool) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    model = veca.create_model("base", backend="triton" if fast else "sdpa").cuda().train()
    if fast:
        for block in model.blocks:
            block.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randn(batch, 3, size, size, device="cuda")
    target = torch.randn(1, 1, 768, device="cuda")

    def step() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(images, cores=64)
        loss = (out.patches.float() - target).square().mean() + out.cls.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=RESULTS)


def run(options: argparse.Namespace) -> None:
    rows = []
    for batch, size in SHAPES:
        torch._dynamo.reset()
        steps = {"sdpa": stepper(batch, size, fast=False), "fast": stepper(batch, size, fast=True)}
        losses = {}
        for name, step in steps.items():
            torch.manual_seed(1)
            losses[name] = [float(step()) for _ in range(3)]
        print(f"{batch} x {size}: first losses {losses}")
        if not torch.allclose(
            torch.tensor(losses["sdpa"]), torch.tensor(losses["fast"]), rtol=2e-2, atol=0
        ):
            raise SystemExit(f"the fast step does not follow the plain one: {losses}")
        memory = {name: peak_memory(step) for name, step in steps.items()}
        times = time_side_by_side(steps, seconds=1.5)
        row: dict[str, object] = {"batch": batch, "pixels": size}
        for name in steps:
            row[f"{name} ms"] = times[name]
            row[f"{name} images/s"] = batch / times[name] * 1e3
            row[f"{name} MiB"] = memory[name]
        row["speed-up"] = times["sdpa"] / times["fast"]
        rows.append(row)
        write_csv("train", rows, options.out)
        del steps
        torch.cuda.empty_cache()
    print_table(rows)
