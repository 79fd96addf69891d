"""Core attention on a GPU: one pass, two SDPA calls, dense flash, dense cuDNN; in one run.

    python -m benchmarks attention

Correctness first (against the float64 definition), then times under CUDA graphs over several
input sets, so that neither launches nor the cache flatter anyone. Writes results/attention.csv.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import (
    capture,
    copy_bandwidth,
    peak_memory,
    print_table,
    time_side_by_side,
    write_csv,
)
from benchmarks.rows import RESULTS
from veca import rope
from veca.attention import core_attention

SHAPES = ((1, 4096), (1, 16384), (32, 256), (32, 1024), (8, 4096))
FLOAT32_SHAPES = ((1, 1024), (8, 1024), (8, 4096))
"""Where one pass is put beside two SDPA calls in float32 as well, to know which to take."""
HEADS, WIDTH = 12, 64
SECONDS = 0.25
"""Spent on each contender at each shape."""


def inputs(
    batch: int, tokens: int, grad: bool, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """q, k, v as a fused projection leaves them: slices of one [B, T, 3, H, d] buffer."""
    packed = torch.randn(batch, tokens, 3, HEADS, WIDTH, device="cuda", dtype=dtype)
    return [x.transpose(1, 2).detach().requires_grad_(grad) for x in packed.unbind(2)]


def tables(batch: int, cores: int, patches: int) -> dict[str, Any]:
    periods = rope.periods(WIDTH, 100.0, 0.125, torch.device("cuda"))
    core_xy = torch.rand(batch, cores, 2, device="cuda") * 2 - 1
    patch_xy = torch.rand(1, patches, 2, device="cuda") * 2 - 1
    core, patch = rope.rotation(core_xy, periods), rope.rotation(patch_xy, periods)
    # In bfloat16, as the inference engine hands them over.
    return {
        "core_rotation": rope.Rotation(*(table.bfloat16() for table in core)),
        "patch_rotation": rope.Rotation(*(table.bfloat16() for table in patch)),
    }


def contenders(
    batch: int, patches: int, cores: int
) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    turn = tables(batch, cores, patches)
    # As after merging: some tokens stand for four patches.
    counts = torch.where(torch.rand(batch, patches, device="cuda") < 0.3, 4.0, 1.0)

    def dense(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q[:, :, cores:], k[:, :, cores:], v[:, :, cores:]
                )

        return run

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return core_attention(q, k, v, cores, backend="sdpa")

    return {
        "one pass": lambda q, k, v: core_attention(q, k, v, cores, backend="triton"),
        "one pass, rotating": lambda q, k, v: core_attention(
            q, k, v, cores, backend="triton", **turn
        ),
        "one pass, rotating, multiplicity": lambda q, k, v: core_attention(
            q, k, v, cores, backend="triton", multiplicity=counts, **turn
        ),
        "two SDPA": lambda q, k, v: core_attention(q, k, v, cores, backend="sdpa"),
        "two SDPA, rotating": lambda q, k, v: core_attention(
            q, k, v, cores, backend="sdpa", **turn
        ),
        "two SDPA, flash": flash,
        "dense flash": dense(SDPBackend.FLASH_ATTENTION),
        "dense cuDNN": dense(SDPBackend.CUDNN_ATTENTION),
    }


def check(cores: int) -> None:
    """Values and gradients of the kernels against the definition in float64."""
    for patches, weighted in itertools.product((1000, 4097), (False, True)):
        q, k, v = inputs(2, cores + patches, grad=True)
        turn = tables(2, cores, patches)
        if weighted:
            turn["multiplicity"] = torch.randint(0, 5, (2, patches), device="cuda").float()
        upstream = torch.randn_like(q)
        got = core_attention(q, k, v, cores, backend="triton", **turn)
        grads = torch.autograd.grad(got, (q, k, v), upstream)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact = core_attention(wide[0], wide[1], wide[2], cores, backend="reference", **turn)
        exact_grads = torch.autograd.grad(exact, wide, upstream.double())
        for name, a, b in zip(
            ("out", "dq", "dk", "dv"), (got, *grads), (exact, *exact_grads), strict=True
        ):
            error = ((a.double() - b).norm() / b.norm()).item()
            if not error < 1e-2:
                raise SystemExit(
                    f"{name} is wrong: relative error {error} at C={cores} N={patches}"
                )


def both(run: Callable[..., Tensor], qkv: list[Tensor], upstream: Tensor) -> object:
    """Forward and backward."""
    return torch.autograd.grad(run(*qkv), qkv, upstream)


def measure(batch: int, patches: int, cores: int, peak: float) -> dict[str, object]:
    tokens = patches + cores
    size = batch * tokens * HEADS * WIDTH * 2
    sets = max(2, min(8, 400_000_000 // (4 * size)))
    runs = contenders(batch, patches, cores)
    row: dict[str, object] = {
        "batch": batch, "patches": patches, "cores": cores, "dtype": "bfloat16",
    }  # fmt: skip

    forward_sets = [inputs(batch, tokens, grad=False) for _ in range(sets)]
    with torch.inference_mode():
        calls = {
            name: capture([functools.partial(run, *qkv) for qkv in forward_sets])
            for name, run in runs.items()
        }
        times = {n: ms / sets for n, ms in time_side_by_side(calls, seconds=SECONDS).items()}
    row |= {f"{name} ms": ms for name, ms in times.items()}
    for name in ("one pass", "one pass, rotating"):
        row[f"{name}, share of copy"] = 4 * size / times[name] / 1e9 / peak
    row["vs two SDPA"] = times["two SDPA"] / times["one pass"]
    row["vs two SDPA, flash"] = times["two SDPA, flash"] / times["one pass"]
    rotating = times["one pass, rotating"]
    row["rotating vs two SDPA, rotating"] = times["two SDPA, rotating"] / rotating
    row["multiplicity vs without"] = times["one pass, rotating, multiplicity"] / rotating
    row["vs dense cuDNN"] = times["dense cuDNN"] / times["one pass"]
    row["rotating vs dense cuDNN"] = times["dense cuDNN"] / rotating
    del calls, forward_sets

    training_sets = [inputs(batch, tokens, grad=True) for _ in range(min(sets, 3))]

    upstream = torch.randn(batch, tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    upstream = upstream.transpose(1, 2)
    calls, memory = {}, {}
    for name in (
        "one pass", "one pass, rotating", "one pass, rotating, multiplicity",
        "two SDPA", "two SDPA, rotating",
    ):  # fmt: skip
        steps = [functools.partial(both, runs[name], qkv, upstream) for qkv in training_sets]
        memory[name] = peak_memory(steps[0])
        calls[name] = capture(steps)
    step = {
        n: ms / len(training_sets) for n, ms in time_side_by_side(calls, seconds=SECONDS).items()
    }
    row |= {f"{name} fwd+bwd ms": ms for name, ms in step.items()}
    row["fwd+bwd vs two SDPA"] = step["two SDPA"] / step["one pass"]
    row["fwd+bwd vs two SDPA, rotating"] = step["two SDPA, rotating"] / step["one pass, rotating"]
    row |= {f"{name} fwd+bwd MiB": mib for name, mib in memory.items()}
    return row


def measure_float32(batch: int, patches: int, cores: int) -> dict[str, object]:
    runs = contenders(batch, patches, cores)
    plain = inputs(batch, patches + cores, grad=False, dtype=torch.float32)
    learning = inputs(batch, patches + cores, grad=True, dtype=torch.float32)
    upstream = torch.randn_like(plain[0])
    row: dict[str, object] = {
        "batch": batch, "patches": patches, "cores": cores, "dtype": "float32",
    }  # fmt: skip
    names = ("one pass, rotating", "two SDPA, rotating")
    with torch.inference_mode():
        calls = {name: capture([functools.partial(runs[name], *plain)]) for name in names}
        row |= {f"{n} ms": ms for n, ms in time_side_by_side(calls, seconds=SECONDS).items()}
    steps = {
        name: capture([functools.partial(both, runs[name], learning, upstream)]) for name in names
    }
    row |= {f"{n} fwd+bwd ms": ms for n, ms in time_side_by_side(steps, seconds=SECONDS).items()}
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--cores", type=int, nargs="+", default=[64, 8])


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    for cores in options.cores:
        check(cores)
    peak = copy_bandwidth()
    rows = []
    for cores in options.cores:
        for batch, patches in SHAPES:
            rows.append(measure(batch, patches, cores, peak) | {"copy TB/s": peak})
            write_csv("attention", rows, options.out)
    for words in ((" ms",), ("share",), ("vs ",), ("MiB",)):
        shown = [k for k in rows[0] if any(word in k for word in words)]
        print_table([{k: row[k] for k in ("batch", "patches", "cores", *shown)} for row in rows])
        print()
    single = [measure_float32(batch, patches, 64) for batch, patches in FLOAT32_SHAPES]
    write_csv("attention", rows + single, options.out)
    print_table(single)
    print(f"copy bandwidth {peak:.2f} TB/s")
