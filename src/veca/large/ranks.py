"""One picture over several processes of torch.distributed.

Each has some of the patches, and all have the cores. What they exchange in a layer is what the
cores took from each: O(C D) numbers, however large the picture.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from veca import rope
from veca.attention import PartialAttention
from veca.checks import check_budget, check_finite, check_images, check_model
from veca.errors import InputError, LargeError, whole
from veca.large import layers
from veca.model import Veca
from veca.outputs import VecaOutput


class Ranks:
    """The processes that share a picture: those of a group, or this one alone.

    Attributes:
        rank, size: which of how many this is.
        exchanged: bytes that this process has given to exchanges of the cores' sums.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.exchanged = 0

    def join(self, part: PartialAttention) -> PartialAttention:
        """Over the tokens of all ranks. Differentiable: gradients of all ranks' losses add up."""
        if self.size == 1:
            return part
        peak = part.peak.detach().clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, self.group)
        mine = (part.peak - peak).exp().unsqueeze(-1)
        sums = torch.cat([part.total.unsqueeze(-1), part.values], dim=-1) * mine
        self.exchanged += peak.nbytes + sums.nbytes
        sums = _Sum.apply(sums, self.group)
        return PartialAttention(peak, sums[..., 0], sums[..., 1:])

    def most(self, number: int, device: torch.device) -> int:
        """The largest of the ranks' numbers."""
        return self._reduce(number, device, dist.ReduceOp.MAX)

    def total(self, number: int, device: torch.device) -> int:
        """The sum of the ranks' numbers."""
        return self._reduce(number, device, dist.ReduceOp.SUM)

    def _reduce(self, number: int, device: torch.device, how: Any) -> int:
        if self.size == 1:
            return number
        tensor = torch.tensor(number, device=device)
        dist.all_reduce(tensor, how, self.group)
        return int(tensor)

    def from_rank(self, rank: int, tensor: Tensor) -> Tensor:
        """The tensor of one rank, on all; of the shape and dtype of this one's."""
        if self.size > 1:
            assert self.group is not None
            tensor = tensor.detach().contiguous()
            dist.broadcast(tensor, dist.get_global_rank(self.group, rank), self.group)
        return tensor

    @contextlib.contextmanager
    def together(self, device: torch.device) -> Iterator[None]:
        """Work that each rank does for itself; where it fails on one, none goes on."""
        try:
            yield
        except BaseException:
            self.most(1, device)
            raise
        if self.most(0, device):
            raise LargeError("another process could not begin; its own message says why.")

    def wait(self, device: torch.device) -> None:
        """Until all are here."""
        self.total(0, device)


