"""Random choices of a step: pure functions of the seed and the step.

No state and no communication: every rank draws the same, and a run that resumes draws what the
uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from veca.data.draws import sample_keys, uniform

T = TypeVar("T")

# One number for each kind of draw, so that none tells anything about another.
_BUDGET, _SIZE, _TORCH = 1, 2, 3


def weighted_choice(number: float, items: Sequence[T], weights: Sequence[float]) -> T:
    """The item that `number`, uniform in [0, 1), falls on when items get room by weight."""
    target = number * sum(weights)
    for item, weight in zip(items, weights, strict=True):
        target -= weight
        if target < 0:
            return item
    return [item for item, weight in zip(items, weights, strict=True) if weight > 0][-1]


def budget_number(seed: int, step: int, draw: int) -> float:
    """Uniform in [0, 1), for the `draw`-th budget of a step."""
    return _uniform(seed, step, _BUDGET, draw)


def size_number(seed: int, step: int) -> float:
    """Uniform in [0, 1), for the image size of a step."""
    return _uniform(seed, step, _SIZE, 0)


def seed_torch(seed: int, step: int, draw: int = 0) -> None:
    """Put torch's generators where the `draw`-th pass of a step begins.

    The student's own random numbers follow from there: the same for every part of the batch, so
    that splitting it among ranks or in time changes nothing.
    """
    number = int(_uniform(seed, step, _TORCH, draw) * 2**53)
    torch.manual_seed(number)


def _uniform(seed: int, step: int, kind: int, draw: int) -> float:
    return float(uniform(sample_keys(seed, step, kind), draw)[0])
