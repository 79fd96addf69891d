"""Which weights to look at: named ones, or fresh ones that are called so."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from veca.model import Veca, create_model
from veca.weights import find, load

DEFAULT_WEIGHTS = "veca_tiny_patch16"
"""What is looked at where no weights are named."""
FRESH = (
    "These are fresh random weights, not trained ones: costs and times are real, but the features "
    "and the pictures mean nothing yet."
)


class ShownModel(NamedTuple):
    """A model to look at."""

    name: str
    model: Veca
    fresh: bool
    """Whether nothing has been learned: then pictures must say so."""


def load_or_fresh(weights: str | None = None, device: torch.device | str = "cpu") -> ShownModel:
    """What `veca.load` finds under `weights`; by default the bundled tiny weights.

    Where there are none, fresh ones of that shape, the same each time.
    """
    if weights is None and find(DEFAULT_WEIGHTS) is None:
        return ShownModel(f"{DEFAULT_WEIGHTS}, fresh", fresh_model().to(device), True)
    name = weights or DEFAULT_WEIGHTS
    model = load(name, device=device)
    return ShownModel(name, model, is_fresh(model))


def fresh_model(name: str = DEFAULT_WEIGHTS) -> Veca:
    """A preset with fresh weights, the same each time; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create_model(name).eval()


def is_fresh(model: nn.Module) -> bool:
    """Whether every norm and bias still has its initial value, which no training step leaves."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm) and not bool((module.weight == 1).all()):
            return False
        bias = getattr(module, "bias", None)
        if isinstance(bias, torch.Tensor) and bool((bias != 0).any()):
            return False
    return True
