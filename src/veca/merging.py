"""An elastic periphery: homogeneous windows of patches go on as one token each.

Patches never attend to each other, so running fewer of them disturbs the others only through the
cores. Before some blocks the windows whose patches differ least become one token: the mean of the
patches, as long as they are and at the mean of their places, which cores see as often as it has
patches. At the end every patch takes what came out for its token, and those that share one are
drawn to what is around them, so that features always cover the whole grid.

Shapes: B images, N patches, T tokens that stand for them, W windows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST_KEEP = 0.2
"""The smallest share of patch tokens that may go on."""
LEAST_OPEN_KEEP = 0.25
"""The smallest where a graph leaves the share open: below it windows are of another size."""
LEAST_LENGTH = 1e-12
"""Of a mean that others are divided by. Not the smallest float32: a GPU may take that for zero."""


class Periphery(NamedTuple):
    """Which token stands for which patches."""

    xy: Tensor
    """[B or 1, T, 2] where the tokens are, (x, y) in [-1, 1]."""
    multiplicity: Tensor | None = None
    """[B, T] how many patches a token stands for, 0 for padding; None: each for one."""
    token_of: Tensor | None = None
    """[B, N] the token of each patch; None: its own."""

    def spread(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """What each patch takes from its token: [B, T, D] -> [B, N, D].

        Features change gently from patch to patch, but those of one token are all the same. They
        are enlarged bilinearly instead, as if each window of 2 x 2 were one large patch.
        """
        if self.token_of is None or self.multiplicity is None:
            return tokens
        shared = self.multiplicity.gather(1, self.token_of) > 1
        patches = take(tokens, self.token_of)
        maps = patches.unflatten(1, grid)
        rows, columns = (_outwards(count, tokens.device) for count in grid)
        smooth = maps.lerp(maps[:, rows], 0.25)
        smooth = smooth.lerp(smooth[:, :, columns], 0.25)
        return torch.where(shared.unsqueeze(-1), smooth.flatten(1, 2), patches)


def _outwards(count: int, device: torch.device) -> Tensor:
    """Of each row (or column) the next one that is not in its window of two: 0, 2, 1, 4, 3, ..."""
    places = torch.arange(count, device=device)
    return (places + places % 2 * 2 - 1).clamp(0, count - 1)


def merge_plan(
    blocks: tuple[int, ...], keep: float | torch.SymInt, grid: tuple[int, int]
) -> dict[int, tuple[int, int]]:
    """What merges where: {block: (side of the windows, tokens left)}, `keep` left after the last.

    The shares fall by equal parts from step to step. Windows are of 2 x 2 patches, and of 4 x 4
    where those cannot merge enough: below a quarter. Windows that the grid cuts off are not
    merged, so that a small grid may keep more than is asked for.

    Args:
        blocks: `VecaConfig.merge_blocks`.
        keep: while a graph is traced for any share, ten-thousandths, from `LEAST_OPEN_KEEP` on.
    """
    if not isinstance(keep, torch.SymInt) and keep == 1:
        return {}
    height, width = grid
    patches = height * width
    plan, left = {}, patches
    for number, block in enumerate(blocks, start=1):
        if isinstance(keep, torch.SymInt):
            side, share = 2, 10_000 - (10_000 - keep) * number // len(blocks)
        else:
            part = 1 - (1 - keep) * number / len(blocks)
            side, share = 2 if part >= 1 / 4 else 4, round(part * 10_000)
        whole = (height // side) * (width // side)
        least = patches - whole * (side * side - 1)
        # In whole numbers, because a grid that is left open in an export has no others.
        target = (patches * share + 5_000) // 10_000
        left = torch.sym_min(left, torch.sym_max(target, least))
        plan[block] = (side, left)
    return plan


def batch_plan(
    blocks: tuple[int, ...], keeps: Sequence[float], grid: tuple[int, int], device: torch.device
) -> dict[int, tuple[int, int, Tensor | None]]:
    """`merge_plan` for a batch: {block: (side, most tokens left, how many each image has left)}.

    The last is None where all keep the same share, [B, 1] where they differ. Then they are at least
    a quarter, so that all merge windows of 2 x 2.
    """
    if len(keeps) == 1:  # also one that a traced graph leaves open, which nothing is asked about
        return {block: (*step, None) for block, step in merge_plan(blocks, keeps[0], grid).items()}
    plans = {keep: merge_plan(blocks, keep, grid) for keep in keeps}
    if len(plans) == 1:
        return batch_plan(blocks, keeps[:1], grid, device)
    found: dict[int, tuple[int, int, Tensor | None]] = {}
    for block in blocks:
        left = [plans[keep].get(block, (2, grid[0] * grid[1]))[1] for keep in keeps]
        found[block] = (2, max(left), torch.tensor(left, device=device).unsqueeze(1))
    return found


def tokens_by_block(
    depth: int, blocks: tuple[int, ...], keep: float, grid: tuple[int, int]
) -> tuple[int, ...]:
    """How many patch tokens each of `depth` blocks sees under `merge_plan`."""
    plan, left, found = merge_plan(blocks, keep, grid), grid[0] * grid[1], []
    for number in range(1, depth + 1):
        left = plan[number][1] if number in plan else left
        found.append(left)
    return tuple(found)


def compared_patches(blocks: tuple[int, ...], keep: float, grid: tuple[int, int]) -> int:
    """How many patches are compared with the mean of their window, in all steps together."""
    sides = [side for side, _ in merge_plan(blocks, keep, grid).values()]
    return sum((grid[0] // side) * (grid[1] // side) * side * side for side in sides)


def merge(
    tokens: Tensor,
    periphery: Periphery,
    grid: tuple[int, int],
    side: int,
    target: int,
    targets: Tensor | None = None,
) -> tuple[Tensor, Periphery]:
    """Merge the most homogeneous windows of side x side patches until `target` tokens are left.

    A window whose patches have partly been merged before goes on as one token, too. Where the
    last window brings an image below the target, padding of multiplicity 0 fills it up, so that
    all images of a batch have as many tokens.

    Args:
        tokens: [B, T, D], the patches' part of the residual stream.
        target: one that the windows can reach; `merge_plan` sees to that.
        targets: [B, 1] of each image, where they differ; `target` is the largest of them, and the
            others are filled up with padding.
    """
    batch, count, _ = tokens.shape
    device = tokens.device
    target = _length(target)
    token_of = periphery.token_of
    if token_of is None:
        token_of = torch.arange(count, device=device).expand(batch, -1)
    multiplicity = periphery.multiplicity
    if multiplicity is None:
        multiplicity = torch.ones(batch, count, device=device)

    members, window_of = _windows(grid, side, device)
    # [B, W, side * side] tokens, each as often as it has patches in the window.
    tokens_of = token_of[:, members].unflatten(1, (-1, side * side))
    mean, length, score = _compared(tokens, tokens_of)
    token = mean * length.unsqueeze(-1)
    # A token lies in one window whole, so that the shares of its patches add up to one.
    shares = multiplicity.reciprocal().gather(1, tokens_of.flatten(1)).view_as(tokens_of)
    saved = shares.sum(dim=2).round() - 1  # [B, W] tokens, less one
    score = score.masked_fill(saved < 1, torch.inf)

    need = (multiplicity > 0).sum(dim=1, keepdim=True) - (target if targets is None else targets)
    order = score.argsort(dim=1, stable=True)
    saved = saved.gather(1, order)
    before = saved.cumsum(dim=1) - saved
    first = (before < need) & (saved >= 1)  # whatever the score: also NaN reaches the target
    chosen = torch.zeros_like(first).scatter(1, order, first)  # [B, W]

    chosen_patch = F.pad(chosen, (0, 1))[:, window_of]  # [B, N], of patches in no window False
    gone = torch.zeros(batch, count, dtype=torch.bool, device=device)
    gone = gone.scatter(1, token_of, chosen_patch)
    alive = torch.cat([(multiplicity > 0) & ~gone, chosen], dim=1)  # [B, T + W]
    # Those alive first, in their order; `position` says where each goes. No sort is needed.
    ahead = alive.cumsum(dim=1)
    places = torch.arange(alive.shape[1], device=device)
    position = torch.where(alive, ahead - 1, ahead[:, -1:] + places - ahead)
    order = torch.zeros_like(position).scatter(1, position, places.expand_as(position))
    order = order[:, torch.arange(target, device=device)]

    xy = periphery.xy.expand(batch, -1, -1)
    centres = take(xy, tokens_of).mean(dim=2)
    counts = torch.cat([multiplicity, multiplicity.new_full(chosen.shape, side * side)], dim=1)
    source = torch.where(chosen_patch, count + window_of, token_of)
    return take(torch.cat([tokens, token.to(tokens.dtype)], dim=1), order), Periphery(
        xy=take(torch.cat([xy, centres], dim=1), order),
        multiplicity=(counts * alive).gather(1, order),
        token_of=position.gather(1, source),
    )


def unlikeness(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """How much the patches of a window of 2 x 2 differ, on average over an image: [B].

    1 less the cosine of a patch with its window's mean, which is what windows are ranked by.

    Args:
        tokens: [B, N, D], the patches' part of the residual stream, before any have merged.
    """
    members, _ = _windows(grid, 2, tokens.device)
    if not len(members):
        return tokens.new_zeros(len(tokens), dtype=torch.float32)
    tokens_of = members.expand(len(tokens), -1).unflatten(1, (-1, 4))
    return _compared(tokens, tokens_of)[2].mean(dim=1) / 4


def _compared(tokens: Tensor, tokens_of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of windows [B, W, S] of tokens: the mean [B, W, D], by what it is made as long as they are on
    average [B, W], and how much they differ from it [B, W]."""
    inside = take(tokens, tokens_of).float()
    mean = inside.mean(dim=2)
    lengths = inside.norm(dim=-1)  # [B, W, S]
    own = mean.norm(dim=-1).clamp_min(LEAST_LENGTH)
    score = _difference(inside.detach(), mean.detach(), lengths.detach(), own.detach())
    return mean, lengths.mean(dim=2) / own, score


