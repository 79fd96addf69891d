"""Core attention as Triton kernels: every token's q, k and v read once, its output written once.

The operation is one node to `torch.compile` and `torch.export` (`veca::core_attention`), and so is
its backward. Every tuning constant is in `KNOBS` and `TILED`. The kernels are in
`veca.attention.kernels`, imported on first use, so that this module imports without Triton.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veca.errors import InputError

WIDTHS = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RESIDENT_CORES = 64

_INSTALLED = importlib.util.find_spec("triton") is not None
_NEEDS = "needs an NVIDIA GPU of compute capability 8.0 or newer"


# ---------------------------------------------------------------------------------------------
# Tuning constants
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: patches per tile, and warps and stages as Triton means them.

    `per_sm` is how many programs a multiprocessor holds at a time, from the compiler's report of
    registers and shared memory; with it `choose_splits` decides into how many spans a sequence is
    cut. `registers` caps the registers of a thread. `fused` gives a program both roles.
    """

    block: int
    warps: int = 4
    stages: int = 3
    per_sm: int = 4
    registers: int | None = None
    fused: bool = False


# (pass, bytes of an element, head width, bytes of a table's element or 0 without rotation). Where
# several are given, `cheapest` picks by how evenly they fill the chip. The remarks are what Triton
# 3.6 and its ptxas report for sm_90 and 64 cores: registers a thread, KB of shared memory a
# program. An H200 multiprocessor has 512 registers for each of 128 threads, and 228 KB (1 a program
# lost).
KNOBS: dict[tuple[str, int, int, int], tuple[Launch, ...]] = {
    ("forward", 2, 32, 0): (Launch(64, stages=3, per_sm=5, registers=96),),  # 28 KB
    ("forward", 2, 32, 2): (Launch(64, stages=3, per_sm=4, registers=128),),
    ("forward", 2, 32, 4): (Launch(64, stages=3, per_sm=4, registers=128),),  # 44 KB
    ("forward", 2, 64, 0): (
        Launch(64, stages=3, per_sm=4, registers=128),  # 124 registers, 56 KB
        Launch(64, stages=4, per_sm=3),  # 72 KB
    ),
    ("forward", 2, 64, 2): (Launch(64, stages=3, per_sm=4),),
    ("forward", 2, 64, 4): (Launch(64, stages=2, per_sm=4, registers=128),),  # 129 uncapped, 56 KB
    ("forward", 2, 128, 0): (Launch(64, stages=3, per_sm=2),),  # 168 registers, 112 KB
    ("forward", 2, 128, 2): (Launch(64, stages=2, per_sm=2),),
    ("forward", 2, 128, 4): (Launch(64, stages=2, per_sm=2),),  # 220 registers, 112 KB
    ("forward", 4, 32, 0): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("forward", 4, 32, 4): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("forward", 4, 64, 0): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("forward", 4, 64, 4): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("backward", 2, 32, 0): (Launch(64, stages=3, per_sm=3, registers=168),),  # 145, 41 KB
    ("backward", 2, 32, 2): (Launch(64, stages=3, per_sm=2),),
    ("backward", 2, 32, 4): (Launch(64, stages=3, per_sm=2),),  # 190 registers, 60 KB
    ("backward", 2, 64, 0): (Launch(64, stages=3, per_sm=2),),  # 207 registers, 73 KB
    ("backward", 2, 64, 2): (Launch(64, stages=3, per_sm=2),),
    ("backward", 2, 64, 4): (Launch(64, stages=3, per_sm=2),),  # 252 registers, 112 KB
    ("backward", 2, 128, 0): (Launch(64, warps=8, stages=2, per_sm=1),),  # 239 registers, 113 KB
    ("backward", 2, 128, 2): (Launch(64, warps=8, stages=2, per_sm=1),),
    ("backward", 2, 128, 4): (Launch(64, warps=8, stages=2, per_sm=1),),  # 255 registers, 160 KB
    ("backward", 4, 32, 0): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("backward", 4, 32, 4): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("backward", 4, 64, 0): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("backward", 4, 64, 4): (Launch(32, warps=8, stages=1, per_sm=1),),
}

