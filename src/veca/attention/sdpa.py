"""Core attention as two fused dense attentions: runs on every device torch runs on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from veca.attention.reference import rotate_tokens
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
    q_cores, q_patches = q[:, :, :num_cores], q[:, :, num_cores:]
    if core_rotation is not None:
        q_cores = rotate(q_cores, core_rotation)
    if patch_rotation is not None:
        q_patches = rotate(q_patches, patch_rotation)
    k = rotate_tokens(k, num_cores, core_rotation, patch_rotation)

    mask = None
    if multiplicity is not None:
        m = torch.nn.functional.pad(multiplicity.float(), (num_cores, 0), value=1.0).log()
        mask = m[:, None, None].to(q.dtype).expand(-1, 1, num_cores, -1)
    cores = scaled_dot_product_attention(q_cores, k, v, attn_mask=mask, scale=scale)
    if q_patches.shape[2] == 0:
        return cores
    patches = scaled_dot_product_attention(
        q_patches, k[:, :, :num_cores], v[:, :, :num_cores], scale=scale
    )
    # Joined as [B, T, H, d], so that the caller's [B, T, H * d] is a view.
    return torch.cat([cores.transpose(1, 2), patches.transpose(1, 2)], dim=1).transpose(1, 2)
