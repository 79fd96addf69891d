"""Triton kernels of core attention; `veca.attention.launch` imports them once Triton is there.

Vocabulary. The first `num_cores` tokens of a sequence are cores, the others patches. Core rows
attend to every token, patch rows to the cores only. A sequence here is one head of one image; a
tile is BLOCK_N patches; a span is the run of tiles that one program walks through.

Two roles. Patch rows read q and write out; core rows read k and v. The two halves share nothing
but the cores and the rotary tables, so they are done by different programs: the patch role keeps
the cores' k and v on chip, the core role the cores' q. Each needs about half the registers and
shared memory of both together, so twice as many fit on a multiprocessor, and that is what hides
the latency of memory. A FUSED program does both halves tile by tile, which reads the rotary
tables once instead of twice.

Two paths. Up to 64 cores stay resident on chip (`forward_kernel`, `backward_kernel`); more cores
are walked over in tiles by the plain kernels at the end of the file.

Conventions. Scores stay raw dot products; `scale_log2` = scale * log2(e) enters in the exponent,
where it is part of a fused multiply-add and costs nothing (hence scale > 0). Maxima and
log-sum-exps are in base 2 throughout: a change of base would round them twice more, and the
backward subtracts them from scores of the same size. Offsets that grow with the batch or the
sequence are 64-bit, offsets inside a tile 32-bit.

Multiplicity. Where it is given, log2 of a patch's multiplicity is added to its scores in the core
rows. Zero is padding: its log2, -inf, hides the patch from the cores, its own row is zero, and the
log-sum-exp of that row is +inf, which makes every probability of it zero in the backward. Where it
is None, Triton drops the argument, and the machine code is as if it did not exist.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _probe():
    pass


# The interpreter runs no inline assembly.
INTERPRETED = tl.constexpr(isinstance(_probe, InterpretedFunction))


# ---------------------------------------------------------------------------------------------
# Building blocks
# ---------------------------------------------------------------------------------------------


@triton.jit
def _opaque(x):
    """x itself, behind a wall for layout conversions.

    Without the wall Triton converts the operands of the rotation instead of its result: three
    conversions instead of one, two of them in float32 and with 8-way bank conflicts (read off the
    IR of Triton 3.6 for sm_90). The move disappears in the assembler. From sm_100 on the pipeliner
    wants to predicate the wall and cannot; there the dots read other memory anyway.
    """
    if INTERPRETED or x.dtype.primitive_bitwidth != 16 or cuda_capability_geq(10, 0):
        y = x
    else:
        y = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    return y


@triton.jit
def _log2(x):
    """log2 by the one hardware instruction (error 2^-22); the library's takes some twenty."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if INTERPRETED:  # which multiplies the bit patterns of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _dot_add(a, b, acc, PRECISION: tl.constexpr):
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _load_log2(multiplicity, keep):
    """log2 of the multiplicities at the pointer; -inf where `keep` drops them."""
    return _log2(tl.load(multiplicity + tl.arange(0, keep.shape[0]), mask=keep, other=0.0))


