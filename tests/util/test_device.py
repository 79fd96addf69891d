"""A device that is not there: the message says why, and what is there."""

from __future__ import annotations

import pytest
import torch

from veca._util.device import usable_device
from veca.errors import InputError


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GPUs, and a torch with or without CUDA, on which nothing works."""

    def make(*, built, gpus=0, mps=False):
        def refuse(*args, **kwargs):
            raise RuntimeError("a line of torch's\nand another")

        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch, "empty", refuse)

    return make


@pytest.mark.parametrize(
    ("there", "asked", "why", "instead"),
    [
        ({"built": False}, "cuda", "without CUDA", "cpu"),
        ({"built": False}, "cuda:1", "without CUDA", "cpu"),
        ({"built": False, "mps": True}, "cuda", "without CUDA", "mps"),
        ({"built": True}, "cuda", "no GPU", "cpu"),
        ({"built": True}, "mps", "Apple", "cpu"),
        ({"built": True, "gpus": 1}, "cuda:7", "a line of torch's", "cuda"),
        ({"built": True, "gpus": 4}, "cuda:7", "a line of torch's", "cuda:3"),
    ],
)
def test_what_is_missing_and_what_is_there(machine, there, asked, why, instead):
    machine(**there)
    with pytest.raises(InputError, match=rf"{asked!r}.*{why}.*\b{instead}\W*$") as caught:
        usable_device(asked)
    assert "\n" not in str(caught.value)


def test_a_device_that_is_there():
    assert usable_device("cpu") == torch.device("cpu")
