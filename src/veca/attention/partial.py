"""The cores' rows of core attention, a part of the tokens at a time: an online softmax.

A part leaves behind O(C d) numbers, whatever its length. So tokens may come tile by tile, or lie
on several machines, and the result is that of all of them at once, up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PartialAttention(NamedTuple):
    """Rows of attention over the tokens seen so far, in float32 or float64."""

    peak: Tensor
    """[B, H, C] the largest score; -inf before the first token."""
    total: Tensor
    """[B, H, C] the sum of exp(score - peak)."""
    values: Tensor
    """[B, H, C, d] the sum of exp(score - peak) * value."""

    def join(self, other: PartialAttention) -> PartialAttention:
        """Over the tokens of both; one of the two must have seen a token."""
        peak = torch.maximum(self.peak, other.peak)
        mine, its = (self.peak - peak).exp(), (other.peak - peak).exp()
        return PartialAttention(
            peak,
            self.total * mine + other.total * its,
            self.values * mine.unsqueeze(-1) + other.values * its.unsqueeze(-1),
        )

    def result(self) -> Tensor:
        """[B, H, C, d] what attention over all tokens seen gives."""
        return self.values / self.total.unsqueeze(-1)

    def to(self, dtype: torch.dtype) -> PartialAttention:
        return PartialAttention(*(part.to(dtype) for part in self))


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None
) -> PartialAttention:
    """Rows of attention of `q` [B, H, C, d] over some tokens: `k`, `v` [B, H, n, d], n from 0.

    Keys and queries have been turned before. `a.join(b).result()` is the attention over the tokens
    of a and b.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    if k.shape[2] == 0:
        rows = q.new_zeros(q.shape[:-1])
        return PartialAttention(torch.full_like(rows, -torch.inf), rows, torch.zeros_like(q))
    scores = (q * scale) @ k.transpose(-2, -1)
    # No gradient: the peak cancels out of the result.
    peak = scores.detach().amax(dim=-1)
    if torch.is_grad_enabled() and scores.requires_grad:
        weights = (scores - peak.unsqueeze(-1)).exp()
    else:
        weights = scores.sub_(peak.unsqueeze(-1)).exp_()  # in place: the scores are the widest
    return PartialAttention(peak, weights.sum(dim=-1), weights @ v)