@triton.jit
def _rows(base, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return base + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load_rows(base, stride, keep, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """The [ROWS, WIDTH] block at `base`; rows that `keep` drops read as zero."""
    pointers = _rows(base, stride, keep.shape[0], WIDTH)
    if MASKED:
        x = tl.load(pointers, mask=keep[:, None], other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def _store_rows(base, stride, x, keep, MASKED: tl.constexpr):
    pointers = _rows(base, stride, x.shape[0], x.shape[1])
    x = x.to(base.dtype.element_ty)
    if MASKED:
        tl.store(pointers, x, mask=keep[:, None])
    else:
        tl.store(pointers, x)


@triton.jit
def _load_tables(cos, sin, stride, keep, D: tl.constexpr, MASKED: tl.constexpr):
    c = _load_rows(cos, stride, keep, D // 2, MASKED)
    s = _load_rows(sin, stride, keep, D // 2, MASKED)
    return c, s


@triton.jit
def _pairs(x):
    """Even and odd channels of x in float32: neighbours in one thread, so no data moves."""
    return tl.split(tl.reshape(x.to(tl.float32), [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def _interleave(even, odd):
    return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1] * 2])


@triton.jit
def _rotate(x, cos, sin):
    even, odd = _pairs(x)
    c = cos.to(tl.float32)
    s = sin.to(tl.float32)
    # Interleave before rounding: one instruction then rounds and packs a pair.
    return _opaque(_interleave(even * c - odd * s, even * s + odd * c).to(x.dtype))


@triton.jit
def _unrotate(g, cos, sin):
    even, odd = _pairs(g)
    c = cos.to(tl.float32)
    s = sin.to(tl.float32)
    return _interleave(even * c + odd * s, odd * c - even * s)


# ---------------------------------------------------------------------------------------------
# Forward, cores resident
# ---------------------------------------------------------------------------------------------


@triton.jit
def _softmax_step(scores, value, m, norm, acc, scale_log2, PRECISION: tl.constexpr):
    """Fold a block of scores and their values into a running softmax (m, norm, acc)."""
    m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)
    decay = tl.exp2(m - m_new)
    p = tl.exp2(scores * scale_log2 - m_new[:, None])
    norm = norm * decay + tl.sum(p, 1)
    # Not as the accumulator of the dot: ptxas would then run all tensor-core instructions of a
    # pipelined loop one after the other (its remark C7515). As a fused multiply-add it is free.
    new = _dot(p.to(value.dtype), value, PRECISION)
    acc = tl.fma(acc, tl.broadcast_to(decay[:, None], acc.shape), new)
    return m_new, norm, acc


@triton.jit
def _forward_tile(
    start, left, q, k, v, out, lse, cos, sin, multiplicity, q_t, k_t, v_t, o_t, tab_t,
    q_c, k_c, v_c, is_core, m, norm, acc, scale_log2,
    D: tl.constexpr, BLOCK_N: tl.constexpr, ROTATE: tl.constexpr, PAD_CORES: tl.constexpr,
    MASKED: tl.constexpr, PATCH_ROWS: tl.constexpr, CORE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    at = tl.cast(start, tl.int64)
    keep = tl.arange(0, BLOCK_N) < left
    # Every load first: they are in flight together before the first one is waited for.
    if PATCH_ROWS:
        x_q = _load_rows(q + at * q_t, q_t, keep, D, MASKED)
    if CORE_ROWS:
        x_k = _load_rows(k + at * k_t, k_t, keep, D, MASKED)
        x_v = _load_rows(v + at * v_t, v_t, keep, D, MASKED)
    if multiplicity is not None:
        log2_m = _load_log2(multiplicity + at, keep)
    if ROTATE:
        c, s = _load_tables(cos + at * tab_t, sin + at * tab_t, tab_t, keep, D, MASKED)
        if PATCH_ROWS:
            x_q = _rotate(x_q, c, s)
        if CORE_ROWS:
            x_k = _rotate(x_k, c, s)

    if PATCH_ROWS:
        scores = _dot(x_q, tl.trans(k_c), PRECISION)
        if PAD_CORES:
            scores = tl.where(is_core[None, :], scores, float("-inf"))
        m_t = tl.max(scores, 1) * scale_log2
        p = tl.exp2(scores * scale_log2 - m_t[:, None])
        norm_t = tl.sum(p, 1)
        if multiplicity is not None:  # the row of padding: zero, and +inf
            norm_t = tl.where(log2_m == float("-inf"), float("inf"), norm_t)
        x_o = _dot(p.to(v_c.dtype), v_c, PRECISION) * (1.0 / norm_t)[:, None]
        _store_rows(out + at * o_t, o_t, x_o, keep, MASKED)
        lse_rows = lse + at + tl.arange(0, BLOCK_N)
        lse_t = m_t + _log2(norm_t)
        if MASKED:
            tl.store(lse_rows, lse_t, mask=keep)
        else:
            tl.store(lse_rows, lse_t)

    # The core rows come second, not interleaved: the scores of one half at a time are alive, which
    # takes 70 registers off a fused program.
    if CORE_ROWS:
        scores = _dot(q_c, tl.trans(x_k), PRECISION)
        if multiplicity is not None:  # which also hides what is past the end
            scores = scores * scale_log2 + log2_m[None, :]
            m, norm, acc = _softmax_step(scores, x_v, m, norm, acc, 1.0, PRECISION)
        else:
            if MASKED:
                scores = tl.where(keep[None, :], scores, float("-inf"))
            m, norm, acc = _softmax_step(scores, x_v, m, norm, acc, scale_log2, PRECISION)
    return m, norm, acc


@triton.jit
def _forward_span(
    first, last, q, k, v, out, lse, cos, sin, multiplicity, q_t, k_t, v_t, o_t, tab_t,
    q_c, k_c, v_c, is_core, m, norm, acc, scale_log2,
    D: tl.constexpr, BLOCK_N: tl.constexpr, ROTATE: tl.constexpr, PAD_CORES: tl.constexpr,
    PAD_PATCHES: tl.constexpr, PATCH_ROWS: tl.constexpr, CORE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles from patch `first` to `last`: whole ones without masks, then the ragged one.

    In float32 the dots are unrolled multiply-adds, so a second copy of the tile is not worth its
    compile time: all tiles are masked there.
    """
    PEEL: tl.constexpr = PAD_PATCHES and q.dtype.element_ty != tl.float32
    MASKED: tl.constexpr = PAD_PATCHES and not PEEL
    whole = last
    if PEEL:
        whole = first + (last - first) // BLOCK_N * BLOCK_N
    for start in range(first, whole, BLOCK_N):
        m, norm, acc = _forward_tile(
            start, last - start, q, k, v, out, lse, cos, sin, multiplicity,
            q_t, k_t, v_t, o_t, tab_t,
            q_c, k_c, v_c, is_core, m, norm, acc, scale_log2,
            D, BLOCK_N, ROTATE, PAD_CORES, MASKED, PATCH_ROWS, CORE_ROWS, PRECISION,
        )  # fmt: skip
    if PEEL:  # noqa: SIM102 (one is a constant, the other is not)
        if whole < last:
            m, norm, acc = _forward_tile(
                whole, last - whole, q, k, v, out, lse, cos, sin, multiplicity,
                q_t, k_t, v_t, o_t, tab_t,
                q_c, k_c, v_c, is_core, m, norm, acc, scale_log2,
                D, BLOCK_N, ROTATE, PAD_CORES, True, PATCH_ROWS, CORE_ROWS, PRECISION,
            )  # fmt: skip
    return m, norm, acc


@triton.jit
def _load_rotated_cores(
    x, x_t, cos, sin, tab_t, is_core,
    D: tl.constexpr, ROTATE: tl.constexpr, PAD_CORES: tl.constexpr,
):  # fmt: skip
    tile = _load_rows(x, x_t, is_core, D, PAD_CORES)
    if ROTATE:
        c, s = _load_tables(cos, sin, tab_t, is_core, D, PAD_CORES)
        tile = _rotate(tile, c, s)
    return tile


@triton.jit
def _finish_rows(m, norm, acc, out, lse, o_t, keep):
    """Normalise finished rows and store their outputs and log-sum-exps."""
    _store_rows(out, o_t, acc * (1.0 / norm)[:, None], keep, True)
    tl.store(lse + tl.arange(0, keep.shape[0]), m + _log2(norm), mask=keep)


@triton.jit
def _no_maximum(multiplicity, ROWS: tl.constexpr):
    """The maximum of rows that have seen nothing yet.

    A row that goes on to see padding only must not subtract -inf from -inf: with multiplicity, the
    least finite number there is, against which any score that counts is large.
    """
    if multiplicity is not None:
        m = tl.full([ROWS], -3.4028234e38, tl.float32)
    else:
        m = tl.full([ROWS], float("-inf"), tl.float32)
    return m


# Sizes that change from call to call: compiling anew for "divisible by 16" would gain nothing.
_SIZES = (
    "heads", "num_cores", "num_patches", "splits", "span", "core_programs", "multiplicity_b",
)  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def forward_kernel(
    q, k, v, out, lse, core_cos, core_sin, patch_cos, patch_sin, multiplicity,
    partial_acc, partial_max, partial_sum,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    core_tab_b, core_tab_t, patch_tab_b, patch_tab_t, multiplicity_b,
    heads, num_cores, num_patches, splits, span, core_programs,
    scale_log2,
    D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    ROTATE_CORES: tl.constexpr, ROTATE_PATCHES: tl.constexpr,
    PAD_CORES: tl.constexpr, PAD_PATCHES: tl.constexpr,
    FUSED: tl.constexpr, MERGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. core_programs-1 play the core role (or both, if FUSED), the others the patch
    role. The core role comes first because its results still have to be merged."""
    pid = tl.program_id(0)
    core_role = pid < core_programs
    index = tl.where(core_role, pid, pid - core_programs)
    split = index % splits
    sequence = index // splits
    b = (sequence // heads).to(tl.int64)
    h = (sequence % heads).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    out += b * o_b + h * o_h
    lse += sequence.to(tl.int64) * (num_cores + num_patches)
    core_cos += b * core_tab_b
    core_sin += b * core_tab_b
    patch_cos += b * patch_tab_b
    patch_sin += b * patch_tab_b
    cores = num_cores.to(tl.int64)
    q_p = q + cores * q_t
    k_p = k + cores * k_t
    v_p = v + cores * v_t
    out_p = out + cores * o_t
    lse_p = lse + num_cores
    is_core = tl.arange(0, BLOCK_C) < num_cores
    first = split * span
    last = tl.minimum(first + span, num_patches)

    if multiplicity is not None:
        multiplicity += b * multiplicity_b
    m = _no_maximum(multiplicity, BLOCK_C)
    norm = tl.zeros([BLOCK_C], tl.float32)
    acc = tl.zeros([BLOCK_C, D], tl.float32)
    if FUSED or core_role:
        q_c = _load_rotated_cores(
            q, q_t, core_cos, core_sin, core_tab_t, is_core, D, ROTATE_CORES, PAD_CORES
        )
        if split == 0:
            # The cores among themselves.
            k_c = _load_rotated_cores(
                k, k_t, core_cos, core_sin, core_tab_t, is_core, D, ROTATE_CORES, PAD_CORES
            )
            v_c = _load_rows(v, v_t, is_core, D, PAD_CORES)
            scores = _dot(q_c, tl.trans(k_c), PRECISION)
            if PAD_CORES:
                scores = tl.where(is_core[None, :], scores, float("-inf"))
            m, norm, acc = _softmax_step(scores, v_c, m, norm, acc, scale_log2, PRECISION)
        if FUSED:
            k_r = _load_rotated_cores(
                k, k_t, core_cos, core_sin, core_tab_t, is_core, D, ROTATE_CORES, PAD_CORES
            )
            v_r = _load_rows(v, v_t, is_core, D, PAD_CORES)
        else:
            k_r = q_c
            v_r = q_c
        m, norm, acc = _forward_span(
            first, last, q_p, k_p, v_p, out_p, lse_p, patch_cos, patch_sin, multiplicity,
            q_t, k_t, v_t, o_t, patch_tab_t, q_c, k_r, v_r, is_core, m, norm, acc, scale_log2,
            D, BLOCK_N, ROTATE_PATCHES, PAD_CORES, PAD_PATCHES, FUSED, True, PRECISION,
        )  # fmt: skip
        if MERGE:
            rows = pid.to(tl.int64) * BLOCK_C
            _store_rows(partial_acc + rows * D, D, acc, is_core, False)
            tl.store(partial_max + rows + tl.arange(0, BLOCK_C), m)
            tl.store(partial_sum + rows + tl.arange(0, BLOCK_C), norm)
        else:
            _finish_rows(m, norm, acc, out, lse, o_t, is_core)
    else:
        k_c = _load_rotated_cores(
            k, k_t, core_cos, core_sin, core_tab_t, is_core, D, ROTATE_CORES, PAD_CORES
        )
        v_c = _load_rows(v, v_t, is_core, D, PAD_CORES)
        _forward_span(
            first, last, q_p, k_p, v_p, out_p, lse_p, patch_cos, patch_sin, multiplicity,
            q_t, k_t, v_t, o_t, patch_tab_t, k_c, k_c, v_c, is_core, m, norm, acc, scale_log2,
            D, BLOCK_N, ROTATE_PATCHES, PAD_CORES, PAD_PATCHES, True, False, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=("heads", "rows", "row_blocks", "splits"))
def merge_forward_kernel(
    out, lse, partial_acc, partial_max, partial_sum, o_b, o_h, o_t, lse_s,
    heads, rows, row_stride, row_blocks, splits,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the splits' partial softmaxes of BLOCK_R rows, in the order of the splits."""
    pid = tl.program_id(0)
    sequence = pid // row_blocks
    first = pid % row_blocks * BLOCK_R
    r = first + tl.arange(0, BLOCK_R)
    keep = r < rows
    base = sequence.to(tl.int64) * splits * row_stride
    scalars = tl.arange(0, BLOCK_S)[:, None] * row_stride + r[None, :]
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for s in range(0, splits, BLOCK_S):
        here = (s + tl.arange(0, BLOCK_S))[:, None] < splits
        at = base + s * row_stride
        m = tl.load(partial_max + at + scalars, mask=here & keep[None, :], other=float("-inf"))
        top = tl.maximum(top, tl.max(m, 0))
    # Rows past the end have seen nothing; any finite maximum keeps them free of NaN.
    top = tl.where(keep, top, 0.0)
    norm = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, D], tl.float32)
    for s in range(0, splits, BLOCK_S):
        here = ((s + tl.arange(0, BLOCK_S))[:, None] < splits) & keep[None, :]
        at = base + s * row_stride
        m = tl.load(partial_max + at + scalars, mask=here, other=float("-inf"))
        weight = tl.exp2(m - top[None, :])
        norm += tl.sum(weight * tl.load(partial_sum + at + scalars, mask=here, other=0.0), 0)
        block = scalars[:, :, None] * D + tl.arange(0, D)[None, None, :]
        part = tl.load(partial_acc + at * D + block, mask=here[:, :, None], other=0.0)
        acc += tl.sum(weight[:, :, None] * part, 0)
    norm = tl.where(keep, norm, 1.0)
    b = (sequence // heads).to(tl.int64)
    h = (sequence % heads).to(tl.int64)
    out += b * o_b + h * o_h + first.to(tl.int64) * o_t
    lse += sequence.to(tl.int64) * lse_s + first
    _finish_rows(top, norm, acc, out, lse, o_t, keep)


# ---------------------------------------------------------------------------------------------
# Backward, cores resident
# ---------------------------------------------------------------------------------------------


@triton.jit
def _backward_tile(
    start, left, q, k, v, do, dq, dk, dv, lse, cos, sin, multiplicity,
    q_t, k_t, v_t, do_t, g_t, tab_t,
    q_c, k_c, v_c, do_c, lse_c, delta_c, is_core, dq_c, dk_c, dv_c, scale, scale_log2,
    D: tl.constexpr, BLOCK_N: tl.constexpr, ROTATE: tl.constexpr, PAD_CORES: tl.constexpr,
    MASKED: tl.constexpr, PATCH_ROWS: tl.constexpr, CORE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    at = tl.cast(start, tl.int64)
    n = tl.arange(0, BLOCK_N)
    keep = n < left
    dtype = q.dtype.element_ty
    if PATCH_ROWS:
        x_q = _load_rows(q + at * q_t, q_t, keep, D, MASKED)
        x_do = _load_rows(do + at * do_t, do_t, keep, D, MASKED)
        if MASKED:
            lse_t = tl.load(lse + at + n, mask=keep, other=float("inf"))
        else:
            lse_t = tl.load(lse + at + n)
    if CORE_ROWS:
        x_k = _load_rows(k + at * k_t, k_t, keep, D, MASKED)
        x_v = _load_rows(v + at * v_t, v_t, keep, D, MASKED)
        if multiplicity is not None:
            log2_m = _load_log2(multiplicity + at, keep)
    if ROTATE:
        c, s = _load_tables(cos + at * tab_t, sin + at * tab_t, tab_t, keep, D, MASKED)
        if PATCH_ROWS:
            x_q = _rotate(x_q, c, s)
        if CORE_ROWS:
            x_k = _rotate(x_k, c, s)

    if PATCH_ROWS:
        p = _dot(x_q, tl.trans(k_c), PRECISION)
        p = tl.exp2(p * scale_log2 - lse_t[:, None])
        if PAD_CORES:
            p = tl.where(is_core[None, :], p, 0.0)
        dv_c = _dot_add(tl.trans(p.to(dtype)), x_do, dv_c, PRECISION)
        dp = _dot(x_do, tl.trans(v_c), PRECISION)
        delta = tl.sum(p * dp, 1) * scale
        ds = (p * (dp * scale - delta[:, None])).to(dtype)
        dk_c = _dot_add(tl.trans(ds), x_q, dk_c, PRECISION)
        g = _dot(ds, k_c, PRECISION)
        if ROTATE:
            g = _unrotate(g, c, s)
        _store_rows(dq + at * g_t, g_t, g, keep, MASKED)

    if CORE_ROWS:
        if q_c.shape[0] >= 64:
            p = _dot(q_c, tl.trans(x_k), PRECISION)
            if multiplicity is not None:
                p = tl.exp2((p * scale_log2 + log2_m[None, :]) - lse_c[:, None])
            else:
                p = tl.exp2(p * scale_log2 - lse_c[:, None])
                if MASKED:
                    p = tl.where(keep[None, :], p, 0.0)
            g = _dot(tl.trans(p.to(dtype)), do_c, PRECISION)
            _store_rows(dv + at * g_t, g_t, g, keep, MASKED)
            dp = _dot(do_c, tl.trans(x_v), PRECISION)
            ds = (p * (dp * scale - delta_c[:, None])).to(dtype)
            dq_c = _dot_add(ds, x_k, dq_c, PRECISION)
            g = _dot(tl.trans(ds), q_c, PRECISION)
        else:
            p = _dot(x_k, tl.trans(q_c), PRECISION)
            if multiplicity is not None:
                p = tl.exp2((p * scale_log2 + log2_m[:, None]) - lse_c[None, :])
            else:
                p = tl.exp2(p * scale_log2 - lse_c[None, :])
                if MASKED:
                    p = tl.where(keep[:, None], p, 0.0)
            g = _dot(p.to(dtype), do_c, PRECISION)
            _store_rows(dv + at * g_t, g_t, g, keep, MASKED)
            dp = _dot(x_v, tl.trans(do_c), PRECISION)
            ds = (p * (dp * scale - delta_c[None, :])).to(dtype)
            dq_c = _dot_add(tl.trans(ds), x_k, dq_c, PRECISION)
            g = _dot(ds, q_c, PRECISION)
        if ROTATE:
            g = _unrotate(g, c, s)
        _store_rows(dk + at * g_t, g_t, g, keep, MASKED)
    return dq_c, dk_c, dv_c


@triton.jit
def _backward_span(
    first, last, q, k, v, do, dq, dk, dv, lse, cos, sin, multiplicity,
    q_t, k_t, v_t, do_t, g_t, tab_t,
    q_c, k_c, v_c, do_c, lse_c, delta_c, is_core, dq_c, dk_c, dv_c, scale, scale_log2,
    D: tl.constexpr, BLOCK_N: tl.constexpr, ROTATE: tl.constexpr, PAD_CORES: tl.constexpr,
    PAD_PATCHES: tl.constexpr, PATCH_ROWS: tl.constexpr, CORE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    PEEL: tl.constexpr = PAD_PATCHES and q.dtype.element_ty != tl.float32
    MASKED: tl.constexpr = PAD_PATCHES and not PEEL
    whole = last
    if PEEL:
        whole = first + (last - first) // BLOCK_N * BLOCK_N
    for start in range(first, whole, BLOCK_N):
        dq_c, dk_c, dv_c = _backward_tile(
            start, last - start, q, k, v, do, dq, dk, dv, lse, cos, sin, multiplicity,
            q_t, k_t, v_t, do_t, g_t, tab_t,
            q_c, k_c, v_c, do_c, lse_c, delta_c, is_core, dq_c, dk_c, dv_c, scale, scale_log2,
            D, BLOCK_N, ROTATE, PAD_CORES, MASKED, PATCH_ROWS, CORE_ROWS, PRECISION,
        )  # fmt: skip
    if PEEL:  # noqa: SIM102
        if whole < last:
            dq_c, dk_c, dv_c = _backward_tile(
                whole, last - whole, q, k, v, do, dq, dk, dv, lse, cos, sin, multiplicity,
                q_t, k_t, v_t, do_t, g_t, tab_t,
                q_c, k_c, v_c, do_c, lse_c, delta_c, is_core, dq_c, dk_c, dv_c, scale, scale_log2,
                D, BLOCK_N, ROTATE, PAD_CORES, True, PATCH_ROWS, CORE_ROWS, PRECISION,
            )  # fmt: skip
    return dq_c, dk_c, dv_c


@triton.jit
def _core_statistics(lse, out, do_c, o_t, is_core, scale, PAD_CORES: tl.constexpr):
    """Of the core rows: log-sum-exp, and scale * rowsum(dO * O).

    A padding row gets lse = +inf, so that every probability of it is exactly zero.
    """
    rows = tl.arange(0, is_core.shape[0])
    lse_c = tl.load(lse + rows, mask=is_core, other=float("inf"))
    o_c = _load_rows(out, o_t, is_core, do_c.shape[1], PAD_CORES)
    return lse_c, tl.sum(do_c.to(tl.float32) * o_c.to(tl.float32), 1) * scale


@triton.jit
def _backward_cores(
    q, k, v, out, do, lse, cos, sin, q_t, k_t, v_t, o_t, do_t, tab_t, is_core, scale, scale_log2,
    D: tl.constexpr, ROTATE: tl.constexpr, PAD_CORES: tl.constexpr,
    PATCH_ROWS: tl.constexpr, CORE_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the cores owe each other. Each role takes the part its own accumulators hold; scores
    have queries as rows."""
    dtype = q.dtype.element_ty
    q_c = _load_rotated_cores(q, q_t, cos, sin, tab_t, is_core, D, ROTATE, PAD_CORES)
    k_c = _load_rotated_cores(k, k_t, cos, sin, tab_t, is_core, D, ROTATE, PAD_CORES)
    v_c = _load_rows(v, v_t, is_core, D, PAD_CORES)
    do_c = _load_rows(do, do_t, is_core, D, PAD_CORES)
    lse_c, delta_c = _core_statistics(lse, out, do_c, o_t, is_core, scale, PAD_CORES)
    dq_c = tl.zeros([is_core.shape[0], D], tl.float32)
    dk_c = dq_c
    dv_c = dq_c
    p = _dot(q_c, tl.trans(k_c), PRECISION)
    p = tl.exp2(p * scale_log2 - lse_c[:, None])
    if PAD_CORES:
        p = tl.where(is_core[None, :], p, 0.0)
    dp = _dot(do_c, tl.trans(v_c), PRECISION)
    ds = (p * (dp * scale - delta_c[:, None])).to(dtype)
    if CORE_ROWS:
        dq_c = _dot(ds, k_c, PRECISION)
    if PATCH_ROWS:
        dk_c = _dot(tl.trans(ds), q_c, PRECISION)
        dv_c = _dot(tl.trans(p.to(dtype)), do_c, PRECISION)
    return dq_c, dk_c, dv_c


@triton.jit
def _finish_gradient(
    g, x, dx, cos, sin, table_grad, x_t, g_t, tab_t, table_half, keep,
    ROTATE: tl.constexpr, TABLE_GRAD: tl.constexpr,
):  # fmt: skip
    """From the gradient `g` of rotated core rows to that of the rows, and of the tables.

    Rotation is linear in cos and sin: with the unrotated pair (e, o) and its rotated gradient
    (a, b), d/dcos = a e + b o and d/dsin = b e - a o.
    """
    D: tl.constexpr = g.shape[1]
    if ROTATE:
        c, s = _load_tables(cos, sin, tab_t, keep, D, True)
        if TABLE_GRAD:
            even, odd = _pairs(_load_rows(x, x_t, keep, D, True))
            a, b = _pairs(g)
            _store_rows(table_grad, D // 2, a * even + b * odd, keep, True)
            _store_rows(table_grad + table_half, D // 2, b * even - a * odd, keep, True)
        g = _unrotate(g, c, s)
    _store_rows(dx, g_t, g, keep, True)


@triton.jit(do_not_specialize=(*_SIZES, "table_half"))
def backward_kernel(
    q, k, v, out, do, lse, dq, dk, dv, core_cos, core_sin, patch_cos, patch_sin, multiplicity,
    partial_dq, partial_dk, partial_dv, table_grad_q, table_grad_k,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, g_b, g_h, g_t,
    core_tab_b, core_tab_t, patch_tab_b, patch_tab_t, table_half, multiplicity_b,
    heads, num_cores, num_patches, splits, span, core_programs,
    scale, scale_log2,
    D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    ROTATE_CORES: tl.constexpr, ROTATE_PATCHES: tl.constexpr, TABLE_GRAD: tl.constexpr,
    PAD_CORES: tl.constexpr, PAD_PATCHES: tl.constexpr,
    FUSED: tl.constexpr, MERGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Same roles as in `forward_kernel`: the core rows give dk, dv of the patches and dq of the
    cores, the patch rows give dq of the patches and dk, dv of the cores."""
    pid = tl.program_id(0)
    core_role = pid < core_programs
    index = tl.where(core_role, pid, pid - core_programs)
    split = index % splits
    sequence = index // splits
    b = (sequence // heads).to(tl.int64)
    h = (sequence % heads).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    out += b * o_b + h * o_h
    do += b * do_b + h * do_h
    dq += b * g_b + h * g_h
    dk += b * g_b + h * g_h
    dv += b * g_b + h * g_h
    lse += sequence.to(tl.int64) * (num_cores + num_patches)
    core_cos += b * core_tab_b
    core_sin += b * core_tab_b
    patch_cos += b * patch_tab_b
    patch_sin += b * patch_tab_b
    cores = num_cores.to(tl.int64)
    q_p = q + cores * q_t
    k_p = k + cores * k_t
    v_p = v + cores * v_t
    do_p = do + cores * do_t
    dq_p = dq + cores * g_t
    dk_p = dk + cores * g_t
    dv_p = dv + cores * g_t
    lse_p = lse + num_cores
    is_core = tl.arange(0, BLOCK_C) < num_cores
    first = split * span
    last = tl.minimum(first + span, num_patches)

    if multiplicity is not None:
        multiplicity += b * multiplicity_b
    dq_c = tl.zeros([BLOCK_C, D], tl.float32)
    dk_c = tl.zeros([BLOCK_C, D], tl.float32)
    dv_c = tl.zeros([BLOCK_C, D], tl.float32)
    if FUSED or core_role:
        q_c = _load_rotated_cores(
            q, q_t, core_cos, core_sin, core_tab_t, is_core, D, ROTATE_CORES, PAD_CORES
        )
        do_c = _load_rows(do, do_t, is_core, D, PAD_CORES)
        lse_c, delta_c = _core_statistics(lse, out, do_c, o_t, is_core, scale, PAD_CORES)
        if FUSED:
            k_c = _load_rotated_cores(
                k, k_t, core_cos, core_sin, core_tab_t, is_core, D, ROTATE_CORES, PAD_CORES
            )
            v_c = _load_rows(v, v_t, is_core, D, PAD_CORES)
        else:
            k_c = q_c
            v_c = q_c
        if split == 0:
            dq_c, dk_c, dv_c = _backward_cores(
                q, k, v, out, do, lse, core_cos, core_sin, q_t, k_t, v_t, o_t, do_t, core_tab_t,
                is_core, scale, scale_log2, D, ROTATE_CORES, PAD_CORES, FUSED, True, PRECISION,
            )  # fmt: skip
        dq_c, dk_c, dv_c = _backward_span(
            first, last, q_p, k_p, v_p, do_p, dq_p, dk_p, dv_p, lse_p,
            patch_cos, patch_sin, multiplicity,
            q_t, k_t, v_t, do_t, g_t, patch_tab_t,
            q_c, k_c, v_c, do_c, lse_c, delta_c, is_core, dq_c, dk_c, dv_c, scale, scale_log2,
            D, BLOCK_N, ROTATE_PATCHES, PAD_CORES, PAD_PATCHES, FUSED, True, PRECISION,
        )  # fmt: skip
    else:
        k_c = _load_rotated_cores(
            k, k_t, core_cos, core_sin, core_tab_t, is_core, D, ROTATE_CORES, PAD_CORES
        )
        v_c = _load_rows(v, v_t, is_core, D, PAD_CORES)
        if split == 0:
            dq_c, dk_c, dv_c = _backward_cores(
                q, k, v, out, do, lse, core_cos, core_sin, q_t, k_t, v_t, o_t, do_t, core_tab_t,
                is_core, scale, scale_log2, D, ROTATE_CORES, PAD_CORES, True, False, PRECISION,
            )  # fmt: skip
        nothing = tl.zeros([BLOCK_C], tl.float32)
        dq_c, dk_c, dv_c = _backward_span(
            first, last, q_p, k_p, v_p, do_p, dq_p, dk_p, dv_p, lse_p,
            patch_cos, patch_sin, multiplicity,
            q_t, k_t, v_t, do_t, g_t, patch_tab_t,
            k_c, k_c, v_c, v_c, nothing, nothing, is_core, dq_c, dk_c, dv_c, scale, scale_log2,
            D, BLOCK_N, ROTATE_PATCHES, PAD_CORES, PAD_PATCHES, True, False, PRECISION,
        )  # fmt: skip

    if MERGE:
        block = index.to(tl.int64) * (BLOCK_C * D)
        if FUSED or core_role:
            _store_rows(partial_dq + block, D, dq_c, is_core, False)
        if FUSED or not core_role:
            _store_rows(partial_dk + block, D, dk_c, is_core, False)
            _store_rows(partial_dv + block, D, dv_c, is_core, False)
    else:
        tables = sequence.to(tl.int64) * num_cores * (D // 2)
        if FUSED or core_role:
            _finish_gradient(
                dq_c, q, dq, core_cos, core_sin, table_grad_q + tables,
                q_t, g_t, core_tab_t, table_half, is_core, ROTATE_CORES, TABLE_GRAD,
            )  # fmt: skip
        if FUSED or not core_role:
            _finish_gradient(
                dk_c, k, dk, core_cos, core_sin, table_grad_k + tables,
                k_t, g_t, core_tab_t, table_half, is_core, ROTATE_CORES, TABLE_GRAD,
            )  # fmt: skip
            _store_rows(dv, g_t, dv_c, is_core, True)


@triton.jit
def _sum_splits(partial, row_stride, splits, keep, D: tl.constexpr, BLOCK_S: tl.constexpr):
    """Sum over the splits of BLOCK_R rows, in a fixed order: the same bits on every run."""
    BLOCK_R: tl.constexpr = keep.shape[0]
    s = tl.arange(0, BLOCK_S)
    rows = s[:, None] * row_stride + tl.arange(0, BLOCK_R)[None, :]
    block = rows[:, :, None] * D + tl.arange(0, D)[None, None, :]
    total = tl.zeros([BLOCK_R, D], tl.float32)
    for first in range(0, splits, BLOCK_S):
        here = (first + s < splits)[:, None, None] & keep[None, :, None]
        total += tl.sum(tl.load(partial + first * row_stride * D + block, mask=here, other=0.0), 0)
    return total


@triton.jit(do_not_specialize=("heads", "rows", "row_blocks", "splits", "table_half"))
def merge_backward_kernel(
    q, k, dq, dk, dv, cos, sin, partial_dq, partial_dk, partial_dv, table_grad_q, table_grad_k,
    q_b, q_h, q_t, k_b, k_h, k_t, g_b, g_h, g_t, tab_b, tab_t, table_half,
    heads, rows, row_stride, row_blocks, splits,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    ROTATE: tl.constexpr, TABLE_GRAD: tl.constexpr,
):  # fmt: skip
    """Sum the splits' gradients of BLOCK_R core rows and turn them back."""
    pid = tl.program_id(0)
    sequence = (pid // row_blocks).to(tl.int64)
    first = (pid % row_blocks * BLOCK_R).to(tl.int64)
    keep = first + tl.arange(0, BLOCK_R) < rows
    b = sequence // heads
    h = sequence % heads
    at_p = (sequence * splits * row_stride + first) * D
    at_g = b * g_b + h * g_h + first * g_t
    at_tab = b * tab_b + first * tab_t
    at_table = (sequence * rows + first) * (D // 2)
    g = _sum_splits(partial_dq + at_p, row_stride, splits, keep, D, BLOCK_S)
    _finish_gradient(
        g, q + b * q_b + h * q_h + first * q_t, dq + at_g, cos + at_tab, sin + at_tab,
        table_grad_q + at_table, q_t, g_t, tab_t, table_half, keep, ROTATE, TABLE_GRAD,
    )  # fmt: skip
    g = _sum_splits(partial_dk + at_p, row_stride, splits, keep, D, BLOCK_S)
    _finish_gradient(
        g, k + b * k_b + h * k_h + first * k_t, dk + at_g, cos + at_tab, sin + at_tab,
        table_grad_k + at_table, k_t, g_t, tab_t, table_half, keep, ROTATE, TABLE_GRAD,
    )  # fmt: skip
    g = _sum_splits(partial_dv + at_p, row_stride, splits, keep, D, BLOCK_S)
    _store_rows(dv + at_g, g_t, g, keep, True)


# ---------------------------------------------------------------------------------------------
# Any number of cores: plain tiled attention over a range of rows and a range of keys
#
# Core rows see all tokens, patch rows see the cores, and the keys of a row are always a prefix of
# the sequence, so each kernel below is launched twice, once for the cores and once for the patches.
# The rotary tables of all tokens come as one [B or 1, T, d/2] pair, multiplicity as [B or 1, T]
# with ones for the cores.
# ---------------------------------------------------------------------------------------------


@triton.jit
def _load_tokens(
    x, cos, sin, first, end, x_t, tab_t,
    ROWS: tl.constexpr, D: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Rotated tokens first .. first + ROWS, zero from `end` on."""
    at = tl.cast(first, tl.int64)
    keep = first + tl.arange(0, ROWS) < end
    tile = _load_rows(x + at * x_t, x_t, keep, D, True)
    if ROTATE:
        c, s = _load_tables(cos + at * tab_t, sin + at * tab_t, tab_t, keep, D, True)
        tile = _rotate(tile, c, s)
    return tile


_TILED_SIZES = (
    "heads", "tokens", "row_first", "row_end", "key_first", "key_end", "blocks", "splits", "span",
    "multiplicity_b",
)  # fmt: skip


@triton.jit(do_not_specialize=_TILED_SIZES)
def tiled_forward_kernel(
    q, k, v, out, lse, cos, sin, multiplicity, partial_acc, partial_max, partial_sum,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, tab_b, tab_t, multiplicity_b,
    heads, tokens, row_first, row_end, key_end, blocks, splits, span, scale_log2,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    ROTATE: tl.constexpr, MERGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    split = pid // blocks % splits
    sequence = pid // blocks // splits
    first = row_first + pid % blocks * BLOCK_R
    b = (sequence // heads).to(tl.int64)
    h = (sequence % heads).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    cos += b * tab_b
    sin += b * tab_b
    if multiplicity is not None:
        multiplicity += b * multiplicity_b
    q_r = _load_tokens(q, cos, sin, first, row_end, q_t, tab_t, BLOCK_R, D, ROTATE)
    m = _no_maximum(multiplicity, BLOCK_R)
    norm = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, D], tl.float32)
    end = tl.minimum(split * span + span, key_end)
    for start in range(split * span, end, BLOCK_K):
        k_k = _load_tokens(k, cos, sin, start, end, k_t, tab_t, BLOCK_K, D, ROTATE)
        v_k = _load_tokens(v, cos, sin, start, end, v_t, tab_t, BLOCK_K, D, False)
        scores = _dot(q_r, tl.trans(k_k), PRECISION)
        here = start + tl.arange(0, BLOCK_K) < end
        if multiplicity is not None:
            scores = scores * scale_log2 + _load_log2(multiplicity + start, here)[None, :]
            m, norm, acc = _softmax_step(scores, v_k, m, norm, acc, 1.0, PRECISION)
        else:
            scores = tl.where(here[None, :], scores, float("-inf"))
            m, norm, acc = _softmax_step(scores, v_k, m, norm, acc, scale_log2, PRECISION)
    keep = first + tl.arange(0, BLOCK_R) < row_end
    if multiplicity is not None:
        padding = _load_log2(multiplicity + first, keep) == float("-inf")
        norm = tl.where(padding, float("inf"), norm)
    if MERGE:
        rows = pid.to(tl.int64) * BLOCK_R
        _store_rows(partial_acc + rows * D, D, acc, keep, False)
        tl.store(partial_max + rows + tl.arange(0, BLOCK_R), m)
        tl.store(partial_sum + rows + tl.arange(0, BLOCK_R), norm)
    else:
        out += b * o_b + h * o_h + first.to(tl.int64) * o_t
        _finish_rows(m, norm, acc, out, lse + sequence.to(tl.int64) * tokens + first, o_t, keep)


@triton.jit(do_not_specialize=("heads", "tokens", "blocks"))
def delta_kernel(
    out, do, delta, o_b, o_h, o_t, do_b, do_h, do_t, heads, tokens, blocks, scale,
    D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """scale * rowsum(dO * O) of every token."""
    pid = tl.program_id(0)
    sequence = (pid // blocks).to(tl.int64)
    first = (pid % blocks * BLOCK_R).to(tl.int64)
    b = sequence // heads
    h = sequence % heads
    keep = first + tl.arange(0, BLOCK_R) < tokens
    o_r = _load_rows(out + b * o_b + h * o_h + first * o_t, o_t, keep, D, True)
    do_r = _load_rows(do + b * do_b + h * do_h + first * do_t, do_t, keep, D, True)
    total = tl.sum(o_r.to(tl.float32) * do_r.to(tl.float32), 1) * scale
    tl.store(delta + sequence * tokens + first + tl.arange(0, BLOCK_R), total, mask=keep)


@triton.jit
def _load_statistics(lse, delta, first, end, ROWS: tl.constexpr):
    """Log-sum-exps and deltas; rows past `end` get +inf, that is probability zero."""
    rows = first + tl.arange(0, ROWS)
    lse_r = tl.load(lse + rows, mask=rows < end, other=float("inf"))
    return lse_r, tl.load(delta + rows, mask=rows < end, other=0.0)


@triton.jit
def _tiled_gradient(
    q_r, k_k, v_k, do_r, lse_r, delta_r, multiplicity, first, here, scale, scale_log2,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Probabilities and score gradients of a block of rows and of the keys from `first` on, in the
    input dtype."""
    p = _dot(q_r, tl.trans(k_k), PRECISION)
    if multiplicity is not None:
        log2_m = _load_log2(multiplicity + first, here)
        p = tl.exp2((p * scale_log2 + log2_m[None, :]) - lse_r[:, None])
    else:
        p = tl.exp2(p * scale_log2 - lse_r[:, None])
        # A key past the end has score zero: exp2(-lse) may overflow, and inf * 0 is NaN.
        p = tl.where(here[None, :], p, 0.0)
    dp = _dot(do_r, tl.trans(v_k), PRECISION)
    ds = p * (dp * scale - delta_r[:, None])
    return p.to(q_r.dtype), ds.to(q_r.dtype)


@triton.jit(do_not_specialize=_TILED_SIZES)
def tiled_query_gradient_kernel(
    q, k, v, do, lse, delta, dq, cos, sin, multiplicity, partial_dq,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, g_b, g_h, g_t, tab_b, tab_t,
    multiplicity_b,
    heads, tokens, row_first, row_end, key_end, blocks, splits, span, scale, scale_log2,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    ROTATE: tl.constexpr, MERGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_R rows from the keys of one split."""
    pid = tl.program_id(0)
    split = pid // blocks % splits
    sequence = pid // blocks // splits
    first = row_first + pid % blocks * BLOCK_R
    b = (sequence // heads).to(tl.int64)
    h = (sequence % heads).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    do += b * do_b + h * do_h
    cos += b * tab_b
    sin += b * tab_b
    lse += sequence.to(tl.int64) * tokens
    delta += sequence.to(tl.int64) * tokens
    if multiplicity is not None:
        multiplicity += b * multiplicity_b
    q_r = _load_tokens(q, cos, sin, first, row_end, q_t, tab_t, BLOCK_R, D, ROTATE)
    do_r = _load_tokens(do, cos, sin, first, row_end, do_t, tab_t, BLOCK_R, D, False)
    lse_r, delta_r = _load_statistics(lse, delta, first, row_end, BLOCK_R)
    g = tl.zeros([BLOCK_R, D], tl.float32)
    end = tl.minimum(split * span + span, key_end)
    for start in range(split * span, end, BLOCK_K):
        k_k = _load_tokens(k, cos, sin, start, end, k_t, tab_t, BLOCK_K, D, ROTATE)
        v_k = _load_tokens(v, cos, sin, start, end, v_t, tab_t, BLOCK_K, D, False)
        here = start + tl.arange(0, BLOCK_K) < end
        _, ds = _tiled_gradient(
            q_r, k_k, v_k, do_r, lse_r, delta_r, multiplicity, start, here, scale, scale_log2,
            PRECISION,
        )  # fmt: skip
        g = _dot_add(ds, k_k, g, PRECISION)
    keep = first + tl.arange(0, BLOCK_R) < row_end
    at = tl.cast(first, tl.int64)
    if MERGE:
        _store_rows(partial_dq + pid.to(tl.int64) * (BLOCK_R * D), D, g, keep, False)
    else:
        _finish_gradient(
            g, q, dq + b * g_b + h * g_h + at * g_t, cos + at * tab_t, sin + at * tab_t, q,
            q_t, g_t, tab_t, 0, keep, ROTATE, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=_TILED_SIZES)
def tiled_key_gradient_kernel(
    q, k, v, do, lse, delta, dk, dv, cos, sin, multiplicity, partial_dk, partial_dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, g_b, g_h, g_t, tab_b, tab_t,
    multiplicity_b,
    heads, tokens, key_first, key_end, row_end, blocks, splits, span, scale, scale_log2,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    ROTATE: tl.constexpr, MERGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_K keys from the rows of one split."""
    pid = tl.program_id(0)
    split = pid // blocks % splits
    sequence = pid // blocks // splits
    first = key_first + pid % blocks * BLOCK_K
    b = (sequence // heads).to(tl.int64)
    h = (sequence % heads).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    do += b * do_b + h * do_h
    cos += b * tab_b
    sin += b * tab_b
    lse += sequence.to(tl.int64) * tokens
    delta += sequence.to(tl.int64) * tokens
    if multiplicity is not None:
        multiplicity += b * multiplicity_b
    k_k = _load_tokens(k, cos, sin, first, key_end, k_t, tab_t, BLOCK_K, D, ROTATE)
    v_k = _load_tokens(v, cos, sin, first, key_end, v_t, tab_t, BLOCK_K, D, False)
    keep = first + tl.arange(0, BLOCK_K) < key_end
    dk_k = tl.zeros([BLOCK_K, D], tl.float32)
    dv_k = tl.zeros([BLOCK_K, D], tl.float32)
    end = tl.minimum(split * span + span, row_end)
    for start in range(split * span, end, BLOCK_R):
        q_r = _load_tokens(q, cos, sin, start, end, q_t, tab_t, BLOCK_R, D, ROTATE)
        do_r = _load_tokens(do, cos, sin, start, end, do_t, tab_t, BLOCK_R, D, False)
        lse_r, delta_r = _load_statistics(lse, delta, start, end, BLOCK_R)
        p, ds = _tiled_gradient(
            q_r, k_k, v_k, do_r, lse_r, delta_r, multiplicity, first, keep, scale, scale_log2,
            PRECISION,
        )  # fmt: skip
        dk_k = _dot_add(tl.trans(ds), q_r, dk_k, PRECISION)
        dv_k = _dot_add(tl.trans(p), do_r, dv_k, PRECISION)
    at = tl.cast(first, tl.int64)
    if MERGE:
        block = pid.to(tl.int64) * (BLOCK_K * D)
        _store_rows(partial_dk + block, D, dk_k, keep, False)
        _store_rows(partial_dv + block, D, dv_k, keep, False)
    else:
        at_g = b * g_b + h * g_h + at * g_t
        _finish_gradient(
            dk_k, k, dk + at_g, cos + at * tab_t, sin + at * tab_t, k,
            k_t, g_t, tab_t, 0, keep, ROTATE, False,
        )  # fmt: skip
        _store_rows(dv + at_g, g_t, dv_k, keep, True)
