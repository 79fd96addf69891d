"""What a forward pass costs at a size, a budget and a share of tokens that go on after merging,
beside a dense ViT of the same width and depth.

Counted from the architecture, not measured; `veca bench` measures. A multiply-add is two FLOPs;
matrix products, convolution and attention are counted, elementwise work is not. The dense model
carries five extra tokens (CLS and four registers), as in the published comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from veca.config import DEFAULT_SIZE, EXTRA_TOKENS, VecaConfig, preset
from veca.errors import InputError, whole


@dataclass(frozen=True)
class NetworkCost:
    """One network, one image.

    Where windows merge, layers differ: what belongs to one layer is then the mean of all, rounded.
    """

    tokens: int
    """In one layer."""
    interactions: int
    """Query-key pairs in one layer's attention between image tokens and cores."""
    attention_flops: int
    """One attention block: the q, k, v and output projections and the attention itself."""
    flops: int
    """The whole network."""
    parameters: int
    inference_bytes: int
    """Peak of live activations without gradients, fused attention, nothing compiled."""
    training_bytes: int
    """Activations kept for the backward pass, fused attention, nothing compiled."""
    score_bytes: int
    """What one layer's attention weights would take if they were ever stored; they are not."""


@dataclass(frozen=True)
class Cost:
    """VECA and a dense ViT at the same image size."""

    config: VecaConfig
    size: tuple[int, int]
    """(height, width) in pixels."""
    grid: tuple[int, int]
    cores: int
    keep: float
    """The share of patch tokens that go on after merging."""
    patch_tokens: tuple[int, ...]
    """Those of each layer."""
    veca: NetworkCost
    dense: NetworkCost

    @property
    def interaction_ratio(self) -> float:
        """Interactions of VECA over N^2."""
        return self.veca.interactions / self.dense.interactions

    @property
    def attention_ratio(self) -> float:
        """FLOPs of one attention block, VECA over dense."""
        return self.veca.attention_flops / self.dense.attention_flops

    @property
    def flops_ratio(self) -> float:
        """FLOPs of the whole network, VECA over dense."""
        return self.veca.flops / self.dense.flops


