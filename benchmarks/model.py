"""Whole networks of ViT-B/16 size: VECA's engine against a compiled dense DINOv3-B, in one run.

    python -m benchmarks model

Both in bfloat16, blocks compiled, one CUDA graph a shape; the dense model with the faster of its
two fused attentions. Writes results/model.csv.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import veca
from benchmarks.common import (
    capture,
    matmul_rate,
    peak_memory,
    print_table,
    time_side_by_side,
    write_csv,
)
from benchmarks.rows import RESULTS

SHAPES = ((1, 256), (64, 256), (16, 512), (8, 1024), (1, 2048), (2, 2048))
BUDGETS = (8, 64)
SWEEP = {(8, 1024): (8, 16, 32, 64)}
"""Shapes at which more budgets are measured, for the plot of time against budget."""


def dinov3_base() -> Any:
    """DINOv3 ViT-B/16 as transformers has it, with random weights."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    config: Any = DINOv3ViTConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_register_tokens=4,
    )
    config._attn_implementation = "sdpa"
    model: Any = DINOv3ViTModel(config)
    model = model.cuda().to(torch.bfloat16).eval()
    layers = model.layer if hasattr(model, "layer") else model.model.layer
    for layer in layers:
        layer.compile(dynamic=False)
    return model


def dense_calls(model: torch.nn.Module, images: Tensor) -> dict[str, Callable[[], object]]:
    calls = {}
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
    ):
        torch._dynamo.reset()

        def run(backend: SDPBackend = backend) -> object:
            with sdpa_kernel(backend):
                return model(images).last_hidden_state

        calls[f"dense {name}"] = capture([run])
    return calls


def check(model: veca.Veca, engine: Callable[..., veca.VecaOutput]) -> None:
    """The engine against the plain model in float32."""
    images = torch.randn(2, 3, 256, 256, device="cuda")
    for cores in BUDGETS:
        with torch.no_grad():
            exact = model(images, cores=cores).patches
        error = ((engine(images, cores=cores).patches.float() - exact).norm() / exact.norm()).item()
        if not error < 2e-2:
            raise SystemExit(f"the engine is wrong: relative error {error} at {cores} cores")
        print(f"engine against float32 model, {cores} cores: relative error {error:.1e}")


def measure(
    engine: veca.InferenceEngine, dense: torch.nn.Module, batch: int, size: int, rate: float
) -> dict[str, object]:
    images = torch.randn(batch, 3, size, size, device="cuda", dtype=torch.bfloat16)
    budgets = SWEEP.get((batch, size), BUDGETS)
    with torch.inference_mode():
        calls = dense_calls(dense, images)
        memory = {"dense": peak_memory(lambda: dense(images))}
        for cores in budgets:
            plan = engine.prepare(batch, size, cores)
            plan.images.copy_(images)
            calls[f"veca {cores}"] = plan.replay
            memory[f"veca {cores}"] = peak_memory(functools.partial(plan.forward, images))
        times = time_side_by_side(calls)
    best = min(times["dense flash"], times["dense cuDNN"])
    row: dict[str, object] = {"batch": batch, "pixels": size}
    row |= {f"{name} ms": ms for name, ms in times.items()}
    for cores in budgets:
        floor = veca.cost("base", size, cores).veca.flops * batch / rate / 1e9
        row[f"speed-up {cores}"] = best / times[f"veca {cores}"]
        row[f"over floor {cores}"] = times[f"veca {cores}"] / floor
    row |= {f"{name} MiB": mib for name, mib in memory.items()}
    return row | {"matmul TFLOP/s": rate}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--shapes", nargs="+", default=[f"{b}x{s}" for b, s in SHAPES])


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch._dynamo.config.cache_size_limit = 64
    model = veca.create_model("base").cuda().eval()
    engine = veca.compile_for_inference(model, cache=1)
    check(model, engine)
    dense = dinov3_base()
    rate = matmul_rate()
    rows = []
    for shape in options.shapes:
        batch, size = (int(x) for x in shape.split("x"))
        rows.append(measure(engine, dense, batch, size, rate))
        print_table(rows[-1:])
        write_csv("model", rows, options.out)
    print_table(rows)
