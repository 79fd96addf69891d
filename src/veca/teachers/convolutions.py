"""The convolutions of a mobile CNN that are no matrix products, fast on a GPU: the first one, which
also normalises the pixels, and the depthwise ones, with ReLU6 before and after.

cuDNN runs both in half precision far below what the memory gives, and every normalisation and
ReLU6 on its own is one more pass over the largest maps of the network. No gradients: for teachers.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

_INSTALLED = importlib.util.find_spec("triton") is not None
BLOCK, CHANNELS, ROWS, WARPS = 32, 32, 4, 4
STEM_BLOCK, STEM_WARPS = 128, 4


def supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run: half precision on an NVIDIA GPU, with Triton installed."""
    half = dtype in (torch.bfloat16, torch.float16)
    return _INSTALLED and device.type == "cuda" and torch.version.hip is None and half


def depthwise(x: Tensor, weight: Tensor, bias: Tensor, stride: int, pad: int) -> Tensor:
    """relu6(conv(relu6(x)) + bias), channel by channel.

    Args:
        x: [B, H, W, C], contiguous.
        weight: [K, K, C], K 3 or 5.
        bias: [C].
        stride: 1 keeps the size; 2 halves it, rounding up.
        pad: zeros above and to the left; what is missing below and to the right is zero too.

    Returns:
        [B, H / stride, W / stride, C].
    """
    batch, height, width, channels = x.shape
    kernel = weight.shape[0]
    out_height, out_width = _halved(height, stride), _halved(width, stride)
    out = x.new_empty(batch, out_height, out_width, channels)
    columns = batch * out_width
    rows = ROWS if stride == 1 else ROWS // 2
    grid = (-(-columns // BLOCK) * -(-channels // CHANNELS) * -(-out_height // rows),)
    _kernels().depthwise_kernel[grid](
        x,
        weight,
        bias,
        out,
        columns,
        height,
        width,
        out_height,
        out_width,
        C=channels,
        KERNEL=kernel,
        STRIDE=stride,
        PAD=pad,
        BLOCK=BLOCK,
        CHANNELS=CHANNELS,
        ROWS=rows,
        num_warps=WARPS,
    )
    return out


def stem(pixels: Tensor, weight: Tensor, bias: Tensor, pad: int, mean: float, std: float) -> Tensor:
    """conv((pixels - mean) / std) + bias with a 3 x 3 kernel and stride 2.

    Args:
        pixels: [B, 3, H, W], float32, contiguous.
        weight: [C, 3, 3, 3], C a power of two.
        bias: [C].
        pad: zeros above and to the left, 0 or 1.

    Returns:
        [B, H / 2, W / 2, C] in the weight's dtype, rounding sizes up.
    """
    batch, _, height, width = pixels.shape
    channels = len(bias)
    out_height, out_width = _halved(height, 2), _halved(width, 2)
    out = weight.new_empty(batch, out_height, out_width, channels)
    count = batch * out_height * out_width
    _kernels().stem_kernel[(-(-count // STEM_BLOCK),)](
        pixels,
        weight.permute(1, 2, 3, 0).contiguous(),
        bias,
        out,
        count,
        height,
        width,
        out_height,
        out_width,
        mean,
        1 / std,
        C=channels,
        PAD=pad,
        BLOCK=STEM_BLOCK,
        num_warps=STEM_WARPS,
    )
    return out


def _kernels() -> Any:
    return importlib.import_module("veca.teachers.convolution_kernels")


def _halved(size: int, stride: int) -> int:
    return -(-size // stride)
