"""Memory: what a call needs, what there is, whether an error means too little, giving it back."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from veca._util.numbers import gigabytes

T = TypeVar("T")

_WORTH_A_LOOK = 64 * 2**20
"""Bytes below which nobody looks how much memory is free."""


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


def forward_bytes(config: Any, height: int, width: int) -> int:
    """About what one image of so many pixels takes on its way through a model, at the peak.

    From its pixels to the features as they are written. Fitted to `peak_tensor_memory` of float32
    models on a CPU; other numbers and other devices need less.
    """
    pixels = 3 * config.patch_size**2
    patches = max(1, height * width // config.patch_size**2)
    inside = 10.4 * config.width + 1.25 * pixels
    outside = 2.5 * config.feature_width + 1.5 * pixels
    waiting = 2 * pixels  # as they were read, beside those that are computed
    tokens = patches + config.num_cores
    return int(4 * tokens * (max(inside, outside) + waiting))


def available_memory(device: torch.device | str = "cpu") -> int | None:
    """Bytes that a device, or this process, may still take; None where nobody knows."""
    device = torch.device(device)
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type != "cpu":
        return None
    found = [free for free in (_free_of_machine(), _free_of_group()) if free is not None]
    return min(found, default=None)


def _free_of_machine() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _free_of_group() -> int | None:
    """Of a container with a limit."""
    place = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((place / "memory.max").read_text())  # or "max", which is no limit
        return max(0, limit - int((place / "memory.current").read_text()))
    return None


def too_large(needed: int, device: torch.device | str = "cpu", share: float = 1.0) -> str | None:
    """What to say of work that needs more than a share of the free memory; None: it fits."""
    if needed < _WORTH_A_LOOK:
        return None
    free = available_memory(device)
    if free is None or needed <= share * free:
        return None
    return f"about {gigabytes(needed)} of memory, and {gigabytes(free)} are free"


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
