"""Several batches at a time on a CPU, each on its own threads.

One batch on all threads makes them wait for each other at every step, and on a busy machine that is
most of the time. Batches side by side wait for nobody.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch


def batches_at_once(device: torch.device, threads: int | None = None) -> int:
    """Batches to compute at a time: one for each CPU thread; on a GPU one, and one on its way."""
    if device.type != "cpu":
        return 2 if device.type == "cuda" else 1
    return threads or min(torch.get_num_threads(), os.cpu_count() or 1)


@contextlib.contextmanager
def compute_pool(workers: int, *, threads: int = 1) -> Iterator[ThreadPoolExecutor]:
    """A pool in each of whose workers torch uses `threads` threads.

    With one thread each, what a batch comes to does not depend on how many processors there are.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        workers, "veca-compute", initializer=torch.set_num_threads, initargs=(threads,)
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
