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

from veca._util.tracing import has_values

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
    owners: Tensor | None = None
    """[B, N] the token of each patch, where `patches` does not tell."""
    patches: Tensor | None = None
    """[B, N] the patches in the order of their tokens, of which each stands for one of them or for
    a window of 2 x 2: first those of windows that have not merged, then those of windows that have,
    last those of no window."""

    @property
    def token_of(self) -> Tensor | None:
        """[B, N] the token of each patch; None: its own."""
        if self.patches is None or self.multiplicity is None:
            return self.owners
        shares = self.multiplicity[:1].squeeze(0).long()
        tokens = torch.arange(len(shares), device=shares.device)
        tokens = tokens.repeat_interleave(shares, output_size=self.patches.shape[1])
        return torch.zeros_like(self.patches).scatter(
            1, self.patches, tokens.expand_as(self.patches)
        )

    def spread(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """What each patch takes from its token: [B, T, D] -> [B, N, D].

        Features change gently from patch to patch, but those of one token are all the same. They
        are enlarged bilinearly instead, as if each window of 2 x 2 were one large patch.
        """
        token_of = self.token_of
        if token_of is None or self.multiplicity is None:
            return tokens
        shared = (self.multiplicity > 1).gather(1, token_of)
        near = tokens.device.type == "cpu" and not torch.is_grad_enabled()
        if near and has_values(tokens):
            return _bilinear(tokens, token_of, shared, grid)
        patches = take(tokens, token_of)
        smooth = patches.unflatten(1, grid)
        for dim, count in enumerate(grid, start=1):
            outwards = _outwards(count, tokens.device)
            smooth = smooth.lerp(smooth.index_select(dim, outwards), 0.25)
        # Half the time of `where`.
        return patches.lerp(smooth.flatten(1, 2), shared.unsqueeze(-1).to(patches.dtype))


def _bilinear(tokens: Tensor, token_of: Tensor, shared: Tensor, grid: tuple[int, int]) -> Tensor:
    """`Periphery.spread` in one pass over memory, without gradients: a fourth of the time.

    Each patch is the weighted sum of four tokens: its own, and those of the patches that are next
    outside its window of two, down, across and in both.

    Args:
        shared: [B, N] whether the patch shares its token.
    """
    (height, width), device = grid, tokens.device
    places = torch.arange(height * width, device=device).view(grid)
    down = places.index_select(0, _outwards(height, device))
    across = _outwards(width, device)
    around = [places, down, places.index_select(1, across), down.index_select(1, across)]
    four = torch.stack([x.flatten() for x in around], dim=1)  # [N, 4]
    weights = torch.tensor([9 / 16, 3 / 16, 3 / 16, 1 / 16], dtype=tokens.dtype, device=device)
    alone = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=tokens.dtype, device=device)
    of_four = token_of[:, four]
    # One that is alone looks at itself only: zero times infinity would be no number.
    of_four = torch.where(shared.unsqueeze(2), of_four, token_of.unsqueeze(2))
    weights = torch.where(shared.unsqueeze(2), weights, alone)
    batch, count, size = tokens.shape
    summed = F.embedding_bag(
        _flat(of_four, count).view(-1, 4),
        tokens.reshape(batch * count, size),
        per_sample_weights=weights.view(-1, 4),
        mode="sum",
    )
    return summed.view(batch, -1, size)


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
        target = torch.sym_min(left, torch.sym_max(target, least))
        if side == 2 and isinstance(target, int):  # each window that merges saves three
            target = left - (left - target + 2) // 3 * 3
        plan[block] = (side, target)
        left = target
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
    patches, whole = grid[0] * grid[1], (grid[0] // 2) * (grid[1] // 2)
    compared, left = 0, patches
    for side, target in merge_plan(blocks, keep, grid).values():
        if side == 2:  # those that have merged are not asked again
            compared += 4 * ((left - (patches - 4 * whole) - whole) // 3)
        else:
            compared += (grid[0] // side) * (grid[1] // side) * side * side
        left = target
    return compared


def merge(
    tokens: Tensor,
    periphery: Periphery,
    grid: tuple[int, int],
    side: int,
    target: int,
    targets: Tensor | None = None,
    cores: int = 0,
) -> tuple[Tensor, Periphery]:
    """Merge the most homogeneous windows of side x side patches until `target` tokens are left.

    A window whose patches have partly been merged before goes on as one token, too. Where the
    last window brings an image below the target, padding of multiplicity 0 fills it up, so that
    all images of a batch have as many tokens.

    Args:
        tokens: [B, cores + T, D], the residual stream.
        target: of patch tokens, one that the windows can reach; `merge_plan` sees to that.
        targets: [B, 1] of each image, where they differ; `target` is the largest of them, and the
            others are filled up with padding.
        cores: so many tokens come before the patches' and go on as they are.
    """
    fixed = isinstance(target, int) and isinstance(tokens.shape[1], int)
    if fixed and side == 2 and targets is None and periphery.owners is None:
        return _merge_whole(tokens, periphery, grid, target, cores)
    batch, count = tokens.shape[0], tokens.shape[1] - cores
    device = tokens.device
    target = _length(target)
    own = torch.arange(count, device=device).expand(batch, -1)
    token_of = periphery.token_of
    if token_of is None:
        token_of = own
    multiplicity = periphery.multiplicity
    if multiplicity is None:
        multiplicity = torch.ones(batch, count, device=device)
    present = multiplicity > 0

    # [B, W, side * side] tokens, each as often as it has patches in the window.
    tokens_of = token_of[:, _windows(grid, side, device)].unflatten(1, (-1, side * side))
    # A token lies in one window whole, so that the shares of its patches add up to one.
    shares = multiplicity.reciprocal().gather(1, tokens_of.flatten(1)).view_as(tokens_of)
    saved = shares.sum(dim=2).round() - 1  # [B, W] tokens, less one
    inside = take(tokens, tokens_of + cores)
    mean, score = _compared(inside)
    need = present.sum(dim=1, keepdim=True) - (target if targets is None else targets)
    chosen = _first_of(score, saved, need).unsqueeze(2)  # [B, W, 1]

    # The first token of a window that merges becomes that of all its patches.
    first = tokens_of[:, :, 0]
    heir = torch.where(chosen, first.unsqueeze(2), tokens_of).flatten(1)
    heir = own.scatter(1, tokens_of.flatten(1), heir)  # [B, T]
    alive = present & (heir == own)
    # Those alive first, in their order; `position` says where each goes. No sort is needed.
    ahead = alive.cumsum(dim=1)
    position = torch.where(alive, ahead - 1, ahead[:, -1:] + own - ahead)
    order = torch.zeros_like(position).scatter(1, position, own)
    order = order[:, torch.arange(target, device=device)]

    xy = periphery.xy.expand(batch, -1, -1)
    places = torch.cat([xy, (multiplicity * alive).unsqueeze(2)], dim=2)
    within = take(places, tokens_of)
    merged = F.pad(within[..., :2].mean(dim=2), (0, 1), value=side * side)
    # All windows are written, those that do not merge with what they have: no shape may depend on
    # how many do.
    rows = position.gather(1, first)
    places = _put(take(places, order), rows, torch.where(chosen, merged, within[:, :, 0]))
    if cores:
        before = torch.arange(cores, device=device).expand(batch, -1)
        order = torch.cat([before, order + cores], dim=1)
    merged = torch.where(chosen, mean, inside[:, :, 0])
    return _put(take(tokens, order), rows + cores, merged), Periphery(
        xy=places[..., :2],
        multiplicity=places[..., 2].contiguous(),
        owners=position.gather(1, heir).gather(1, token_of),
    )


def _merge_whole(
    tokens: Tensor, periphery: Periphery, grid: tuple[int, int], target: int, cores: int
) -> tuple[Tensor, Periphery]:
    """`merge` where windows of 2 x 2 merge once, in all images as many: the same for less.

    Each window that merges saves three tokens. So it is known without a look at the images how
    many will, and those that have merged are not compared again.
    """
    batch, count = tokens.shape[0], tokens.shape[1] - cores
    device = tokens.device
    whole = (grid[0] // 2) * (grid[1] // 2)
    edge = grid[0] * grid[1] - 4 * whole
    left = (count - edge - whole) // 3  # windows that have not merged
    merging = (count - target) // 3
    xy, patches = periphery.xy.expand(batch, -1, -1), periphery.patches
    if patches is None:
        order = _by_window(grid, device)
        patches, xy = order.expand(batch, -1), xy.index_select(1, order)
        before = torch.arange(cores, device=device)
        tokens = tokens.index_select(1, torch.cat([before, order + cores]))

    inside = tokens[:, cores : cores + 4 * left].unflatten(1, (left, 4))
    mean, score = _compared(inside)
    places = xy[:, : 4 * left].unflatten(1, (left, 4))
    order = score.argsort(dim=1, stable=True)
    merged, apart = order[:, :merging], order[:, merging:]
    order = torch.cat([apart, merged], dim=1)

    def joined(before: Tensor, inside: Tensor, mean: Tensor, after: Tensor) -> Tensor:
        alone = take(inside.flatten(2), apart).view(batch, -1, inside.shape[3])
        return torch.cat([before, alone, take(mean, merged), after], dim=1)

    multiplicity = torch.ones(batch, target, device=device)
    multiplicity[:, 4 * (left - merging) : target - edge] = 4
    ahead = take(patches[:, : 4 * left].unflatten(1, (left, 4)), order).flatten(1)
    return joined(tokens[:, :cores], inside, mean, tokens[:, cores + 4 * left :]), Periphery(
        joined(xy[:, :0], places, places.mean(dim=2), xy[:, 4 * left :]),
        multiplicity,
        patches=torch.cat([ahead, patches[:, 4 * left :]], dim=1),
    )


def _by_window(grid: tuple[int, int], device: torch.device) -> Tensor:
    """All patches [N], window of 2 x 2 by window; last those of a row or column that fill none."""
    places = torch.arange(grid[0] * grid[1], device=device).view(grid)
    down, across = (count // 2 * 2 for count in grid)
    below, beside = places[down:].flatten(), places[:down, across:].flatten()
    return torch.cat([_windows(grid, 2, device), below, beside])


def unlikeness(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """How much the patches of a window of 2 x 2 differ, on average over an image: [B].

    1 less the cosine of a patch with its window's mean, which is what windows are ranked by.

    Args:
        tokens: [B, N, D], the patches' part of the residual stream, before any have merged.
    """
    members = _windows(grid, 2, tokens.device)
    if not len(members):
        return tokens.new_zeros(tokens.shape[0], dtype=torch.float32)
    return _compared(tokens[:, members].unflatten(1, (-1, 4)))[1].mean(dim=1) / 4


def _compared(inside: Tensor) -> tuple[Tensor, Tensor]:
    """Of windows [B, W, S, D] of tokens the mean, as long as they are on average, [B, W, D], and
    how much they differ from it, [B, W]."""
    wide = inside.float()
    mean = wide.mean(dim=2)
    lengths = torch.linalg.vector_norm(wide, dim=-1)
    length = torch.linalg.vector_norm(mean, dim=-1).clamp_min(LEAST_LENGTH)
    score = _difference(wide.detach(), mean.detach(), lengths.detach(), length.detach())
    stretched = mean * (lengths.mean(dim=2) / length).unsqueeze(-1)
    return stretched.to(inside.dtype), score


def _first_of(score: Tensor, saved: Tensor, need: Tensor) -> Tensor:
    """Which windows [B, W] merge: those of the least score, until `need` [B, 1] are saved."""
    # Whatever the score: also NaN reaches the target.
    order = score.masked_fill(saved < 1, torch.inf).argsort(dim=1, stable=True)
    saved = saved.gather(1, order)
    before = saved.cumsum(dim=1) - saved
    return torch.zeros_like(saved, dtype=torch.bool).scatter(
        1, order, (before < need) & (saved >= 1)
    )


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
    rows = tokens.reshape(batch * count, width).index_select(0, _flat(index, count))
    return rows.view(*index.shape, width)


def _put(tokens: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """`rows` [B, W, D] at [B, W] in place of those that fresh `tokens` [B, T, D] have there."""
    _, count, width = tokens.shape
    flat = tokens.view(-1, width).index_copy_(0, _flat(index, count), rows.reshape(-1, width))
    return flat.view_as(tokens)


def _flat(index: Tensor, count: int) -> Tensor:
    """An index [B, ...] into `count` rows of each image as one into those of all."""
    start = torch.arange(index.shape[0], device=index.device).view(-1, *[1] * (index.ndim - 1))
    return (index + start * count).flatten()


def _windows(grid: tuple[int, int], side: int, device: torch.device) -> Tensor:
    """The patches of each window, [W * side * side]; of rows and columns that fill none, none."""
    height, width = grid
    down, across = _length(height // side), _length(width // side)
    rows = torch.arange(down * side, device=device).view(down, 1, side, 1)
    columns = torch.arange(across * side, device=device).view(1, across, 1, side)
    return (rows * width + columns).flatten()


def _difference(inside: Tensor, mean: Tensor, lengths: Tensor, length: Tensor) -> Tensor:
    """How much is lost when windows [B, W, S, D] become their mean [B, W, D]: [B, W].

    One less the cosine of each patch with the mean, summed up. Lengths do not count: what a block
    reads of a token has been through a norm.

    Args:
        lengths, length: of the members, [B, W, S], and of the mean, [B, W].
    """
    products = torch.einsum("bwsd,bwd->bws", inside, mean)
    return (1 - products / (lengths * length.unsqueeze(-1)).clamp_min(1e-30)).sum(dim=2)
