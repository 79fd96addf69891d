"""What is being traced or transformed, and has no values to look at."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.compiler import is_compiling


def transformed() -> bool:
    """Whether this runs inside torch.func.grad, jvp, vmap or the like."""
    return not is_compiling() and torch._C._are_functorch_transforms_active()


def has_values(x: Tensor) -> bool:
    """Whether the numbers of `x` can be read: not while tracing, nor while a graph is recorded."""
    if is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return not (x.is_meta or isinstance(x, FakeTensor) or transformed())