def _length(target: int) -> int:
    """While a graph is traced for any size, a number that nothing is known about but its bounds.

    What can be derived of an expression in the sides of the grid, tracing would derive, for
    minutes, and tie the graph to grids for which it holds.
    """
    if not isinstance(target, torch.SymInt):
        return target
    length = torch.sym_int(torch.scalar_tensor(target, dtype=torch.int64).item())
    torch._check(length >= 1)
    return length


def take(tokens: Tensor, index: Tensor) -> Tensor:
    """Rows of each image: [B, T, D] at [B, ...] -> [B, ..., D]."""
    batch, count, width = tokens.shape
    start = torch.arange(batch, device=index.device).view(-1, *[1] * (index.ndim - 1)) * count
    rows = tokens.reshape(batch * count, width).index_select(0, (index + start).flatten())
    return rows.view(*index.shape, width)


def _windows(grid: tuple[int, int], side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The patches of each window, [W * side * side], and the window of each patch, [N].

    Rows and columns that fill no window belong to none: W, one beyond the last.
    """
    height, width = grid
    down, across = _length(height // side), _length(width // side)
    within = torch.arange(side, device=device)
    rows = torch.arange(down, device=device).unsqueeze(1) * side + within  # [down, side]
    columns = torch.arange(across, device=device).unsqueeze(1) * side + within
    members = rows[:, None, :, None] * width + columns[None, :, None, :]
    row = torch.arange(height, device=device) // side
    column = torch.arange(width, device=device) // side
    window = row.unsqueeze(1) * across + column
    whole = (row < down).unsqueeze(1) & (column < across)
    return members.flatten(), window.masked_fill(~whole, down * across).flatten()


def _difference(members: Tensor, mean: Tensor, lengths: Tensor, length: Tensor) -> Tensor:
    """How much is lost when windows [B, W, S, D] become their mean [B, W, D]: [B, W].

    One less the cosine of each patch with the mean, summed up. Lengths do not count: what a block
    reads of a token has been through a norm.

    Args:
        lengths, length: of the members, [B, W, S], and of the mean, [B, W].
    """
    products = torch.einsum("bwsd,bwd->bws", members, mean)
    return (1 - products / (lengths * length.unsqueeze(-1)).clamp_min(1e-30)).sum(dim=2)
