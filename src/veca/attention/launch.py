"""From tensors to launched kernels: which kernels, how many programs, what each is given.

The kernels are in `veca.attention.kernels`, imported on first use, so that this module imports
without Triton; how they are launched is decided in `veca.attention.knobs`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veca.attention.knobs import (
    CPU_MULTIPROCESSORS,
    MERGE_ELEMENTS,
    RESIDENT_CORES,
    Launch,
    choose_splits,
)
from veca.attention.knobs import resident as resident_launch
from veca.attention.knobs import tiled as tiled_launch


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
    multiplicity: Tensor | None
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
    def multiplicity_stride(self) -> int | None:
        """From one image to the next; None, like the tensor, is no argument of a kernel at all."""
        if self.multiplicity is None:
            return None
        return 0 if self.multiplicity.shape[0] == 1 else self.multiplicity.stride(0)

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
    multiplicity: Tensor | None = None,
    launch: Launch | None = None,
    splits: int | None = None,
    tiled: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The forward pass. `launch`, `splits` and `tiled` override the tables, for tuning."""
    out, lse = token_major(q), empty(q, q.shape[:3], torch.float32)
    if q.numel() == 0:
        return out, lse
    core, patch = _tables(core_cos, core_sin, q), _tables(patch_cos, patch_sin, q)
    problem = _Problem(q, k, v, core, patch, _contiguous(multiplicity), num_cores, scale)
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
    multiplicity: Tensor | None = None,
    launch: Launch | None = None,
    splits: int | None = None,
    tiled: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The backward pass. `launch`, `splits` and `tiled` override the tables, for tuning."""
    grads = (token_major(q), token_major(q), token_major(q))
    wanted = core_cos if table_grad else None
    table_grads: Tensor | None = None  # of q and k; of cos and sin; [B, H, cores, d / 2]
    if wanted is not None:
        batch, heads, _, width = q.shape
        table_grads = empty(q, [2, 2, batch, heads, num_cores, width // 2], torch.float32)
    if q.numel() == 0:
        return *grads, *_sum_table_grads(table_grads, wanted, q)
    if grad.stride(-1) != 1 or grad.stride(2) >= 1 << 24:
        grad = grad.contiguous()
    core, patch = _tables(core_cos, core_sin, q), _tables(patch_cos, patch_sin, q)
    problem = _Problem(q, k, v, core, patch, _contiguous(multiplicity), num_cores, scale)
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
        problem.multiplicity, *(partials or (lse, lse, lse)),
        *problem.input_strides(), *out.stride()[:3],
        *problem.core.strides, *problem.patch.strides, problem.multiplicity_stride,
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
    tables, problem = _joined_tables(problem), _all_tokens(problem)

    def attend(first: int, end: int, key_end: int, splits: int, span: int) -> None:
        blocks = -(-(end - first) // block)
        partials = _partials(problem, splits, blocks * block)
        kernels.tiled_forward_kernel[(problem.sequences * splits * blocks,)](
            problem.q, problem.k, problem.v, out, lse, tables.cos, tables.sin,
            problem.multiplicity, *(partials or (lse, lse, lse)),
            *problem.input_strides(), *out.stride()[:3], *tables.strides,
            problem.multiplicity_stride,
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
        partials = tuple(empty(lse, shape, torch.float32) for _ in range(3))
    core_programs = problem.sequences * splits
    table_q, table_k, table_half = _table_pointers(table_grads, lse)
    kernels.backward_kernel[(core_programs * (1 if launch.fused else 2),)](
        problem.q, problem.k, problem.v, out, grad, lse, *grads,
        problem.core.cos, problem.core.sin, problem.patch.cos, problem.patch.sin,
        problem.multiplicity, *(partials or (lse, lse, lse)), table_q, table_k,
        *problem.input_strides(), *out.stride()[:3], *grad.stride()[:3], *grads[0].stride()[:3],
        *problem.core.strides, *problem.patch.strides, table_half, problem.multiplicity_stride,
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
    tables, problem = _joined_tables(problem), _all_tokens(problem)
    blocks = -(-problem.tokens // block)
    delta = empty(lse, lse.shape, torch.float32)
    kernels.delta_kernel[(problem.sequences * blocks,)](
        out, grad, delta, *out.stride()[:3], *grad.stride()[:3],
        problem.heads, problem.tokens, blocks, problem.scale,
        D=problem.width, BLOCK_R=block,
    )  # fmt: skip
    inputs = (problem.q, problem.k, problem.v, grad, lse, delta)
    strides = (
        *problem.input_strides(), *grad.stride()[:3], *dq.stride()[:3], *tables.strides,
        problem.multiplicity_stride,
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
            *inputs, dq, tables.cos, tables.sin, problem.multiplicity, part_q,
            *strides, *span_sizes, *scales, MERGE=merge, **constants,
        )  # fmt: skip
        kernels.tiled_key_gradient_kernel[grid](
            *inputs, dk, dv, tables.cos, tables.sin, problem.multiplicity, part_k, part_v,
            *strides, *span_sizes, *scales, MERGE=merge, **constants,
        )  # fmt: skip

    cores, tokens = problem.num_cores, problem.tokens
    splits, span = _tiled_spans(problem, launch, splits)
    rows = -(-cores // block) * block
    shape = [problem.sequences * splits, rows, problem.width]
    partials = tuple(empty(lse, shape, torch.float32) for _ in range(3))
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


def empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Every buffer comes from here, so that tests can poison them all."""
    return like.new_empty(shape, dtype=dtype)


def token_major(q: Tensor) -> Tensor:
    """A new [B, H, T, d] whose memory is [B, T, H, d], the layout that projections read."""
    batch, heads, tokens, width = q.shape
    return empty(q, [batch, tokens, heads, width], q.dtype).transpose(1, 2)


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


def _all_tokens(problem: _Problem) -> _Problem:
    """The same with a multiplicity for every token, 1 for the cores."""
    if problem.multiplicity is None:
        return problem
    joined = torch.nn.functional.pad(problem.multiplicity, (problem.num_cores, 0), value=1.0)
    return dataclasses.replace(problem, multiplicity=joined)


def _contiguous(multiplicity: Tensor | None) -> Tensor | None:
    """[B or 1, N] whose numbers lie side by side."""
    if multiplicity is None or multiplicity.stride(-1) == 1:
        return multiplicity
    return multiplicity.contiguous()


def _sum_table_grads(
    table_grads: Tensor | None, table: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Over q and k, over the heads, and over the batch if one table serves it all."""
    if table_grads is None or table is None:
        return empty(like, [0], torch.float32), empty(like, [0], torch.float32)
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
        empty(problem.q, [*shape, problem.width], torch.float32),
        empty(problem.q, shape, torch.float32),
        empty(problem.q, shape, torch.float32),
    )


def _pick(
    name: str, problem: _Problem, launch: Launch | None, tiled: bool | None
) -> tuple[Launch, bool]:
    size, width = problem.q.element_size(), problem.width
    capability = _capability(problem.q.device)
    resident = resident_launch(
        name,
        size,
        width,
        problem.table_bytes,
        capability,
        cores=problem.num_cores,
        patches=problem.patches,
    )
    if tiled is None:
        tiled = problem.num_cores > RESIDENT_CORES or resident is None
    if launch is None:
        if tiled or resident is None:
            launch = tiled_launch(size, width, capability)
        else:
            launch = resident
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
def _capability(device: torch.device) -> tuple[int, int]:
    """Of the GPU; (0, 0) is the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
