"""Peak of live tensor memory, and what counts as running out of it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch

from veca._util.memory import give_back, is_out_of_memory, peak_tensor_memory


def test_peak_counts_what_is_alive_at_once():
    def call() -> torch.Tensor:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        return torch.cat([second, torch.empty(100)])

    result, peak = peak_tensor_memory(call, "cpu")
    assert result.shape == (600,)
    assert peak == 4 * (1000 + 500)  # first and second; later 500 + 100 + 600 are fewer


def test_what_was_alive_before_does_not_count():
    weights = torch.ones(10_000)
    _, peak = peak_tensor_memory(lambda: weights[:10].neg(), "cpu")
    assert peak == 4 * 10


def test_errors_pass_through_and_the_environment_stays():
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError):
        peak_tensor_memory(lambda: 1 / 0, "cpu")
    assert dict(os.environ) == before


def test_out_of_memory_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not agree"))


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc is asked to give memory back"
)
def test_freed_memory_is_given_back():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [b"x" * 60_000 * (i > 0) + b"y" for i in range(2000)]
    blocks = blocks[-1:]  # what is freed lies below what is kept
    before = resident()
    give_back()
    assert before - resident() > 50e6 and len(blocks) == 1
