"""The same function in an order of work that ONNX runtimes do fast.

A graph is run operation by operation, each of them a pass over memory. So nothing is cut apart that
a matrix product can give in two pieces, channels that turn together lie together, and the scale of
the scores is in the weights of the queries. What comes out is equal to rounding.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veca.attention.reference import core_bias, present
from veca.model import Block, CoreAttention, SwiGLU, Veca
from veca.rope import Rotation


def arrange(model: Veca) -> Veca:
    """Change a frozen model, in place, to what is traced for ONNX."""
    for module in model.blocks:
        block = cast(Block, module)
        block.attn = ArrangedAttention(block.attn)  # type: ignore[assignment]
        block.ffn = ArrangedFeedForward(block.ffn)  # type: ignore[assignment]
    return model


def _part(linear: nn.Linear, rows: Tensor | slice, scale: float = 1.0) -> nn.Linear:
    """The rows of a linear layer that give some of its channels."""
    weight, bias = linear.weight[rows] * scale, linear.bias[rows] * scale
    part = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    part.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    part.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
    return part


def _joined(*linears: nn.Linear) -> nn.Linear:
    """Several layers with one input as one, their channels after each other."""
    joined = nn.Linear(linears[0].in_features, 1, device="meta")
    joined.weight = nn.Parameter(torch.cat([a.weight for a in linears]), requires_grad=False)
    joined.bias = nn.Parameter(torch.cat([a.bias for a in linears]), requires_grad=False)
    joined.out_features = joined.weight.shape[0]
    return joined


class ArrangedAttention(nn.Module):
    """`CoreAttention` with the two channels of a pair in two products, queries and keys in one."""

    def __init__(self, attn: CoreAttention) -> None:
        super().__init__()
        self.heads = attn.heads
        width = attn.q.out_features
        scale = (width // attn.heads) ** -0.5
        even, odd = slice(0, None, 2), slice(1, None, 2)  # heads have whole pairs
        self.real = _joined(_part(attn.q, even, scale), _part(attn.k, even))
        self.imaginary = _joined(_part(attn.q, odd, scale), _part(attn.k, odd))
        self.v = attn.v
        self.out = attn.out

    def forward(
        self,
        x: Tensor,
        num_cores: int,
        core_rotation: Rotation,
        patch_rotation: Rotation | None,
        backend: str = "auto",
        multiplicity: Tensor | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """As `CoreAttention.forward`, for all rows; full attention has no patch rotation."""
        tables = [core_rotation] if patch_rotation is None else [core_rotation, patch_rotation]
        real, imaginary = (self._split(part(x), 2) for part in (self.real, self.imaginary))
        cos, sin = (
            torch.cat([table.expand(x.shape[0], -1, -1) for table in pair], dim=1).unsqueeze(1)
            for pair in zip(*tables, strict=True)
        )
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        turned = torch.cat(
            [real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1
        )  # [B, 2 H, T, d]
        q, k = turned[:, : self.heads], turned[:, self.heads :]
        v = self._split(self.v(x), 1)
        bias = None if multiplicity is None else core_bias(multiplicity, num_cores).to(x.dtype)
        if patch_rotation is None:
            return cast(Tensor, self.out(_attend(q, k, v, bias).transpose(1, 2).flatten(2)))
        cores = _attend(q[:, :, :num_cores], k, v, bias)
        patches = _attend(q[:, :, num_cores:], k[:, :, :num_cores], v[:, :, :num_cores])
        if multiplicity is not None:
            patches = present(patches, multiplicity)
        mixed = torch.cat([cores, patches], dim=2)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))

    def _split(self, x: Tensor, times: int) -> Tensor:
        """[B, T, D] -> [B, times * H, T, channels]."""
        return x.unflatten(-1, (times * self.heads, -1)).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    return (scores if bias is None else scores + bias).softmax(dim=-1) @ v


class ArrangedFeedForward(nn.Module):
    """`SwiGLU` with its two halves as two products."""

    def __init__(self, ffn: SwiGLU) -> None:
        super().__init__()
        half = ffn.up.out_features // 2
        self.gate = _part(ffn.up, slice(0, half))
        self.up = _part(ffn.up, slice(half, None))
        self.down = ffn.down

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))
