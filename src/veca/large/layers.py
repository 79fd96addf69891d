"""One layer over parts of a picture: the cores begin it, patches go through it, the cores end it.

The same for tiles that come one after the other and for regions that lie on several machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from veca import rope
from veca.attention import PartialAttention, partial_attention, patch_rows
from veca.model import Block, Veca
from veca.precision import FastBlock
from veca.rope import Rotation


class LayerStart(NamedTuple):
    """The cores as a layer finds them, and what they hold ready for the patches in it."""

    tokens: Tensor
    """[B, C, D] the residual stream before the layer."""
    raw: Tensor
    """[B or 1, C, 2] their raw coordinates in the layer."""
    keys: Tensor
    """[B, H, C, d] turned."""
    values: Tensor
    """[B, H, C, d]"""


def block_of(model: Veca, number: int) -> Block:
    """Block 1..L."""
    return cast(Block, model.blocks[number - 1])


def periods_of(model: Veca) -> Tensor:
    c = model.config
    return rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction, model.device)


def bank_of(model: Veca, budget: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """The cores before the first layer: tokens [B, C, D] and raw coordinates [1, C, 2]."""
    tokens, raw = model.bank.prefix(budget)
    raw = raw if raw.dtype == torch.float64 else raw.float()
    return tokens.expand(batch, -1, -1), raw.unsqueeze(0)


def begin(model: Veca, number: int, tokens: Tensor, raw: Tensor) -> LayerStart:
    """The cores before a layer: they move, and hold keys and values ready."""
    if number > 1:
        raw = model.moves[number - 2](raw, tokens)
    block = block_of(model, number)
    rotation = rope.rotation(raw.tanh(), periods_of(model))
    return LayerStart(tokens, raw, *block.attn.keys_and_values(block.norm_attn(tokens), rotation))


def core_queries(model: Veca, number: int, start: LayerStart) -> Tensor:
    """[B, H, C, d] what the cores ask in a layer, turned."""
    block = block_of(model, number)
    rotation = rope.rotation(start.raw.tanh(), periods_of(model))
    return block.attn.queries(block.norm_attn(start.tokens), rotation)


class Beside(NamedTuple):
    """Other cores that patches see in a layer, beside those that belong to them."""

    rotation: Rotation
    """Of the patches, where the other cores see them."""
    keys: Tensor
    values: Tensor


def through(
    block: Block,
    patches: Tensor,
    rotation: Rotation,
    start: LayerStart,
    queries: Tensor,
    beside: Beside | None = None,
) -> tuple[Tensor, PartialAttention]:
    """Some patches [B, n, D] through a layer, and what the cores take from them."""
    if isinstance(block, FastBlock):
        return block.through(patches, rotation, start.keys, start.values, queries, beside)
    normed = block.norm_attn(patches)
    keys, values = block.attn.keys_and_values(normed, rotation)
    part = partial_attention(queries, keys, values)
    own = block.attn.queries(normed, rotation)
    if beside is None:
        mixed = patch_rows(own, start.keys, start.values)
    else:
        others = block.attn.queries(normed, beside.rotation)
        seen = partial_attention(own, start.keys, start.values)
        seen = seen.join(partial_attention(others, beside.keys, beside.values))
        mixed = seen.result().to(patches.dtype)
    return block.feed(patches + block.attn.joined(mixed)), part


def end(block: Block, start: LayerStart, sums: PartialAttention) -> Tensor:
    """The cores after a layer [B, C, D], from what they took of all tokens and of each other."""
    mixed = sums.result().to(start.tokens.dtype)
    return block.feed(start.tokens + block.attn.joined(mixed))


Step = Callable[..., tuple[Tensor, PartialAttention]]


def forward(
    model: Veca,
    patches: Tensor,
    rotation: Rotation,
    tokens: Tensor,
    raw: Tensor,
    *,
    step: Step = through,
    join: Callable[[PartialAttention], PartialAttention] | None = None,
    beside: Sequence[Beside] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Patches and cores through all layers: both, and the cores' raw coordinates.

    Args:
        step: `through`, or it with checkpoints.
        join: what the cores took of these patches -> what they take of all.
        beside: for each layer, other cores that the patches see.
    """
    for number in range(1, model.config.depth + 1):
        block, start = block_of(model, number), begin(model, number, tokens, raw)
        raw = start.raw
        queries = core_queries(model, number, start)
        others = None if beside is None else beside[number - 1]
        patches, part = step(block, patches, rotation, start, queries, others)
        part = part if join is None else join(part)
        tokens = end(block, start, part.join(partial_attention(queries, start.keys, start.values)))
    return patches, tokens, raw
