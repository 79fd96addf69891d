"""One operation, several backends: check the input once, then pick who computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from veca._util.tracing import has_values, transformed
from veca.attention import fused, reference, sdpa
from veca.errors import InputError, suggest
from veca.rope import Rotation

BACKENDS = ("auto", "reference", "sdpa", "triton")
"""Who computes attention: the definition, torch, our kernels, or the fastest that fits."""


def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_cores: int,
    *,
    core_rotation: Rotation | tuple[Tensor, Tensor] | None = None,
    patch_rotation: Rotation | tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    multiplicity: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention in which the first `num_cores` tokens see all tokens and the rest see only them.

    Args:
        q, k, v: [B, H, T, d], any strides, one dtype. The first `num_cores` of the T tokens are
            the cores, the others the patches. `num_cores == T` is plain full attention. A `q` of
            at most `num_cores` tokens asks for the rows of the first cores alone, which are plain
            attention over all keys: every backend but "reference" leaves them to torch.
        core_rotation, patch_rotation: optional rotary tables (cos, sin), each [B or 1, tokens,
            d / 2], applied to q and k here; see `veca.rope`. Give both or neither.
        scale: multiplies the scores; default 1 / sqrt(d).
        multiplicity: how many patches each patch token stands for, [B or 1, N] or [N] of the
            N = T - num_cores patch tokens; default 1. To the cores, a token of multiplicity m
            counts as m equal tokens (log m is added to its score); m need not be whole. Zero
            marks padding, a token that is not there: no core sees it, its own row is zero and no
            gradient passes through it, but its q, k and v must be finite. Patch rows see cores
            only, so nothing else changes. A count has no gradient. Values are checked on a CPU;
            on a GPU, where that would wait for the device, a negative one gives NaN.
        backend: "auto" takes the fastest that fits; "reference", "sdpa" or "triton" forces one.

    Returns:
        [B, H, T, d], in the dtype of `q`; as many tokens as `q` has.
    """
    core_rotation, patch_rotation = _check(q, k, v, num_cores, core_rotation, patch_rotation)
    if multiplicity is not None:
        multiplicity = _check_multiplicity(multiplicity, k, num_cores)
    return unchecked_attention(
        q, k, v, num_cores, core_rotation, patch_rotation, multiplicity, backend, scale
    )