# More cores than stay resident, and whatever has no line above (float32 of width 128, whose cores
# alone overflow the chip). `block` is the side of a square tile of scores.
TILED: dict[tuple[int, int], Launch] = {
    (2, 32): Launch(64, stages=1, per_sm=3),
    (2, 64): Launch(64, stages=1, per_sm=2),
    (2, 128): Launch(64, warps=8, stages=2, per_sm=1),
    (4, 32): Launch(32, stages=1, per_sm=2),
    (4, 64): Launch(32, stages=1, per_sm=2),
    (4, 128): Launch(32, warps=8, stages=1, per_sm=1),
}

MAX_SPLITS = 64  # more would make merging cost as much as attending
MERGE_ELEMENTS = 2048  # per program that merges splits: 16 for each of its 128 threads
CPU_MULTIPROCESSORS = 4  # what the interpreter pretends to have


def span_cost(sequences: int, tiles: int, multiprocessors: int, launch: Launch, splits: int) -> int:
    """Tiles in a row on one multiprocessor when a walk over `tiles` is cut into `splits` spans.

    A multiprocessor runs `per_sm` programs at a time and needs nearly all of them to keep memory
    busy, so a last round with fewer takes as long as one with `per_sm - 1`. A program costs its
    tiles, plus one for reading the cores, one for each stage beyond three that it must fill, and
    one for writing partial results if it has only a span of the sequence.
    """
    per_sm = launch.per_sm
    busy = max(per_sm - 1, min(per_sm, 2))
    span = -(-tiles // splits)
    rounds, rest = divmod(-(-sequences * splits // multiprocessors), per_sm)
    turns = rounds * per_sm + (max(rest, busy) if rest else 0)
    return turns * (span + max(1, launch.stages - 2) + (splits > 1))


@functools.lru_cache(maxsize=1024)  # asked at every call, and a hundred microseconds long
def choose_splits(sequences: int, tiles: int, multiprocessors: int, launch: Launch) -> int:
    """Into how many spans to cut a walk over `tiles` tiles that `sequences` programs would take.

    The cheapest number by `span_cost`, the smallest if several are.
    """
    # Only numbers of spans that leave none empty.
    candidates = {-(-tiles // -(-tiles // s)) for s in range(1, min(tiles, MAX_SPLITS) + 1)}
    return min(
        sorted(candidates or {1}),
        key=lambda splits: span_cost(sequences, tiles, multiprocessors, launch, splits),
    )


# ---------------------------------------------------------------------------------------------
# Public functions
# ---------------------------------------------------------------------------------------------


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
) -> Tensor:
    """Attention of q, k, v [B, H, T, d] whose first `num_cores` tokens are the cores.

    `core_tables` and `patch_tables` are (cos, sin), each [B or 1, tokens, d / 2]; with them q and k
    are rotated on the way in. float32 tables are the safe choice; tables in the dtype of q halve
    what the kernels read of them. Core tables get gradients, patch tables must not need any.
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
    out, _ = _forward(q, k, v, core_cos, core_sin, patch_cos, patch_sin, num_cores, scale)
    return out


# ---------------------------------------------------------------------------------------------
# Registration
# ---------------------------------------------------------------------------------------------

_TABLES = "Tensor? core_cos, Tensor? core_sin, Tensor? patch_cos, Tensor? patch_sin"


@torch.library.custom_op(
    "veca::core_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_TABLES}, SymInt num_cores, float scale)"
    " -> (Tensor, Tensor)",
)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_cos: Tensor | None,
    core_sin: Tensor | None,
    patch_cos: Tensor | None,
    patch_sin: Tensor | None,
    num_cores: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, T, d] and base-2 log-sum-exps [B, H, T] of all rows."""
    return launch_forward(q, k, v, core_cos, core_sin, patch_cos, patch_sin, num_cores, scale)


@_forward.register_fake
def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_cos: Tensor | None,
    core_sin: Tensor | None,
    patch_cos: Tensor | None,
    patch_sin: Tensor | None,
    num_cores: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return _token_major(q), _empty(q, q.shape[:3], torch.float32)


@torch.library.custom_op(
    "veca::core_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_TABLES}, SymInt num_cores, float scale, bool table_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    core_cos: Tensor | None,
    core_sin: Tensor | None,
    patch_cos: Tensor | None,
    patch_sin: Tensor | None,
    num_cores: int,
    scale: float,
    table_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and, if `table_grad`, of core_cos and core_sin (else empty tensors)."""
    tables = (core_cos, core_sin, patch_cos, patch_sin)
    return launch_backward(grad, q, k, v, out, lse, *tables, num_cores, scale, table_grad)


@_backward.register_fake
def _backward_fake(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    core_cos: Tensor | None,
    core_sin: Tensor | None,
    patch_cos: Tensor | None,
    patch_sin: Tensor | None,
    num_cores: int,
    scale: float,
    table_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if table_grad and core_cos is not None:
        shape, dtype = core_cos.shape, core_cos.dtype
    else:
        shape, dtype = torch.Size([0]), torch.float32
    table_grads = (_empty(q, shape, dtype), _empty(q, shape, dtype))
    return _token_major(q), _token_major(q), _token_major(q), *table_grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, num_cores, scale = inputs
    out, lse = output
    ctx.save_for_backward(*tensors, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.num_cores = num_cores
    ctx.scale = scale


def _autograd_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, core_cos, core_sin, patch_cos, patch_sin, out, lse = ctx.saved_tensors
    table_grad = core_cos is not None and any(ctx.needs_input_grad[3:5])
    tables = (core_cos, core_sin, patch_cos, patch_sin)
    args = (*tables, ctx.num_cores, ctx.scale, table_grad)
    dq, dk, dv, dcos, dsin = _backward(grad, q, k, v, out, lse, *args)
    if not table_grad:
        return dq, dk, dv, None, None, None, None, None, None
    return dq, dk, dv, dcos, dsin, None, None, None, None


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


# ---------------------------------------------------------------------------------------------
# Launching
# ---------------------------------------------------------------------------------------------


class _Tables(NamedTuple):
    """A pair of rotary tables as the kernels take them, or a stand-in that they never read."""

    cos: Tensor
    sin: Tensor
    strides: tuple[int, int]  # of the batch and of the tokens
    given: bool


@dataclass(frozen=True)
class _Problem:
    """What forward and backward share: the inputs, and the sizes the kernels ask for."""

    q: Tensor
    k: Tensor
    v: Tensor
    core: _Tables
    patch: _Tables
    num_cores: int
    scale: float

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def sequences(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    @property
    def tokens(self) -> int:
        return self.q.shape[2]

    @property
    def patches(self) -> int:
        return self.q.shape[2] - self.num_cores

    @property
    def width(self) -> int:
        return self.q.shape[3]

    @property
    def table_bytes(self) -> int:
        """Bytes of a rotary table's element; 0 without tables."""
        given = [tables for tables in (self.core, self.patch) if tables.given]
        return max((tables.cos.element_size() for tables in given), default=0)

    @property
    def scale_log2(self) -> float:
        return self.scale * math.log2(math.e)

    @property
    def precision(self) -> str:
        # float32 stays float32: no tf32. For 16-bit inputs the word has no meaning.
        return "ieee" if self.q.dtype == torch.float32 else "tf32"

    def input_strides(self) -> tuple[int, ...]:
        return (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3])

    def splits(self, roles: int, tiles: int, launch: Launch) -> int:
        units = _multiprocessors(self.q.device)
        return choose_splits(self.sequences * roles, tiles, units, launch)

    def cheapest(self, launches: tuple[Launch, ...]) -> Launch:
        """The launch whose programs fill the chip most evenly; the first if several do."""

        def cost(launch: Launch) -> int:
            tiles = -(-self.patches // launch.block)
            roles = 1 if launch.fused else 2
            splits = self.splits(roles, tiles, launch)
            units = _multiprocessors(self.q.device)
            return span_cost(self.sequences * roles, tiles, units, launch, splits)

        return launches[0] if len(launches) == 1 else min(launches, key=cost)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_cos: Tensor | None,
    core_sin: Tensor | None,
    patch_cos: Tensor | None,
    patch_sin: Tensor | None,
    num_cores: int,
    scale: float,
    launch: Launch | None = None,
    splits: int | None = None,
    tiled: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The forward pass. `launch`, `splits` and `tiled` override the tables, for tuning."""
    out, lse = _token_major(q), _empty(q, q.shape[:3], torch.float32)
    if q.numel() == 0:
        return out, lse
    core, patch = _tables(core_cos, core_sin, q), _tables(patch_cos, patch_sin, q)
    problem = _Problem(q, k, v, core, patch, num_cores, scale)
    launch, tiled = _pick("forward", problem, launch, tiled)
    with _on_device(q):
        (_tiled_forward if tiled else _resident_forward)(problem, out, lse, launch, splits)
    return out, lse


def launch_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    core_cos: Tensor | None,
    core_sin: Tensor | None,
    patch_cos: Tensor | None,
    patch_sin: Tensor | None,
    num_cores: int,
    scale: float,
    table_grad: bool,
    launch: Launch | None = None,
    splits: int | None = None,
    tiled: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The backward pass. `launch`, `splits` and `tiled` override the tables, for tuning."""
    grads = (_token_major(q), _token_major(q), _token_major(q))
    wanted = core_cos if table_grad else None
    table_grads: Tensor | None = None  # of q and k; of cos and sin; [B, H, cores, d / 2]
    if wanted is not None:
        batch, heads, _, width = q.shape
        table_grads = _empty(q, [2, 2, batch, heads, num_cores, width // 2], torch.float32)
    if q.numel() == 0:
        return *grads, *_sum_table_grads(table_grads, wanted, q)
    if grad.stride(-1) != 1 or grad.stride(2) >= 1 << 24:
        grad = grad.contiguous()
    core, patch = _tables(core_cos, core_sin, q), _tables(patch_cos, patch_sin, q)
    problem = _Problem(q, k, v, core, patch, num_cores, scale)
    launch, tiled = _pick("backward", problem, launch, tiled)
    run = _tiled_backward if tiled else _resident_backward
    with _on_device(q):
        run(problem, grad, out, lse, grads, table_grads, launch, splits)
    return *grads, *_sum_table_grads(table_grads, wanted, q)


def _resident_forward(
    problem: _Problem, out: Tensor, lse: Tensor, launch: Launch, splits: int | None
) -> None:
    kernels, width, cores = _kernels(), problem.width, problem.num_cores
    splits, span = _spans(problem, launch, splits)
    block_c = max(16, _power_of_two(cores))
    partials = _partials(problem, splits, block_c)
    core_programs = problem.sequences * splits
    patch_programs = 0 if launch.fused or problem.patches == 0 else core_programs
    kernels.forward_kernel[(core_programs + patch_programs,)](
        problem.q, problem.k, problem.v, out, lse,
        problem.core.cos, problem.core.sin, problem.patch.cos, problem.patch.sin,
        *(partials or (lse, lse, lse)),
        *problem.input_strides(), *out.stride()[:3],
        *problem.core.strides, *problem.patch.strides,
        problem.heads, cores, problem.patches, splits, span, core_programs, problem.scale_log2,
        D=width, BLOCK_C=block_c, BLOCK_N=launch.block,
        ROTATE_CORES=problem.core.given, ROTATE_PATCHES=problem.patch.given,
        PAD_CORES=block_c != cores, PAD_PATCHES=problem.patches % launch.block != 0,
        FUSED=launch.fused, MERGE=partials is not None, PRECISION=problem.precision,
        **_options(launch),
    )  # fmt: skip
    if partials is not None:
        _merge_forward(problem, out, lse, partials, splits, block_c)


def _tiled_forward(
    problem: _Problem, out: Tensor, lse: Tensor, launch: Launch, splits: int | None
) -> None:
    kernels, block = _kernels(), launch.block
    tables = _joined_tables(problem)

    def attend(first: int, end: int, key_end: int, splits: int, span: int) -> None:
        blocks = -(-(end - first) // block)
        partials = _partials(problem, splits, blocks * block)
        kernels.tiled_forward_kernel[(problem.sequences * splits * blocks,)](
            problem.q, problem.k, problem.v, out, lse, tables.cos, tables.sin,
            *(partials or (lse, lse, lse)),
            *problem.input_strides(), *out.stride()[:3], *tables.strides,
            problem.heads, problem.tokens, first, end, key_end, blocks, splits, span,
            problem.scale_log2,
            D=problem.width, BLOCK_R=block, BLOCK_K=block, ROTATE=tables.given,
            MERGE=partials is not None, PRECISION=problem.precision, **_options(launch),
        )  # fmt: skip
        if partials is not None:
            _merge_forward(problem, out, lse, partials, splits, blocks * block)

    cores, tokens = problem.num_cores, problem.tokens
    attend(0, cores, tokens, *_tiled_spans(problem, launch, splits))
    if problem.patches:
        attend(cores, tokens, cores, 1, cores)


def _resident_backward(
    problem: _Problem,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    table_grads: Tensor | None,
    launch: Launch,
    splits: int | None,
) -> None:
    kernels, width, cores = _kernels(), problem.width, problem.num_cores
    splits, span = _spans(problem, launch, splits)
    block_c = max(16, _power_of_two(cores))
    partials: tuple[Tensor, ...] | None = None
    if splits > 1:
        shape = [problem.sequences * splits, block_c, width]
        partials = tuple(_empty(lse, shape, torch.float32) for _ in range(3))
    core_programs = problem.sequences * splits
    table_q, table_k, table_half = _table_pointers(table_grads, lse)
    kernels.backward_kernel[(core_programs * (1 if launch.fused else 2),)](
        problem.q, problem.k, problem.v, out, grad, lse, *grads,
        problem.core.cos, problem.core.sin, problem.patch.cos, problem.patch.sin,
        *(partials or (lse, lse, lse)), table_q, table_k,
        *problem.input_strides(), *out.stride()[:3], *grad.stride()[:3], *grads[0].stride()[:3],
        *problem.core.strides, *problem.patch.strides, table_half,
        problem.heads, cores, problem.patches, splits, span, core_programs,
        problem.scale, problem.scale_log2,
        D=width, BLOCK_C=block_c, BLOCK_N=launch.block,
        ROTATE_CORES=problem.core.given, ROTATE_PATCHES=problem.patch.given,
        TABLE_GRAD=table_grads is not None,
        PAD_CORES=block_c != cores, PAD_PATCHES=problem.patches % launch.block != 0,
        FUSED=launch.fused, MERGE=partials is not None, PRECISION=problem.precision,
        **_options(launch),
    )  # fmt: skip
    if partials is not None:
        _merge_backward(problem, problem.core, grads, table_grads, lse, partials, splits, block_c)


def _tiled_backward(
    problem: _Problem,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    table_grads: Tensor | None,
    launch: Launch,
    splits: int | None,
) -> None:
    kernels, block = _kernels(), launch.block
    dq, dk, dv = grads
    tables = _joined_tables(problem)
    blocks = -(-problem.tokens // block)
    delta = _empty(lse, lse.shape, torch.float32)
    kernels.delta_kernel[(problem.sequences * blocks,)](
        out, grad, delta, *out.stride()[:3], *grad.stride()[:3],
        problem.heads, problem.tokens, blocks, problem.scale,
        D=problem.width, BLOCK_R=block,
    )  # fmt: skip
    inputs = (problem.q, problem.k, problem.v, grad, lse, delta)
    strides = (
        *problem.input_strides(), *grad.stride()[:3], *dq.stride()[:3], *tables.strides
    )  # fmt: skip
    sizes = (problem.heads, problem.tokens)
    scales = (problem.scale, problem.scale_log2)
    constants = {
        "D": problem.width, "BLOCK_R": block, "BLOCK_K": block, "ROTATE": tables.given,
        "PRECISION": problem.precision, **_options(launch),
    }  # fmt: skip

    # `first` .. `end` are queries in the first kernel and keys in the second; `other_end` is how
    # far the other side reaches.
    def differentiate(
        first: int, end: int, other_end: int, splits: int, span: int, partials: Any
    ) -> None:
        blocks = -(-(end - first) // block)
        span_sizes = (*sizes, first, end, other_end, blocks, splits, span)
        grid, merge = (problem.sequences * splits * blocks,), partials is not None
        part_q, part_k, part_v = partials or (lse, lse, lse)
        kernels.tiled_query_gradient_kernel[grid](
            *inputs, dq, tables.cos, tables.sin, part_q,
            *strides, *span_sizes, *scales, MERGE=merge, **constants,
        )  # fmt: skip
        kernels.tiled_key_gradient_kernel[grid](
            *inputs, dk, dv, tables.cos, tables.sin, part_k, part_v,
            *strides, *span_sizes, *scales, MERGE=merge, **constants,
        )  # fmt: skip

    cores, tokens = problem.num_cores, problem.tokens
    splits, span = _tiled_spans(problem, launch, splits)
    rows = -(-cores // block) * block
    shape = [problem.sequences * splits, rows, problem.width]
    partials = tuple(_empty(lse, shape, torch.float32) for _ in range(3))
    differentiate(0, cores, tokens, splits, span, partials)
    _merge_backward(problem, tables, grads, table_grads, lse, partials, splits, rows)
    if problem.patches:
        differentiate(cores, tokens, cores, 1, cores, None)


def _merge_forward(
    problem: _Problem,
    out: Tensor,
    lse: Tensor,
    partials: tuple[Tensor, ...],
    splits: int,
    row_stride: int,
) -> None:
    block_r, block_s, blocks = _merge_blocks(problem, splits)
    _kernels().merge_forward_kernel[(problem.sequences * blocks,)](
        out, lse, *partials, *out.stride()[:3], problem.tokens,
        problem.heads, problem.num_cores, row_stride, blocks, splits,
        D=problem.width, BLOCK_R=block_r, BLOCK_S=block_s,
    )  # fmt: skip


def _merge_backward(
    problem: _Problem,
    tables: _Tables,
    grads: tuple[Tensor, Tensor, Tensor],
    table_grads: Tensor | None,
    lse: Tensor,
    partials: tuple[Tensor, ...],
    splits: int,
    row_stride: int,
) -> None:
    block_r, block_s, blocks = _merge_blocks(problem, splits)
    table_q, table_k, table_half = _table_pointers(table_grads, lse)
    _kernels().merge_backward_kernel[(problem.sequences * blocks,)](
        problem.q, problem.k, *grads, tables.cos, tables.sin, *partials, table_q, table_k,
        *problem.q.stride()[:3], *problem.k.stride()[:3], *grads[0].stride()[:3],
        *tables.strides, table_half,
        problem.heads, problem.num_cores, row_stride, blocks, splits,
        D=problem.width, BLOCK_R=block_r, BLOCK_S=block_s,
        ROTATE=tables.given, TABLE_GRAD=table_grads is not None,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------------------------


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Every buffer comes from here, so that tests can poison them all."""
    return like.new_empty(shape, dtype=dtype)


def _token_major(q: Tensor) -> Tensor:
    """A new [B, H, T, d] whose memory is [B, T, H, d], the layout that projections read."""
    batch, heads, tokens, width = q.shape
    return _empty(q, [batch, tokens, heads, width], q.dtype).transpose(1, 2)


def _same_shape(tables: Sequence[Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    if tables is None:
        return None, None
    cos, sin = tables
    if cos.shape != sin.shape:  # one of them serves the whole batch
        cos, sin = torch.broadcast_tensors(cos, sin)
    return cos, sin


def _tables(cos: Tensor | None, sin: Tensor | None, stand_in: Tensor) -> _Tables:
    if cos is None or sin is None:
        return _Tables(stand_in, stand_in, (0, 0), False)
    if cos.stride() != sin.stride() or cos.stride(-1) != 1 or cos.dtype != sin.dtype:
        cos, sin = cos.contiguous(), sin.to(cos.dtype).contiguous()
    batch_stride = 0 if cos.shape[0] == 1 else cos.stride(0)
    return _Tables(cos, sin, (batch_stride, cos.stride(1)), True)


def _joined_tables(problem: _Problem) -> _Tables:
    """One pair of tables for all tokens; a side that is not rotated turns by nothing."""
    core, patch = problem.core, problem.patch
    if not (core.given or patch.given):
        return core
    still = (core if core.given else patch).cos

    def join(one: Tensor, other: Tensor, fill: float) -> Tensor:
        if not core.given:
            one = still.new_full((1, problem.num_cores, still.shape[2]), fill)
        if not patch.given:
            other = still.new_full((1, problem.patches, still.shape[2]), fill)
        batch = max(one.shape[0], other.shape[0])
        return torch.cat([one.expand(batch, -1, -1), other.expand(batch, -1, -1)], dim=1)

    return _tables(join(core.cos, patch.cos, 1.0), join(core.sin, patch.sin, 0.0), problem.q)


def _sum_table_grads(
    table_grads: Tensor | None, table: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Over q and k, over the heads, and over the batch if one table serves it all."""
    if table_grads is None or table is None:
        return _empty(like, [0], torch.float32), _empty(like, [0], torch.float32)
    over = (0, 1, 2) if table.shape[0] == 1 else (0, 2)
    dcos, dsin = (part.sum(over).reshape(table.shape) for part in table_grads.unbind(1))
    return dcos.to(table.dtype), dsin.to(table.dtype)


def _table_pointers(table_grads: Tensor | None, stand_in: Tensor) -> tuple[Tensor, Tensor, int]:
    if table_grads is None:
        return stand_in, stand_in, 0
    return table_grads[0], table_grads[1], table_grads.stride(1)


def _partials(problem: _Problem, splits: int, rows: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Where splits leave their unfinished core rows: accumulators, maxima and sums."""
    if splits == 1:
        return None
    shape = [problem.sequences * splits, rows]
    return (
        _empty(problem.q, [*shape, problem.width], torch.float32),
        _empty(problem.q, shape, torch.float32),
        _empty(problem.q, shape, torch.float32),
    )


def _pick(
    name: str, problem: _Problem, launch: Launch | None, tiled: bool | None
) -> tuple[Launch, bool]:
    size, width = problem.q.element_size(), problem.width
    tables = problem.table_bytes
    line = KNOBS.get((name, size, width, tables)) or KNOBS.get((name, size, width, tables and size))
    if tiled is None:
        tiled = problem.num_cores > RESIDENT_CORES or line is None
    if launch is None:
        launch = TILED[size, width] if tiled or line is None else problem.cheapest(line)
        if not _is_hopper(problem.q.device):
            # Half the shared memory and other tensor cores: what fits and spills least there.
            stages = min(launch.stages, 1 if width == 128 else 2)
            launch = dataclasses.replace(launch, stages=stages, registers=None)
    return launch, tiled


def _spans(problem: _Problem, launch: Launch, splits: int | None) -> tuple[int, int]:
    """How many spans of how many patches: whole tiles, and none empty."""
    tiles = -(-problem.patches // launch.block)
    if tiles == 0:
        return 1, 0
    splits = splits or problem.splits(1 if launch.fused else 2, tiles, launch)
    span = -(-tiles // splits)
    return -(-tiles // span), span * launch.block


def _tiled_spans(problem: _Problem, launch: Launch, splits: int | None) -> tuple[int, int]:
    """The same for the core rows of the tiled path, which walk over all tokens."""
    tiles = -(-problem.tokens // launch.block)
    roles = -(-problem.num_cores // launch.block)
    splits = splits or problem.splits(roles, tiles, launch)
    span = -(-tiles // splits)
    return -(-tiles // span), span * launch.block


def _merge_blocks(problem: _Problem, splits: int) -> tuple[int, int, int]:
    """Rows and splits a merging program takes at a time, and the programs of a sequence."""
    block_s = min(16, _power_of_two(splits))
    block_r = max(1, MERGE_ELEMENTS // (block_s * problem.width))
    block_r = min(block_r, _power_of_two(problem.num_cores))
    return block_r, block_s, -(-problem.num_cores // block_r)


def _options(launch: Launch) -> dict[str, int]:
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    # Said aloud because Triton is about to change its default; the exponents count on it.
    options["enable_fp_fusion"] = True
    if launch.registers is not None:
        options["maxnreg"] = launch.registers
    return options


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _kernels() -> Any:
    return importlib.import_module("veca.attention.kernels")


def _on_device(q: Tensor) -> contextlib.AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'.
    return torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext()


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
