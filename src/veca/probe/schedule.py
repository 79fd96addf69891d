"""What training takes in which order and at which rate; all of it follows from the seed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from veca.probe.protocol import AdamW

_PURPOSES = ("split", "subset", "order", "init", "dropout", "augment", "resample")


def generator(seed: int, purpose: str, *more: int) -> np.random.Generator:
    """Random numbers of their own for each purpose; the same on every machine and device."""
    return np.random.default_rng([seed, _PURPOSES.index(purpose), *more])


def torch_generator(seed: int, purpose: str) -> torch.Generator:
    """The same for torch; on the CPU, so that a GPU trains from the same numbers."""
    number = int(generator(seed, purpose).integers(2**62))
    return torch.Generator().manual_seed(number)


def batches(count: int, batch: int, iterations: int, seed: int) -> Iterator[np.ndarray]:
    """Indices 0..count-1 for each iteration: shuffled anew for each pass, cut where it falls."""
    left = np.empty(0, dtype=np.int64)
    epoch = 0
    for _ in range(iterations):
        while len(left) < batch:
            left = np.concatenate([left, generator(seed, "order", epoch).permutation(count)])
            epoch += 1
        yield left[:batch]
        left = left[batch:]


def cosine(step: int, steps: int, final: float = 0.0) -> float:
    """From 1 at step 0 down to `final` at step `steps`."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * step / max(1, steps)))


def rate(settings: AdamW, step: int) -> float:
    """The learning rate at a step from 0 on: warm-up, then decay to `final_lr`."""
    if step < settings.warmup:
        share = step / settings.warmup
        return settings.lr * (settings.warmup_start + (1 - settings.warmup_start) * share)
    steps = max(1, settings.iterations - settings.warmup)
    if settings.schedule == "poly":
        left = (1 - (step - settings.warmup) / steps) ** settings.power
        return settings.final_lr + (settings.lr - settings.final_lr) * left
    return settings.lr * cosine(step - settings.warmup, steps, settings.final_lr / settings.lr)
