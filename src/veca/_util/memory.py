"""How much memory a call needs, whether an error means there was not enough, giving it back."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def peak_tensor_memory(call: Callable[[], T], device: torch.device | str) -> tuple[T, float]:
    """Run `call` once; return its result and the peak of live tensor memory, in bytes.

    Counted is what `call` allocates on `device` through torch, its result included; what was
    alive before (weights, input) is not, nor are libraries' private buffers. On a CPU the number
    is exact and repeatable, which the peak of a process's resident memory is not: torch reports
    every allocation and release, and the peak of their running sum is taken. On CUDA it comes
    from the caching allocator. On other devices it is NaN.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return call(), math.nan
    with (
        _quiet_profiler(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        result = call()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda event: event[0]):
        live += change
        peak = max(peak, live)
    return result, peak


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler's library announces each start and stop on stderr; ask it not to."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The CPU allocator has no exception class of its own.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def give_back() -> None:
    """Return freed memory to the system, where the C library would keep it (glibc).

    It keeps some for each thread: one large image decoded in each of twelve took 2.4 GB for good.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
