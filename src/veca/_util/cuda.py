"""Recording CUDA graphs: a stream for what goes before, and a recording that nothing disturbs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def side_stream(device: torch.device | None = None) -> Iterator[None]:
    """What is done inside runs on a new stream, after what was before it and before what follows.

    A CUDA graph wants it for the calls that go before its recording: they compile kernels and set
    up libraries, which a recording cannot, and on the stream in use they would be in its way.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream(device).wait_stream(side)


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph` with Python's garbage collector paused.

    The collector may run at any allocation. If it finds an older graph then, freeing that graph
    invalidates the recording.
    """
    gc.collect()
    running = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if running:
            gc.enable()