def unchecked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_cores: int,
    core_rotation: Rotation | None,
    patch_rotation: Rotation | None,
    multiplicity: Tensor | None = None,
    backend: str = "auto",
    scale: float | None = None,
) -> Tensor:
    """`core_attention` of what is known to be right, as the model's own: checks in each block cost
    a hundredth of a small pass.

    Args:
        multiplicity: [B or 1, N], in float32, or in float64 for such a k; None without patches.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    run = _choose(q, k, v, num_cores, patch_rotation, backend)
    return run(q, k, v, num_cores, core_rotation, patch_rotation, scale, multiplicity)


class Choice(NamedTuple):
    """Which backend `auto` takes on a device, and why."""

    backend: str
    reason: str


def default_backend(device: torch.device | str) -> Choice:
    """What "auto" takes on `device` for shapes the kernels support, and the reason in words."""
    why_not = fused.unavailable(torch.device(device))
    if why_not is None:
        return Choice("triton", "one pass over the tokens")
    return Choice("sdpa", why_not)


def _choose(
    q: Tensor, k: Tensor, v: Tensor, num_cores: int, patch_rotation: Rotation | None, backend: str
) -> Callable[..., Tensor]:
    # Inside torch.func every derivative may be asked for, and only the definition has them all.
    if backend == "reference" or (backend == "auto" and transformed()):
        return reference.core_attention
    if backend == "sdpa":
        return sdpa.core_attention
    if backend not in BACKENDS:
        raise InputError(f"unknown attention backend {suggest(str(backend), BACKENDS)}")
    if q.shape[2] != k.shape[2]:  # rows of cores alone
        return sdpa.core_attention
    why_not = fused.unavailable(q.device) or fused.unsupported(q, k, v, num_cores)
    # Torch's own kernels do full attention, gradients of the patches' tables, and large problems
    # in float32, where the matrix units are out of reach of both and theirs are tuned longer.
    full = num_cores == q.shape[2]
    large = q.dtype == torch.float32 and q[..., 0].numel() > 50_000
    better = not (full or large or _needs_grad(patch_rotation))
    if why_not is None and (backend == "triton" or better):
        return fused.core_attention
    if backend == "triton":
        raise InputError(f"the triton backend cannot run here: {why_not}. Use backend='auto'.")
    return sdpa.core_attention


def _needs_grad(tables: Rotation | None) -> bool:
    return tables is not None and torch.is_grad_enabled() and tables.cos.requires_grad


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_cores: int,
    core_rotation: Rotation | tuple[Tensor, Tensor] | None,
    patch_rotation: Rotation | tuple[Tensor, Tensor] | None,
) -> tuple[Rotation | None, Rotation | None]:
    if q.ndim != 4:
        raise InputError(f"q must be [batch, heads, tokens, width], got shape {tuple(q.shape)}.")
    few = q.shape != k.shape and k.ndim == 4 and q.shape[2] <= num_cores  # rows of cores alone
    shape = (*q.shape[:2], k.shape[2], q.shape[3]) if few else q.shape
    if not (shape == k.shape == v.shape):
        raise InputError(
            "q, k and v must have one shape, but that q may have fewer tokens, up to num_cores; "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}."
        )
    if not (q.dtype == k.dtype == v.dtype) or not q.is_floating_point():
        raise InputError(
            f"q, k and v must share one floating dtype, got {q.dtype}, {k.dtype} and {v.dtype}."
        )
    if not (q.device == k.device == v.device):
        raise InputError(
            f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}."
        )
    batch, _, tokens, width = k.shape
    if isinstance(num_cores, bool) or not isinstance(num_cores, (int, torch.SymInt)):
        raise InputError(f"num_cores must be a whole number, got {num_cores!r}.")
    if not 1 <= num_cores <= tokens:
        raise InputError(
            f"num_cores must be between 1 and the number of tokens, {tokens}, got {num_cores}."
        )
    if core_rotation is None and patch_rotation is None:
        return None, None
    if core_rotation is None or (patch_rotation is None and num_cores < tokens):
        raise InputError(
            "core_rotation and patch_rotation come together: rotated and unrotated tokens cannot "
            "meet in one product. Give both or neither."
        )
    core_tables = _check_tables("core_rotation", core_rotation, batch, num_cores, width)
    if patch_rotation is None:
        return core_tables, None
    return core_tables, _check_tables(
        "patch_rotation", patch_rotation, batch, tokens - num_cores, width
    )


def _check_multiplicity(multiplicity: Tensor, k: Tensor, num_cores: int) -> Tensor | None:
    """As [B or 1, N] in float32, or in float64 for such a k; None where there are no patches."""
    if not isinstance(multiplicity, Tensor):
        raise InputError(f"multiplicity must be a tensor, got {type(multiplicity).__name__}.")
    batch, patches = k.shape[0], k.shape[2] - num_cores
    shape = tuple(multiplicity.shape)
    # The batch itself first: while traced for any batch, asking for 1 would rule 1 out.
    right = len(shape) == 1 or (len(shape) == 2 and (shape[0] == batch or shape[0] == 1))
    if not right or shape[-1] != patches:
        raise InputError(
            f"multiplicity must be [1 or {batch}, {patches}], a number for each patch token, "
            f"got shape {shape}."
        )
    if multiplicity.is_complex() or multiplicity.device != k.device:
        raise InputError(
            f"multiplicity must be real numbers on {k.device}, where q is, "
            f"got {multiplicity.dtype} on {multiplicity.device}."
        )
    if multiplicity.requires_grad and torch.is_grad_enabled():
        raise InputError(
            "multiplicity is a count and gets no gradient: pass multiplicity.detach()."
        )
    if patches == 0:
        return None
    # Reading a number from another device would wait for it.
    if multiplicity.device.type == "cpu" and multiplicity.numel() and has_values(multiplicity):
        least, most = (x.item() for x in multiplicity.aminmax())  # both NaN if any is
        if not 0 <= least <= most < math.inf:
            bad = least if not least >= 0 else most
            raise InputError(f"multiplicity must be finite and at least 0, got {bad}.")
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    return multiplicity.to(wide).reshape(-1, patches)


def _check_tables(
    name: str,
    tables: Rotation | tuple[Tensor, Tensor],
    batch: int,
    tokens: int,
    width: int,
) -> Rotation:
    if width % 2:
        raise InputError(f"rotation turns pairs of channels: head width {width} must be even.")
    cos, sin = tables
    for table in (cos, sin):
        shape = tuple(table.shape)
        if len(shape) != 3 or shape[0] not in (1, batch) or shape[1:] != (tokens, width // 2):
            raise InputError(
                f"{name} must be (cos, sin), each [1 or {batch}, {tokens}, {width // 2}], "
                f"got {shape}."
            )
    return Rotation(cos, sin)
