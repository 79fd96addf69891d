"""An elastic periphery: homogeneous windows of patches go on as one token each.

Patches never attend to each other, so running fewer of them disturbs the others only through the
cores. Before some blocks the windows whose patches differ least become one token: the mean of the
patches, at the mean of their places, which cores see as often as it has patches. At the end every
patch takes what came out for its token, so that features always cover the whole grid.

Shapes: B images, N patches, T tokens that stand for them, W windows, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST_KEEP = 0.2
"""The smallest share of patch tokens that may go on."""


class Periphery(NamedTuple):
    """Which token stands for which patches."""

    xy: Tensor
    """[B or 1, T, 2] where the tokens are, (x, y) in [-1, 1]."""
    multiplicity: Tensor | None = None
    """[B, T] how many patches a token stands for, 0 for padding; None: each for one."""
    token_of: Tensor | None = None
    """[B, N] the token of each patch; None: its own."""

    def spread(self, tokens: Tensor) -> Tensor:
        """What each patch takes from its token: [B, T, D] -> [B, N, D]."""
        return tokens if self.token_of is None else take(tokens, self.token_of)


def merge_plan(
    blocks: tuple[int, ...], keep: float, grid: tuple[int, int]
) -> dict[int, tuple[int, int]]:
    """What merges where: {block: (side of the windows, tokens left)}, `keep` left after the last.

    The shares fall geometrically from step to step. Windows are of 2 x 2 patches, and of 4 x 4
    where those cannot merge enough: below a quarter. Windows that the grid cuts off are not
    merged, so that a small grid may keep more than is asked for.

    Args:
        blocks: `VecaConfig.merge_blocks`.
    """
    if keep == 1:
        return {}
    height, width = grid
    patches = height * width
    plan = {}
    for number, block in enumerate(blocks, start=1):
        share = keep ** (number / len(blocks))
        side = 2 if share >= 1 / 4 else 4
        whole = (height // side) * (width // side)
        least = patches - whole * (side * side - 1)
        # In whole numbers, because a grid that is left open in an export has no others.
        target = (patches * round(share * 10_000) + 5_000) // 10_000
        plan[block] = (side, torch.sym_max(target, least))
    return plan


def merge(
    tokens: Tensor, periphery: Periphery, grid: tuple[int, int], side: int, target: int
) -> tuple[Tensor, Periphery]:
    """Merge the most homogeneous windows of side x side patches until `target` tokens are left.

    A window whose patches have partly been merged before goes on as one token, too. Where the
    last window brings an image below the target, padding of multiplicity 0 fills it up, so that
    all images of a batch have as many tokens.

    Args:
        tokens: [B, T, D], the patches' part of the residual stream.
        target: one that the windows can reach; `merge_plan` sees to that.
    """
    batch, count, _ = tokens.shape
    device = tokens.device
    token_of = periphery.token_of
    if token_of is None:
        token_of = torch.arange(count, device=device).expand(batch, -1)
    multiplicity = periphery.multiplicity
    if multiplicity is None:
        multiplicity = torch.ones(batch, count, device=device)

    members = _windows(periphery.spread(tokens), grid, side)
    mean = members.mean(dim=2)  # [B, W, D]; of patches, so tokens count by their multiplicity
    score = _difference(members.detach(), mean.detach())
    # A token lies in one window whole, so that the shares of its patches add up to one.
    shares = multiplicity.reciprocal().gather(1, token_of).unsqueeze(-1)
    saved = _windows(shares, grid, side).sum(dim=(2, 3)).round() - 1  # [B, W] tokens, less one
    score = score.masked_fill(saved < 1, torch.inf)

    need = (multiplicity > 0).sum(dim=1, keepdim=True) - target
    order = score.argsort(dim=1, stable=True)
    before = saved.gather(1, order).cumsum(dim=1) - saved.gather(1, order)
    first = (before < need) & score.gather(1, order).isfinite()
    chosen = torch.zeros_like(first).scatter(1, order, first)  # [B, W]

    window_of = _window_of_patches(grid, side, device)  # [N], W for those in none
    chosen_patch = F.pad(chosen, (0, 1))[:, window_of]
    gone = torch.zeros(batch, count, dtype=torch.bool, device=device)
    gone = gone.scatter(1, token_of, chosen_patch)
    alive = torch.cat([(multiplicity > 0) & ~gone, chosen], dim=1)  # [B, T + W]
    places = torch.arange(alive.shape[1], device=device)
    order = torch.where(alive, places, places + alive.shape[1]).argsort(dim=1)
    position = torch.zeros_like(order).scatter(1, order, places.expand_as(order))
    order = order[:, :target]

    everything = torch.cat([tokens, mean.to(tokens.dtype)], dim=1)
    xy = periphery.xy.expand(batch, -1, -1)
    centres = _windows(take(xy, token_of), grid, side).mean(dim=2)
    counts = torch.cat([multiplicity, multiplicity.new_full(chosen.shape, side * side)], dim=1)
    source = torch.where(chosen_patch, count + window_of, token_of)
    return take(everything, order), Periphery(
        xy=take(torch.cat([xy, centres], dim=1), order),
        multiplicity=(counts * alive).gather(1, order),
        token_of=position.gather(1, source),
    )


def take(tokens: Tensor, index: Tensor) -> Tensor:
    """Rows of each image: [B, T, D] at [B, N] -> [B, N, D]."""
    batch, count, width = tokens.shape
    start = torch.arange(batch, device=index.device).unsqueeze(1) * count
    rows = tokens.reshape(batch * count, width).index_select(0, (index + start).flatten())
    return rows.view(*index.shape, width)


def _windows(patches: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """[B, N, D] -> [B, W, side * side, D]; rows and columns that fill no window are left out."""
    height, width = grid
    down, across = height // side, width // side
    x = patches.unflatten(1, grid)[:, : down * side, : across * side]
    x = x.unflatten(2, (across, side)).unflatten(1, (down, side)).transpose(2, 3)
    return x.flatten(3, 4).flatten(1, 2)


def _window_of_patches(grid: tuple[int, int], side: int, device: torch.device) -> Tensor:
    height, width = grid
    down, across = height // side, width // side
    row = torch.arange(height, device=device) // side
    column = torch.arange(width, device=device) // side
    window = row.unsqueeze(1) * across + column
    inside = (row < down).unsqueeze(1) & (column < across)
    return window.masked_fill(~inside, down * across).flatten()


def _difference(members: Tensor, mean: Tensor) -> Tensor:
    """How much is lost when windows [B, W, S, D] become their mean [B, W, D]: [B, W].

    The angles between patches and mean count, and more so the longer the mean: between the angles
    alone and the squared distances, and better than either.
    """
    members, mean = members.float(), mean.float()
    angles = 1 - F.cosine_similarity(members, mean.unsqueeze(2), dim=-1)
    return angles.sum(dim=2) * mean.norm(dim=-1)