@contextlib.contextmanager
def processes(device: str = "auto") -> Iterator[tuple[dist.ProcessGroup | None, str, bool]]:
    """The processes of torchrun, if there are several: their group, this one's device, and whether
    it is the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield None, device, True
        return
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield dist.group.WORLD, "cpu" if device == "auto" else device, dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


class _Sum(torch.autograd.Function):
    """The sum over the ranks, on each of them; so the gradient is the sum over the ranks, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = tensor.contiguous().clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        whole = grad.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class SplitVeca(nn.Module):
    """A model whose forward takes a region of a picture and knows the whole of it.

    Every process of the group calls it with its own region; together they cover the picture, each
    patch once. Each gets its region's patches and the picture's cores, and gradients flow between
    the processes. The gradients of a process are its share of those of the sum of all processes'
    losses: add them up, or wrap this in `DistributedDataParallel`, which takes their mean. A loss
    of the cores, which all have, counts as often as there are processes that add it.

    >>> split = DistributedDataParallel(SplitVeca(model, torch.distributed.group.WORLD))
    >>> out = split(pixels, at=(0, 2048), size=(4096, 4096))
    """

    def __init__(self, model: Veca, group: dist.ProcessGroup | None = None) -> None:
        """
        Args:
            group: the processes; None: this one alone.
        """
        super().__init__()
        check_model(model, "SplitVeca")
        self.model = model
        self.ranks = Ranks(group)

    def forward(
        self,
        images: Tensor,
        at: tuple[int, int],
        size: tuple[int, int],
        cores: int | None = None,
    ) -> VecaOutput:
        """What `Veca.forward` gives for the whole picture, of this process's region of it.

        Args:
            images: the region's pixels [B, 3, h, w], normalised.
            at: its first pixel (row, column) in the picture.
            size: the picture's (height, width) in pixels.
            cores: the budget, 1..M, by default all M.
        """
        model, c = self.model, self.model.config
        budget = check_budget(cores, c.num_cores)
        shape = check_images(images, c.in_channels, c.patch_size)
        if model.training and c.dropout:
            raise InputError(
                "SplitVeca trains without dropout, which would part the processes' cores; set "
                "dropout=0 in the model's configuration."
            )
        if not model.training:
            check_finite(images)
        grid = self._covered(at, size, shape)
        corner = (at[0] // c.patch_size, at[1] // c.patch_size)
        xy = rope.region_coordinates(grid, corner, shape, images.device)
        if model.training:
            xy = self._augmented(xy)
        rotation = rope.rotation(xy.unsqueeze(0), layers.periods_of(model))
        x = model.patch_embed(images.to(model.dtype)).flatten(2).transpose(1, 2)
        tokens, raw = layers.bank_of(model, budget, len(images))
        step: layers.Step = layers.through
        if model.gradient_checkpointing and model.training and torch.is_grad_enabled():
            step = partial(checkpoint, layers.through, use_reentrant=False)
        x, tokens, raw = layers.forward(
            model, x, rotation, tokens, raw, step=step, join=self.ranks.join
        )
        found, patches = (model.project(model.norm(part)) for part in (tokens, x))
        return VecaOutput(found, patches, raw.tanh().expand(len(x), -1, -1), shape)

    def _covered(
        self, at: tuple[int, int], size: tuple[int, int], shape: tuple[int, int]
    ) -> tuple[int, int]:
        """The picture's grid, if the regions of all processes make it up. All agree on a fault."""
        patch = self.model.config.patch_size
        numbers = [whole(side) for side in (*at, *size)]
        fits = len(numbers) == 4 and all(
            n is not None and n >= 0 and n % patch == 0 for n in numbers
        )
        grid = (size[0] // patch, size[1] // patch) if fits else (0, 0)
        inside = fits and all(a // patch + s <= g for a, s, g in zip(at, shape, grid, strict=True))
        device = self.model.device
        bad = bool(self.ranks.most(0 if inside else 1, device))
        corner = (at[0] // patch, at[1] // patch) if inside else (0, 0)
        if bad or self.ranks.total(_weight(grid, corner, shape), device) != _weight(
            grid, (0, 0), grid
        ):
            raise LargeError(
                f"the regions of all processes must make up the picture of {size[0]} x {size[1]} "
                f"pixels, each on the grid of {patch} pixels; this one has {shape[0] * patch} x "
                f"{shape[1] * patch} at {tuple(at)}."
            )
        return grid

    def _augmented(self, xy: Tensor) -> Tensor:
        """Moved and stretched at random, by one draw for all processes."""
        c = self.model.config
        seed = torch.randint(2**62, (), device=xy.device)
        seed = self.ranks.from_rank(0, seed)
        with torch.random.fork_rng([xy.device] if xy.is_cuda else []):
            torch.manual_seed(int(seed))
            return rope.augment_coordinates(xy, c.rope_shift, c.rope_jitter, c.rope_rescale)


def _weight(grid: tuple[int, int], at: tuple[int, int], shape: tuple[int, int]) -> int:
    """The sum of random numbers that the patches of a grid have, over a region.

    Regions with the sum of the whole grid cover each patch once, but for chance.
    """
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randint(4096, (side,), generator=generator) for side in grid)
    (row, column), (height, width) = at, shape
    return int(rows[row : row + height].sum() * columns[column : column + width].sum())
