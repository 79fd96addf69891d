"""Work on a CUDA stream of its own, in turn with the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
