"""Core attention as two fused dense attentions: runs on every device torch runs on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad, scaled_dot_product_attention

from veca._util.tracing import has_values
from veca.attention.reference import core_bias, first_rows, present, rotate_tokens
from veca.rope import Rotation, rotate


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
    """`q` may have the rows of the first cores alone."""
    q_cores, q_patches = q[:, :, :num_cores], q[:, :, num_cores:]
    rows = core_rotation if q.shape[2] == k.shape[2] else first_rows(core_rotation, q)
    if rows is not None:
        q_cores = rotate(q_cores, rows)
    k = rotate_tokens(k, num_cores, core_rotation, patch_rotation)

    # One row for all heads and cores: torch's fused kernels broadcast it, so that nothing of the
    # size of the scores is made.
    bias = None if multiplicity is None else core_bias(multiplicity, num_cores).to(q.dtype)
    if bias is not None and is_compiling():  # else a traced number of cores is compared with 1
        bias = bias.expand(-1, -1, q_cores.shape[2], -1)
    few = q_cores.shape[2]
    if _sums_roughly(q_cores, k):
        q_cores = pad(q_cores, (0, 0, 0, _ENOUGH - few))
    cores = scaled_dot_product_attention(q_cores, k, v, attn_mask=bias, scale=scale)[:, :, :few]
    if q_patches.shape[2] == 0:
        return cores
    if patch_rotation is not None:
        q_patches = rotate(q_patches, patch_rotation)
    patches = patch_rows(q_patches, k[:, :, :num_cores], v[:, :, :num_cores], scale=scale)
    if multiplicity is not None and not _all_present(multiplicity):
        patches = present(patches, multiplicity)
    # Joined as [B, T, H, d], so that the caller's [B, T, H * d] is a view.
    return torch.cat([cores.transpose(1, 2), patches.transpose(1, 2)], dim=1).transpose(1, 2)


def patch_rows(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """What patches take from the cores, which is all that they see: [B, H, n, d].

    Args:
        q: [B, H, n, d] of the patches, turned.
        k, v: [B or 1, H, C, d] of the cores, the keys turned.
    """
    if k.shape[0] != q.shape[0]:
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, scale=scale)


_ENOUGH, _MANY = 8, 2**14


def _sums_roughly(q: Tensor, k: Tensor) -> bool:
    """Whether these are so few rows that the matrix products of CPUs sum many keys one by one.

    In float32 they round ten times as much as with `_ENOUGH` rows.
    """
    near = q.device.type == "cpu" and q.dtype == torch.float32 and has_values(q)
    return near and q.shape[2] < _ENOUGH and k.shape[2] > _MANY


def _all_present(multiplicity: Tensor) -> bool:
    """Whether no token is padding, where that is cheap to know: it saves a pass over memory."""
    near = multiplicity.device.type == "cpu" and has_values(multiplicity)
    return near and bool(multiplicity.all())
