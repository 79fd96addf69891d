"""Core attention as Triton kernels: every token's q, k and v read once, its output written once.

The operation is one node to `torch.compile` and `torch.export` (`veca::core_attention`), and so is
its backward. `KNOBS` holds every tuning constant. The kernels themselves are in
`veca.attention.kernels`, which is imported on first use: this module imports without Triton.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veca.errors import InputError

WIDTHS = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_INSTALLED = importlib.util.find_spec("triton") is not None
_NEEDS = "needs an NVIDIA GPU of compute capability 8.0 or newer"


# ---------------------------------------------------------------------------------------------
# Tuning constants
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: tile, warps and stages as Triton means them.

    `programs_per_sm` is how many programs fit on one multiprocessor at a time, read off the
    compiler's report of registers and shared memory; it decides into how many spans a sequence
    is split. `registers` caps the registers of a thread. `fused` puts both roles in one program.
    """

    block_n: int
    warps: int = 4
    stages: int = 3
    programs_per_sm: int = 4
    registers: int | None = None
    fused: bool = False


# (pass, bytes per element, head width, rotated). Reports for sm_90 with 64 cores (Triton 3.6):
# registers a thread, shared memory a program; 64 K registers and 227 KB make a multiprocessor.
KNOBS: dict[tuple[str, int, int, bool], Launch] = {
    ("forward", 2, 32, False): Launch(64, stages=3, programs_per_sm=5),
    ("forward", 2, 32, True): Launch(64, stages=3, programs_per_sm=5),
    ("forward", 2, 64, False): Launch(64, stages=3, programs_per_sm=4),
    ("forward", 2, 64, True): Launch(64, stages=2, programs_per_sm=4, registers=128),
    ("forward", 2, 128, False): Launch(64, stages=2, programs_per_sm=2),
    ("forward", 2, 128, True): Launch(64, stages=1, programs_per_sm=2),
    ("backward", 2, 32, False): Launch(64, stages=3, programs_per_sm=3),
    ("backward", 2, 32, True): Launch(64, stages=3, programs_per_sm=3),
    ("backward", 2, 64, False): Launch(64, stages=3, programs_per_sm=2),
    ("backward", 2, 64, True): Launch(64, stages=3, programs_per_sm=2),
    ("backward", 2, 128, False): Launch(64, stages=1, programs_per_sm=1),
    ("backward", 2, 128, True): Launch(64, stages=1, programs_per_sm=1),
}
