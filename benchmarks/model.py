"""Whole networks of ViT-B/16 size: VECA's engine against a compiled dense DINOv3-B, in one run.

    PYTHONPATH=src python benchmarks/model.py

Both in bfloat16, blocks compiled, one CUDA graph a shape; the dense model with the faster of its
two fused attentions. Writes results/model.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from common import (
    RESULTS,
    capture,
    matmul_rate,
    peak_memory,
    print_table,
    time_side_by_side,
    write_csv,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import veca

SHAPES = ((1, 256), (64, 256), (16, 512), (8, 1024), (1, 2048), (2, 2048))
BUDGETS = (8, 64)


def dinov3_base() -> torch.nn.Module:
    """DINOv3 ViT-B/16 as transformers has it, with random weights."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    config = DINOv3ViTConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_register_tokens=4,
        attn_implementation="sdpa",
    )
    model = DINOv3ViTModel(config).cuda().to(torch.bfloat16).eval()
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--shapes", nargs="+", default=[f"{b}x{s}" for b, s in SHAPES])
    options = parser.parse_args()
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
        images = torch.randn(batch, 3, size, size, device="cuda", dtype=torch.bfloat16)
        with torch.inference_mode():
            calls = dense_calls(dense, images)
            memory = {"dense": peak_memory(lambda: dense(images))}
            for cores in BUDGETS:
                engine.prepare(batch, size, cores)
                plan = next(reversed(engine._prepared.values()))
                plan.images.copy_(images)
                calls[f"veca {cores}"] = plan.graph.replay
                memory[f"veca {cores}"] = peak_memory(
                    lambda c=cores, p=plan: engine.forward(images, c, p.rotation)
                )
            times = time_side_by_side(calls)
        best = min(times["dense flash"], times["dense cuDNN"])
        row: dict[str, object] = {"batch": batch, "pixels": size}
        row |= {f"{name} ms": ms for name, ms in times.items()}
        for cores in BUDGETS:
            floor = veca.cost("base", size, cores).veca.flops * batch / rate / 1e9
            row[f"speed-up {cores}"] = best / times[f"veca {cores}"]
            row[f"over floor {cores}"] = times[f"veca {cores}"] / floor
        row |= {f"{name} MiB": mib for name, mib in memory.items()}
        rows.append(row | {"matmul TFLOP/s": rate})
        print_table(rows[-1:])
        write_csv("model", rows, options.out)
        del calls
        engine._prepared.clear()
    print_table(rows)


if __name__ == "__main__":
    main()