def cost(
    model: str | VecaConfig,
    size: int | tuple[int, int] = DEFAULT_SIZE,
    cores: int | None = None,
    *,
    keep: float | str | None = None,
    bytes_per_number: int = 4,
) -> Cost:
    """The cost of one image of `size` pixels (a side, or height and width) at a budget.

    `model` is a preset's name or a configuration; `keep` the share of patch tokens that go on after
    merging, by default all; `bytes_per_number` is 4 for float32, 2 for bfloat16 and float16.

    >>> cost("veca_base_patch16", size=1024, cores=64).attention_ratio
    0.299...
    """
    # These need torch, which counting does not.
    from veca.checks import check_budget, check_keep
    from veca.merging import compared_patches, tokens_by_block

    config = model if isinstance(model, VecaConfig) else preset(model)
    budget = check_budget(cores, config.num_cores)
    height, width = _check_size(size, config.patch_size)
    grid = (height // config.patch_size, width // config.patch_size)
    patches = grid[0] * grid[1]
    share = check_keep(keep)
    layers = tokens_by_block(config.depth, config.merge_blocks, share, grid)
    compared = compared_patches(config.merge_blocks, share, grid)
    return Cost(
        config,
        (height, width),
        grid,
        budget,
        share,
        layers,
        veca=_veca(config, patches, layers, compared, budget, bytes_per_number),
        dense=_dense(config, patches, bytes_per_number),
    )


def interactions(patches: int, cores: int) -> int:
    """Pairs in one layer: cores see all N + C tokens, patches see C cores. 2NC + C^2."""
    return cores * (patches + cores) + patches * cores


def _veca(
    c: VecaConfig, patches: int, layers: Sequence[int], compared: int, cores: int, number: int
) -> NetworkCost:
    tokens = [left + cores for left in layers]
    pairs = [interactions(left, cores) for left in layers]
    attention = [_attention_flops(c, t, p) for t, p in zip(tokens, pairs, strict=True)]
    moves = (c.depth - 1) * 2 * cores * c.width * 2
    merging = 2 * compared * c.width  # each patch with the mean of its window
    bank = c.num_cores * (c.width + 2)
    move_heads = (c.depth - 1) * (2 * c.width + 2 + 1)
    return NetworkCost(
        tokens=_mean(tokens),
        interactions=_mean(pairs),
        attention_flops=_mean(attention),
        flops=_network_flops(c, patches, tokens, attention) + moves + merging,
        parameters=_shared_parameters(c) + bank + move_heads,
        inference_bytes=_inference_bytes(c, max(tokens), number),
        training_bytes=_training_bytes(c, tokens, number)
        + _kept_for_merging(c, patches, compared, number),
        score_bytes=c.heads * max(pairs) * number,
    )


def _dense(c: VecaConfig, patches: int, number: int) -> NetworkCost:
    tokens = patches + EXTRA_TOKENS
    attention = _attention_flops(c, tokens, tokens**2)
    return NetworkCost(
        tokens=tokens,
        interactions=patches**2,
        attention_flops=attention,
        flops=_network_flops(c, patches, [tokens] * c.depth, [attention] * c.depth),
        parameters=_shared_parameters(c) + EXTRA_TOKENS * c.width,
        inference_bytes=_inference_bytes(c, tokens, number),
        training_bytes=_training_bytes(c, [tokens] * c.depth, number),
        score_bytes=c.heads * tokens**2 * number,
    )


def _attention_flops(c: VecaConfig, tokens: int, pairs: int) -> int:
    projections = 4 * 2 * tokens * c.width**2
    scores_and_mixing = 2 * 2 * pairs * c.width
    return projections + scores_and_mixing


def _network_flops(
    c: VecaConfig, patches: int, tokens: Sequence[int], attention: Sequence[int]
) -> int:
    """`tokens` and `attention` layer by layer; what is left in the last of them is projected."""
    embed = 2 * patches * c.in_channels * c.patch_size**2 * c.width
    ffn = 2 * sum(tokens) * c.width * 3 * c.hidden_width
    project = 0 if c.feature_width == c.width else 2 * tokens[-1] * c.width * c.feature_width
    return embed + sum(attention) + ffn + project


def _shared_parameters(c: VecaConfig) -> int:
    """All but what stands for the image as a whole: the bank here, CLS and registers there."""
    embed = c.width * (c.in_channels * c.patch_size**2 + 1)
    attention = 4 * c.width * (c.width + 1)
    ffn = 2 * c.hidden_width * (c.width + 1) + c.width * (c.hidden_width + 1)
    norms = 2 * 2 * c.width
    project = 0 if c.feature_width == c.width else c.feature_width * (c.width + 1)
    return embed + c.depth * (attention + ffn + norms) + 2 * c.width + project


def _inference_bytes(c: VecaConfig, tokens: int, number: int) -> int:
    # The widest moment is inside the feed-forward: the residual stream and its normed copy, the
    # pair (u, v), silu(u) and the product.
    return tokens * (2 * c.width + 4 * c.hidden_width) * number


def _training_bytes(c: VecaConfig, tokens: Sequence[int], number: int) -> int:
    # Kept for each block: two norm inputs and outputs (4 D), q, k and v as attention saw them
    # (3 D), what it gave (D) and that joined for the output projection (D); then (u, v), silu(u)
    # and the product (4 hidden).
    return sum(tokens) * (9 * c.width + 4 * c.hidden_width) * number


def _kept_for_merging(c: VecaConfig, patches: int, compared: int, number: int) -> int:
    # The members of the windows, and in the end what is smoothed.
    smoothed = patches * c.feature_width if compared else 0
    return (compared * c.width + smoothed) * number


def _mean(layers: Sequence[int]) -> int:
    return round(sum(layers) / len(layers))


def _check_size(size: int | tuple[int, int], patch: int) -> tuple[int, int]:
    given = tuple(size) if isinstance(size, Sequence) else (size, size)
    sides = [side for side in map(whole, given) if side is not None]
    if len(given) != 2 or len(sides) != 2 or any(side < patch or side % patch for side in sides):
        off = next((side for side in sides if side % patch), None)
        near = (
            [] if off is None or off < patch else [off // patch * patch, -(-off // patch) * patch]
        )
        raise InputError(
            f"size must be one side or (height, width) in pixels, multiples of the patch size "
            f"{patch}; got {size!r}{f'; the nearest are {near[0]} and {near[1]}' if near else ''}."
        )
    return sides[0], sides[1]
