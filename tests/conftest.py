"""Shared by all tests: one thread, fixed seeds, small models."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import interpreter
from veca import Veca, VecaConfig, create_model

torch.set_num_threads(1)
interpreter.prepare()

# The same examples every time where a failure must mean that the change broke something.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

SMALLEST = VecaConfig(depth=3, width=32, heads=2, num_cores=8)


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the user's is used, and nothing is left there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VECA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny() -> Veca:
    """Three layers, eight cores, every parameter away from its initial value, in eval mode."""
    return stirred(create_model(SMALLEST)).eval()


def stirred(model: torch.nn.Module, amount: float = 0.1) -> torch.nn.Module:
    """Move every parameter, so that zeros and ones of a fresh model hide nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * amount)
    return model
