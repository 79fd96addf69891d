"""Core attention as Triton kernels: every token's q, k and v read once, its output written once.

The operation is one node to `torch.compile` and `torch.export` (`veca::core_attention`), and so is
its backward; `veca.attention.launch` launches the kernels. This module imports without Triton.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from veca.attention.launch import empty, launch_backward, launch_forward, token_major
from veca.errors import InputError

WIDTHS = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_INSTALLED = importlib.util.find_spec("triton") is not None
_NEEDS = "needs an NVIDIA GPU of compute capability 8.0 or newer"


def unavailable(device: torch.device | None = None) -> str | None:
    """Why the kernels cannot run on `device` (default: the current GPU), or None if they can."""
    if not _INSTALLED:
        return "triton is not installed"
    if device is not None and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device is not None and device.type != "cuda":
        return _NEEDS
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return _NEEDS
    return None


# What torch.compiler.assume_constant_result does, which would import the whole compiler for it.
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unsupported(q: Tensor, k: Tensor, v: Tensor, num_cores: int) -> str | None:
    """Why the kernels cannot take these tensors, or None if they can."""
    if q.dtype not in DTYPES:
        return f"the kernels take bfloat16, float16 and float32, not {q.dtype}"
    if q.shape[-1] not in WIDTHS:
        return f"the kernels take head widths 32, 64 and 128, not {q.shape[-1]}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(-1) != 1:
            return f"the channels of {name} must lie side by side, not {x.stride(-1)} apart"
        if x.stride(2) >= 1 << 24:  # offsets inside a tile are 32-bit
            return f"the tokens of {name} lie too far apart: {x.stride(2)} elements"
    return None


def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_cores: int,
    core_tables: Sequence[Tensor] | None = None,
    patch_tables: Sequence[Tensor] | None = None,
    scale: float | None = None,
    multiplicity: Tensor | None = None,
) -> Tensor:
    """Attention of q, k, v [B, H, T, d] whose first `num_cores` tokens are the cores.

    `core_tables` and `patch_tables` are (cos, sin), each [B or 1, tokens, d / 2]; with them q and k
    are rotated on the way in. float32 tables are the safe choice; tables in the dtype of q halve
    what the kernels read of them. Core tables get gradients, patch tables must not need any.
    `multiplicity` is [B or 1, N] in float32: how many patches each patch token stands for.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if scale <= 0:  # the kernels take the maximum of unscaled scores
        q, scale = q * scale, 1.0
    core_cos, core_sin = _same_shape(core_tables)
    patch_cos, patch_sin = _same_shape(patch_tables)
    if torch.is_grad_enabled():
        for table in (patch_cos, patch_sin):
            if table is not None and table.requires_grad:
                raise InputError(
                    "the triton backend computes no gradients of patch_rotation. "
                    "Detach it or use backend='sdpa'."
                )
    out: Tensor
    tables = (core_cos, core_sin, patch_cos, patch_sin)
    out, _ = _forward(q, k, v, *tables, num_cores, scale, multiplicity)
    return out


def _same_shape(tables: Sequence[Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    if tables is None:
        return None, None
    cos, sin = tables
    if cos.shape != sin.shape:  # one of them serves the whole batch
        cos, sin = torch.broadcast_tensors(cos, sin)
    return cos, sin


# ---------------------------------------------------------------------------------------------
# Registration
# ---------------------------------------------------------------------------------------------

_TABLES = "Tensor? core_cos, Tensor? core_sin, Tensor? patch_cos, Tensor? patch_sin"
# Last and with a default, so that graphs saved before it existed still load.
_MULTIPLICITY = "Tensor? multiplicity=None"


@torch.library.custom_op(
    "veca::core_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_TABLES}, SymInt num_cores, float scale, "
    f"{_MULTIPLICITY}) -> (Tensor, Tensor)",
)
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, T, d] and base-2 log-sum-exps [B, H, T] of all rows."""
    return launch_forward(*args)


@_forward.register_fake
def _forward_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return token_major(q), empty(q, q.shape[:3], torch.float32)


@torch.library.custom_op(
    "veca::core_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_TABLES}, SymInt num_cores, float scale, bool table_grad, {_MULTIPLICITY})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and, if `table_grad`, of core_cos and core_sin (else empty tensors)."""
    return launch_backward(*args)


@_backward.register_fake
def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _grad, q, _k, _v, _out, _lse, core_cos = args[:7]
    table_grad = args[12]
    if table_grad and core_cos is not None:
        shape, dtype = core_cos.shape, core_cos.dtype
    else:
        shape, dtype = torch.Size([0]), torch.float32
    table_grads = (empty(q, shape, dtype), empty(q, shape, dtype))
    return token_major(q), token_major(q), token_major(q), *table_grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, num_cores, scale, multiplicity = inputs
    out, lse = output
    ctx.save_for_backward(*tensors, out, lse, multiplicity)
    ctx.mark_non_differentiable(lse)
    ctx.num_cores = num_cores
    ctx.scale = scale


def _autograd_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, core_cos, core_sin, patch_cos, patch_sin, out, lse, multiplicity = ctx.saved_tensors
    table_grad = core_cos is not None and any(ctx.needs_input_grad[3:5])
    tables = (core_cos, core_sin, patch_cos, patch_sin)
    args = (*tables, ctx.num_cores, ctx.scale, table_grad, multiplicity)
    dq, dk, dv, dcos, dsin = _backward(grad, q, k, v, out, lse, *args)
    if not table_grad:
        return dq, dk, dv, *[None] * 7
    return dq, dk, dv, dcos, dsin, *[None] * 5


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)
