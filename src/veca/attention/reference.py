"""The definition of core attention: dense softmax under a mask, in float32 or float64.

Slow and obvious on purpose. Every other backend is tested against this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veca.rope import Rotation, rotate


def visibility(tokens: int, num_cores: int, device: torch.device | None = None) -> Tensor:
    """Which token (row) sees which (column): [T, T] booleans.

    Cores see everything; patches see the cores only.
    """
    index = torch.arange(tokens, device=device)
    return (index[:, None] < num_cores) | (index[None, :] < num_cores)


def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_cores: int,
    core_rotation: Rotation | None,
    patch_rotation: Rotation | None,
    scale: float,
    multiplicity: Tensor | None = None,
) -> Tensor:
    """`multiplicity` is [B or 1, N]: how many patches each patch token stands for.

    `q` may have the rows of the first cores alone.
    """
    dtype = q.dtype
    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    rows = q.shape[2]
    if rows < k.shape[2]:
        q = rotate_tokens(q, rows, first_rows(core_rotation, q), None)
    else:
        q = rotate_tokens(q, num_cores, core_rotation, patch_rotation)
    k = rotate_tokens(k, num_cores, core_rotation, patch_rotation)
    scores = q @ k.transpose(-2, -1) * scale
    seen = visibility(k.shape[2], num_cores, q.device)[:rows]
    scores = scores.masked_fill(~seen, float("-inf"))
    if multiplicity is None:
        return (scores.softmax(dim=-1) @ v).to(dtype)
    # m equal tokens weigh m * exp(score) = exp(score + log m); log 0 is -inf: not there.
    scores = scores + core_bias(multiplicity, num_cores).to(scores.dtype)
    out = (scores.softmax(dim=-1) @ v).to(dtype)
    if rows < k.shape[2]:
        return out
    return torch.cat([out[:, :, :num_cores], present(out[:, :, num_cores:], multiplicity)], dim=2)


def core_bias(multiplicity: Tensor, num_cores: int) -> Tensor:
    """What multiplicity adds to the scores of each token, 0 for the cores: [B or 1, 1, 1, T].

    To the scores of all rows: patch rows see cores only, to which it adds nothing.
    """
    return torch.nn.functional.pad(multiplicity.log(), (num_cores, 0))[:, None, None]


def present(patches: Tensor, multiplicity: Tensor) -> Tensor:
    """`patches` [B, H, N, d] with zeros for tokens that are padding, so that no gradient of theirs
    reaches a core."""
    return torch.where((multiplicity == 0)[:, None, :, None], 0.0, patches)


def first_rows(rotation: Rotation | None, q: Tensor) -> Rotation | None:
    """The cores' tables for a `q` [B, H, R, d] that has the rows of the first R of them alone."""
    return rotation and Rotation(*(table[:, : q.shape[2]] for table in rotation))


def rotate_tokens(
    x: Tensor, num_cores: int, core_rotation: Rotation | None, patch_rotation: Rotation | None
) -> Tensor:
    """Rotate cores and patches of `x` [B, H, T, d], each by its own tables."""
    cores, patches = x[:, :, :num_cores], x[:, :, num_cores:]
    if core_rotation is not None:
        cores = rotate(cores, core_rotation)
    if patch_rotation is not None:
        patches = rotate(patches, patch_rotation)
    if core_rotation is None and patch_rotation is None:
        return x
    return torch.cat([cores, patches], dim=2)
