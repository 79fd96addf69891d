# ruff: noqa: SIM116, RET505
"""Triton kernels of the convolutions that matrix products do not serve: see `convolutions`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pick(index: tl.constexpr, w0, w1, w2, w3, w4):
    if index == 0:
        return w0
    elif index == 1:
        return w1
    elif index == 2:
        return w2
    elif index == 3:
        return w3
    else:
        return w4


@triton.jit
def depthwise_kernel(
    x,  # [B, H, W, C]
    weight,  # [KERNEL, KERNEL, C]
    bias,  # [C]
    out,  # [B, OUT_H, OUT_W, C]
    columns,  # B * OUT_W
    height,
    width,
    out_height,
    out_width,
    C: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,  # zeros above and to the left
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,  # 1, 2 or 4
):
    """A program makes ROWS rows of BLOCK columns and CHANNELS channels; its columns run on from one
    image of the batch into the next, so that narrow maps fill it too. It goes through the kernel's
    columns, and for each loads every input row once: that row then serves up to KERNEL output rows.
    """
    # Neighbours in channels, then in rows, run at about the same time: they share cache lines.
    groups: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    bands = (out_height + ROWS - 1) // ROWS
    program = tl.program_id(0)
    channel = (program % groups) * CHANNELS + tl.arange(0, CHANNELS)
    first = (program // groups) % bands * ROWS
    column = program // (groups * bands) * BLOCK + tl.arange(0, BLOCK)
    image = (column // out_width).to(tl.int64)
    x_out = column % out_width
    known = channel < C
    top = tl.zeros((BLOCK,), dtype=tl.int32) + first * STRIDE - PAD
    source = x + image * (height * width * C)

    acc0 = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    # A loop at run time, or the compiler keeps the weights of all columns in registers.
    for kx in range(KERNEL):
        w = weight + kx * C + channel
        w0 = tl.load(w, mask=known, other=0.0).to(tl.float32)[None, :]
        w1 = w0
        w2 = w0
        w3 = w0
        w4 = w0
        if KERNEL > 1:
            w1 = tl.load(w + KERNEL * C, mask=known, other=0.0).to(tl.float32)[None, :]
            w2 = tl.load(w + 2 * KERNEL * C, mask=known, other=0.0).to(tl.float32)[None, :]
        if KERNEL > 3:
            w3 = tl.load(w + 3 * KERNEL * C, mask=known, other=0.0).to(tl.float32)[None, :]
            w4 = tl.load(w + 4 * KERNEL * C, mask=known, other=0.0).to(tl.float32)[None, :]
        x_in = x_out * STRIDE + kx - PAD
        inside = (column < columns) & (x_in >= 0) & (x_in < width)
        for r in tl.static_range((ROWS - 1) * STRIDE + KERNEL):
            y_in = top + r
            mask = (inside & (y_in >= 0) & (y_in < height))[:, None] & known[None, :]
            at = source + (y_in * width + x_in) * C
            value = tl.load(at[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
            value = tl.minimum(tl.maximum(value, 0.0), 6.0)
            # Row r of the input meets row ky = r - STRIDE * t of the kernel in output row t.
            if r < KERNEL:
                acc0 += value * _pick(r, w0, w1, w2, w3, w4)
            if ROWS > 1 and r >= STRIDE and r - STRIDE < KERNEL:
                acc1 += value * _pick(r - STRIDE, w0, w1, w2, w3, w4)
            if ROWS > 2 and r >= 2 * STRIDE and r - 2 * STRIDE < KERNEL:
                acc2 += value * _pick(r - 2 * STRIDE, w0, w1, w2, w3, w4)
            if ROWS > 2 and r >= 3 * STRIDE and r - 3 * STRIDE < KERNEL:
                acc3 += value * _pick(r - 3 * STRIDE, w0, w1, w2, w3, w4)

    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    target = out + image * (out_height * out_width * C) + x_out * C
    store = (column < columns)[:, None] & known[None, :]
    _write(target, channel, acc0 + b, store, first, out_height, out_width, C)
    if ROWS > 1:
        _write(target, channel, acc1 + b, store, first + 1, out_height, out_width, C)
    if ROWS > 2:
        _write(target, channel, acc2 + b, store, first + 2, out_height, out_width, C)
        _write(target, channel, acc3 + b, store, first + 3, out_height, out_width, C)


@triton.jit
def _write(target, channel, value, mask, row, out_height, out_width, C: tl.constexpr):
    value = tl.minimum(tl.maximum(value, 0.0), 6.0)
    at = (target + row * out_width * C)[:, None] + channel[None, :]
    inside = (tl.zeros_like(channel) + row < out_height)[None, :]
    tl.store(at, value.to(target.dtype.element_ty), mask=mask & inside)


@triton.jit
def stem_kernel(
    x,  # [B, 3, H, W]
    weight,  # [3, 3, 3, C]: input channel, row, column, output channel
    bias,  # [C]
    out,  # [B, H / 2, W / 2, C]
    pixels,  # B * H / 2 * W / 2
    height,
    width,
    out_height,
    out_width,
    mean,
    scale,
    C: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program makes BLOCK pixels of all channels."""
    pixel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, C)
    x_out = pixel % out_width
    y_out = pixel // out_width % out_height
    image = pixel // (out_width * out_height)
    acc = tl.zeros((BLOCK, C), dtype=tl.float32)
    for plane in range(3):
        for ky in tl.static_range(3):
            for kx in tl.static_range(3):
                y_in = y_out * 2 + (ky - PAD)
                x_in = x_out * 2 + (kx - PAD)
                inside = (y_in >= 0) & (y_in < height) & (x_in >= 0) & (x_in < width)
                inside = inside & (pixel < pixels)
                at = x + ((image * 3 + plane) * height + y_in) * width + x_in
                value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                # The zeros around the image are zeros after normalising.
                value = tl.where(inside, (value - mean) * scale, 0.0)
                w = tl.load(weight + (plane * 9 + ky * 3 + kx) * C + channel).to(tl.float32)
                acc += value[:, None] * w[None, :]
    acc += tl.load(bias + channel).to(tl.float32)[None, :]
    at = out + pixel[:, None] * C + channel[None, :]
    tl.store(
        at, acc.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None] & (channel < C)[None, :]
    )
