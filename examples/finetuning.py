"""What the two fine-tuning examples share: options, views of images, the loop, the table.

The part about budgets is in `finetune`: each step draws one and runs the whole batch on that prefix
of the cores.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

import veca
from veca._util.device import usable_device
from veca._util.files import atomic_write, atomic_write_json, atomic_write_text
from veca.bench import machine
from veca.distill import BudgetSampler
from veca.distill.schedule import training_budgets
from veca.errors import VecaError
from veca.images import normalize, to_tensor
from veca.probe.schedule import batches
from veca.weights import weights_hash

SETTINGS = ("steps", "batch", "size", "lr", "head_lr", "seed")
"""Options that a score depends on."""
Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels."""


def options(description: str, out: str) -> argparse.ArgumentParser:
    """The options of both examples."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help="folder with images/ and annotations/ of Oxford-IIIT Pet")
    add("--weights", default="veca_tiny_patch16", help="a name, a folder, ... or fresh:tiny")
    add("--out", type=Path, default=Path(out), help="folder for the table and the weights")
    add("--no-nested", action="store_true", help="train at the full budget only")
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=32)
    add("--size", type=int, default=128, help="side of the square the network sees, in pixels")
    add("--limit", type=int, help="use at most so many images of each split")
    add("--test-limit", type=int, help="the same for the test split alone")
    add("--lr", type=float, default=3e-4, help="of the backbone")
    add("--head-lr", type=float, default=2e-3, help="of the fresh head")
    add("--seed", type=int, default=0)
    add("--device", default="cpu")
    add("--threads", type=int, help="CPU threads")
    return parser


def start(args: argparse.Namespace) -> veca.Veca:
    """Seed everything; the backbone to fine-tune, on the device."""
    if min(args.steps, args.batch) < 1 or args.size < 1 or args.size % 16:
        raise VecaError("--steps and --batch are at least 1, --size a multiple of 16.")
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    device = usable_device(args.device)
    if args.weights.startswith("fresh:"):
        backbone = veca.create_model(args.weights.removeprefix("fresh:")).to(device)
    else:
        backbone = veca.load(args.weights, device=device)
    args.weights_sha256 = weights_hash(backbone)
    return backbone


# ---------------------------------------------------------------------------------------- images


def random_box(size: tuple[int, int], rng: random.Random) -> Box:
    """A random part of an image of (width, height): half of its area or more, nearly its shape."""
    width, height = size
    share = math.sqrt(rng.uniform(0.5, 1.0))
    stretch = math.exp(rng.uniform(-0.15, 0.15))
    w, h = min(1.0, share * stretch) * width, min(1.0, share / stretch) * height
    left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
    return left, top, left + w, top + h


def middle_box(size: tuple[int, int]) -> Box:
    """The largest square in the middle of an image of (width, height)."""
    width, height = size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def view(image: Image.Image, box: Box, size: int) -> Image.Image:
    """That part of an image as a square of `size` pixels."""
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)


def as_batch(images: Sequence[Image.Image], model: veca.Veca) -> Tensor:
    """[B, 3, H, W], normalised as the weights expect it, where the model is."""
    pixels = torch.stack([to_tensor(image) for image in images])
    pixels = normalize(pixels, model.config.image_mean, model.config.image_std)
    return pixels.to(model.patch_embed.weight.device)


def some(count: int, limit: int | None, seed: int) -> list[int]:
    """`limit` of `count` samples, drawn once for all; all of them without a limit."""
    order = np.random.default_rng(seed).permutation(count)
    return sorted(int(i) for i in order[:limit])


# -------------------------------------------------------------------------------------- training


def finetune(
    model: nn.Module,
    backbone: veca.Veca,
    loss_of: Callable[[list[int], int | None, random.Random], Tensor],
    count: int,
    args: argparse.Namespace,
) -> float:
    """Train backbone and head end to end; returns the seconds it took.

    Args:
        loss_of: the loss of a batch of samples (indices below `count`) at a budget (None: all).
    """
    bank = backbone.config.num_cores
    # All budgets alike: the published weights give the smallest one step in twenty.
    even = [1.0] * len(training_budgets(bank))
    budgets = None if args.no_nested else BudgetSampler(bank, weights=even, seed=args.seed)
    fresh = [p for name, p in model.named_parameters() if not name.startswith("backbone.")]
    optimizer = torch.optim.AdamW(
        [
            {"params": list(backbone.parameters()), "lr": args.lr},
            {"params": fresh, "lr": args.head_lr},
        ],
        weight_decay=0.05,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, args.steps))
    rng = random.Random(args.seed)
    recent: list[float] = []
    begin = time.perf_counter()
    model.train()
    for step, chosen in enumerate(batches(count, args.batch, args.steps, args.seed)):
        cores = budgets.draw(step)[0] if budgets else None
        loss = loss_of(chosen.tolist(), cores, rng)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        recent = [*recent[-19:], loss.item()]
        if (step + 1) % 10 == 0 or step + 1 == args.steps:
            mean = sum(recent) / len(recent)
            print(f"step {step + 1}/{args.steps}: loss {mean:.3f} (mean of {len(recent)})")
    model.eval()
    return time.perf_counter() - begin


def _rate(step: int, steps: int) -> float:
    """A short warm-up, then a cosine down to 0."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def chunks(indices: Sequence[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(indices), size):
        yield list(indices[first : first + size])


# --------------------------------------------------------------------------------------- results


def report(
    args: argparse.Namespace,
    backbone: veca.Veca,
    head: nn.Module,
    score: Callable[[int], float],
    metric: str,
    **facts: Any,
) -> dict[str, Any]:
    """Score every eighth of the bank; write results.json, results.md and the weights to `--out`."""
    begin = time.perf_counter()
    scores = {}
    for cores in training_budgets(backbone.config.num_cores):
        scores[cores] = score(cores)
        print(f"{cores} cores: {metric} {scores[cores]:.3f}")
    full = scores[backbone.config.num_cores]
    results = {
        "metric": metric,
        "nested": not args.no_nested,
        "scores": {str(cores): value for cores, value in scores.items()},
        # No paths: the file may be published.
        "weights": args.weights if args.weights.startswith("fresh:") else Path(args.weights).name,
        "weights_sha256": args.weights_sha256,
        "settings": {name: getattr(args, name) for name in SETTINGS},
        "evaluation_seconds": round(time.perf_counter() - begin, 1),
        **facts,
        "machine": asdict(machine(args.device)),
    }
    lines = [f"| cores | {metric} | of the full budget |", "|---:|---:|---:|"]
    for cores, value in scores.items():
        kept = f"{value / full:.0%}" if full else ""
        lines.append(f"| {cores} | {value:.3f} | {kept} |")
    args.out.mkdir(parents=True, exist_ok=True)
    atomic_write_json(args.out / "results.json", results)
    atomic_write_text(args.out / "results.md", "\n".join(lines) + "\n")
    provenance = {"finetuned": {k: v for k, v in results.items() if k != "scores"}}
    veca.save(backbone, args.out / "backbone", provenance=provenance)
    save_head(head, args.out / "head.safetensors", backbone)
    print(f"wrote {args.out}")
    return results


def save_head(head: nn.Module, path: Path, backbone: veca.Veca) -> None:
    """The head's tensors, and the hash of the backbone that it belongs to."""
    state = {name: tensor.cpu().contiguous() for name, tensor in head.state_dict().items()}
    with atomic_write(path) as file:
        file.write(save(state, {"backbone_sha256": weights_hash(backbone)}))


def run(main: Callable[[], object]) -> None:
    """Bad input is one line, not a traceback."""
    try:
        main()
    except VecaError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
