"""VECA, the method in one file: patches that talk only through an ordered bank of cores.

Read top-down: the core bank, moving cores, attention, feed-forward, block, model.

Shapes: B images, N patches (h x w of them), C active cores (the budget), T = C + N tokens,
D width, L layers. Tokens are kept as [cores ; patches] through the whole network.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from veca import content, rope
from veca.attention import BACKENDS, patch_rows, unchecked_attention
from veca.checks import (
    check_agreement,
    check_blocks,
    check_budget,
    check_finite,
    check_first,
    check_images,
    check_keep,
    check_layers,
    check_memorable,
    check_readable,
    is_auto,
)
from veca.config import AUTO, VecaConfig, preset
from veca.core_memory import CoreMemory, weights_stamp
from veca.errors import InputError, check_choice
from veca.feature_model import FeatureModel
from veca.merging import Periphery, batch_plan, merge, unlikeness
from veca.outputs import CoresOutput, LayerTokens, VecaOutput, as_dino
from veca.rope import Rotation

ATTENTION_KINDS = ("softmax", "norm")
Found = TypeVar("Found")
_ROWS = 16
"""`read` fills patches up to a multiple, so that its products round each as in any region."""
CPU_ROWS = 512
"""Tokens that a CPU takes through the feed-forward at a time when it needs no gradients."""


class CoreBank(nn.Module):
    """M learned cores in order. A budget C is the prefix of the first C."""

    def __init__(self, num_cores: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(num_cores, width))
        self.coordinates = nn.Parameter(torch.empty(num_cores, 2))
        """Raw (x, y), before tanh."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.tokens, std=self.tokens.shape[1] ** -0.5)
        with torch.no_grad():
            self.coordinates.copy_(spread_points(self.coordinates.shape[0]).atanh())

    def prefix(self, budget: int) -> tuple[Tensor, Tensor]:
        """The first `budget` tokens [C, D] and their raw coordinates [C, 2]."""
        return self.tokens[:budget], self.coordinates[:budget]


class CoreMove(nn.Module):
    """One layer's step of the cores across the image, read off their residual stream."""

    def __init__(self, width: int, initial_step: float) -> None:
        super().__init__()
        self.head = nn.Linear(width, 2)
        self.alpha = nn.Parameter(torch.tensor(initial_step))
        self.initial_step = initial_step

    def forward(self, raw: Tensor, cores: Tensor) -> Tensor:
        """raw [B or 1, C, 2], cores [B, C, D] -> the new raw coordinates [B, C, 2]."""
        # float32 at least: coordinates become angles, which bfloat16 would blur.
        return raw + self.alpha.to(raw.dtype) * self.head(cores).to(raw.dtype)


class CoreAttention(nn.Module):
    """Multi-head attention in which cores see every token and patches see the cores."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, H, T, d], a view."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        num_cores: int,
        core_rotation: Rotation,
        patch_rotation: Rotation | None,
        backend: str = "auto",
        multiplicity: Tensor | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """`rows`: the first cores alone come out, so many of them; the others are only seen."""
        q = self.split_heads(self.q(x if rows is None else x[:, :rows]))
        k, v = (self.split_heads(project(x)) for project in (self.k, self.v))
        mixed = unchecked_attention(
            q, k, v, num_cores, core_rotation, patch_rotation, multiplicity, backend
        )
        return self.joined(mixed)

    def joined(self, mixed: Tensor) -> Tensor:
        """What the heads found [B, H, T, d], through the output projection: [B, T, D]."""
        out = self.out(mixed.transpose(1, 2).flatten(2))
        return F.dropout(out, self.dropout, self.training)

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[B, T, D] -> [B, H, T, d], turned."""
        return rope.rotate(self.split_heads(self.q(x)), rotation)

    def keys_and_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[B, T, D] -> [B, H, T, d] each, the keys turned."""
        return rope.rotate(self.split_heads(self.k(x)), rotation), self.split_heads(self.v(x))

    def core_to_patch(
        self,
        x: Tensor,
        num_cores: int,
        core_rotation: Rotation,
        patch_rotation: Rotation,
        kind: str,
        multiplicity: Tensor | None = None,
    ) -> Tensor:
        """How much each core takes from each patch token, float32.

        "softmax": the attention weights themselves, [B, H, C, N]; a row sums to at most 1, the
        rest going to the cores. "norm": [B, C, N], the length of what patch j adds to core i
        after the output projection, sum over heads of weight_hij * (W_out,h v_hj), normalised
        over the patches; it sees through weights that fall on patches with nothing to say.
        """
        q, k, v = (self.split_heads(project(x)).float() for project in (self.q, self.k, self.v))
        keys = torch.cat(
            [
                rope.rotate(k[:, :, :num_cores], core_rotation),
                rope.rotate(k[:, :, num_cores:], patch_rotation),
            ],
            dim=2,
        )
        queries = rope.rotate(q[:, :, :num_cores], core_rotation)
        scores = queries @ keys.transpose(-2, -1) * queries.shape[-1] ** -0.5
        if multiplicity is not None:
            seen = F.pad(multiplicity.float().log(), (num_cores, 0))  # cores count once
            scores = scores + seen[:, None, None]
        weights = scores.softmax(dim=-1)[..., num_cores:]
        if kind == "softmax":
            return weights
        return self._norm_weights(weights, v[:, :, num_cores:])

    def _norm_weights(self, weights: Tensor, values: Tensor) -> Tensor:
        # The vectors themselves would be C x N x D numbers. Their squared lengths need only the
        # Gram matrix of the heads at each patch: |sum_h a_h u_h|^2 = sum_gh a_g a_h <u_g, u_h>.
        out = self.out.weight.float().unflatten(1, (self.heads, -1))  # [D, H, d]
        carried = torch.einsum("ehd,bhnd->bnhe", out, values)
        gram = carried @ carried.transpose(-2, -1)  # [B, N, H, H]
        squared = torch.einsum("bgcn,bngh,bhcn->bcn", weights, gram, weights)
        length = squared.clamp_min(0).sqrt()
        return length / length.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(length.dtype).tiny)


class SwiGLU(nn.Module):
    """silu(u) * v, with (u, v) one projection up to twice the hidden width, then back down."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.up = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.is_grad_enabled() and not is_compiling():
            # The hidden layer is the widest thing in the network. A part of it at a time stays
            # in the cache, and takes no fresh pages from the system for every block.
            rows = x.flatten(0, -2).split(CPU_ROWS)
            return torch.cat([self._mix(part) for part in rows]).view(*x.shape[:-1], -1)
        return self._mix(x)

    def _mix(self, x: Tensor) -> Tensor:
        u, v = self.up(x).chunk(2, dim=-1)
        hidden = F.dropout(F.silu(u) * v, self.dropout, self.training)
        return F.dropout(self.down(hidden), self.dropout, self.training)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attn = CoreAttention(config.width, config.heads, config.dropout)
        self.norm_ffn = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.ffn = SwiGLU(config.width, config.hidden_width, config.dropout)

    def forward(
        self,
        x: Tensor,
        num_cores: int,
        core_rotation: Rotation,
        patch_rotation: Rotation | None,
        backend: str = "auto",
        multiplicity: Tensor | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """`rows`: the first cores alone come out, so many of them; the others are only seen."""
        tables = core_rotation, patch_rotation
        # In one expression: what the norm gives is freed before the feed-forward needs room.
        x = (x if rows is None else x[:, :rows]) + self.attn(
            self.norm_attn(x), num_cores, *tables, backend, multiplicity, rows
        )
        return self.feed(x)

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward half of the block."""
        return x + self.ffn(self.norm_ffn(x))

    def read(self, patches: Tensor, keys: Tensor, values: Tensor, rotation: Rotation) -> Tensor:
        """Patches alone [B, n, D]: they see nothing but the cores' `keys` and `values`."""
        queries = self.attn.queries(self.norm_attn(patches), rotation)
        return self.feed(patches + self.attn.joined(patch_rows(queries, keys, values)))


class LayerState(NamedTuple):
    """Where a pass stands after one block, as `Veca.walk` yields it."""

    number: int
    """1 after the first block; 0 for what goes into it."""
    tokens: Tensor
    """[B, C + T, D] the residual stream, cores first; T is N until patches merge. After the last
    block of a walk with `rows` [B, rows, D]."""
    core_xy: Tensor
    """[B or 1, C, 2] where the cores stood in this block."""
    core_rotation: Rotation
    """That of `core_xy`."""
    patch_rotation: Rotation
    """That of the patch tokens."""
    grid: tuple[int, int]
    """(h, w): patches down and across."""
    periphery: Periphery
    """Which token stands for which patches."""
    raw: Tensor
    """`core_xy` before its tanh, which the next move adds to."""
    merging: bool = False
    """Windows have just merged: the state between two blocks, with the number of the first."""

    def of(self, images: Tensor) -> LayerState:
        """The same of some images of the batch; no windows have merged."""
        core_xy, raw, *rotation = (
            x if len(x) == 1 else x[images] for x in (self.core_xy, self.raw, *self.core_rotation)
        )
        return self._replace(
            tokens=self.tokens[images], core_xy=core_xy, core_rotation=Rotation(*rotation), raw=raw
        )

    def spread(self) -> Tensor:
        """[B, C + N, D] the residual stream, each patch with what its token has."""
        if self.periphery.multiplicity is None:
            return self.tokens
        cores, patches = self.tokens.tensor_split([self.core_xy.shape[1]], dim=1)
        return torch.cat([cores, self.periphery.spread(patches, self.grid)], dim=1)

    def on_grid(self, values: Tensor) -> Tensor:
        """What belongs to patch tokens [..., T], shared out among their patches: [..., h, w]."""
        token_of = self.periphery.token_of
        if token_of is not None:
            assert self.periphery.multiplicity is not None
            shape = (values.shape[0], *[1] * (values.ndim - 2), -1)
            shared = values / self.periphery.multiplicity.clamp_min(1).view(shape)
            index = token_of.view(shape).expand(*values.shape[:-1], -1)
            values = shared.gather(-1, index)
        return values.unflatten(-1, self.grid)


class EarlyWalk(NamedTuple):
    """The states of a walk before any windows have merged, from which walks can go on."""

    states: list[LayerState]

    @property
    def budget(self) -> int:
        return self.states[0].core_xy.shape[1]

    def of(self, images: Tensor) -> EarlyWalk:
        """The same of some images of the batch."""
        some = images.to(self.states[0].tokens.device)
        return EarlyWalk([state.of(some) for state in self.states])


class Veca(FeatureModel, nn.Module):
    """The elastic backbone: one set of weights, any image size on the patch grid, any budget.

    >>> model = Veca(VecaConfig()).eval()
    >>> out = model(images, cores=32)     # images [B, 3, H, W], normalised
    >>> out.cls, out.patches, out.cores, out.core_xy, out.grid
    """

    _gradient_checkpointing_func = staticmethod(partial(checkpoint, use_reentrant=False))

    def __init__(self, config: VecaConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.gradient_checkpointing = False
        c = config
        self.patch_embed = nn.Conv2d(c.in_channels, c.width, c.patch_size, stride=c.patch_size)
        self.bank = CoreBank(c.num_cores, c.width)
        self.moves = nn.ModuleList(CoreMove(c.width, c.core_move_init) for _ in range(c.depth - 1))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width, eps=c.norm_eps)
        same = c.feature_width == c.width
        self.project: nn.Module = nn.Identity() if same else nn.Linear(c.width, c.feature_width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh weights, as published; draws from torch's global generator."""
        initialize(self)

    @property
    def backend(self) -> str:
        """The attention backend: "auto" takes the fastest that fits the input."""
        return self._backend

    @backend.setter
    def backend(self, name: str) -> None:
        check_choice("attention backend", name, BACKENDS)
        self._backend = name

    @property
    def device(self) -> torch.device:
        return self.patch_embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embed.weight.dtype

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade time for memory in training: keep one tensor a block, recompute the rest."""
        self.gradient_checkpointing = enable

    def _recomputes(self, block: nn.Module) -> bool:
        # transformers, whose names these are, may choose among the blocks and bring another way.
        chosen = self.gradient_checkpointing and getattr(block, "gradient_checkpointing", True)
        return chosen and self.training and torch.is_grad_enabled()

    def forward(
        self,
        images: Tensor,
        cores: int | str | None = None,
        keep: float | str | None = None,
        agreement: float | None = None,
    ) -> VecaOutput:
        """Features of `images` [B, 3, H, W] (float, normalised) at the budget `cores`.

        H and W are multiples of the patch size (`veca.preprocess` sees to that).

        Args:
            cores: the budget, 1..M, by default all M; "auto": the least that keeps the promise on
                95 of 100 photos of this size, by the weights' calibration.
            keep: the share of patch tokens that go on after merging, 0.2..1, by default all: the
                network as published. The features cover the whole grid all the same. "auto": each
                image gets the share that its content needs.
            agreement: with "auto", the promise: the cosine of CLS and, on average, of the patches
                with what all cores and tokens give; 0.98 by default.
        """
        cores, keep, agreement = self._asked(cores, keep, agreement)
        if is_auto(cores, keep):
            return self._by_content(self.forward, images, cores, keep, agreement)
        for layer in self.walk(images, cores, keep=keep):
            last = layer
        return self.output(last)

    def _asked(
        self, cores: int | str | None, keep: float | str | None, agreement: float | None = None
    ) -> tuple[int | str | None, float | str | None, float | None]:
        """What a call asks for: where it says neither, what the model's point says."""
        if cores is None and keep is None and self.point is not None:
            given = self.point.agreement if agreement is None else agreement
            return self.point.cores, self.point.keep, given
        return cores, keep, check_agreement(agreement, cores, keep)

    def _by_content(
        self,
        call: Callable[..., Found],
        images: Tensor,
        cores: int | str | None,
        keep: float | str | None,
        agreement: float | None,
    ) -> Found:
        """A `call` of the model with numbers for "auto": images of one share go on together."""
        if not is_auto(keep):
            return call(images, cores=self._budget(images, cores, keep, agreement), keep=keep)
        early, shares = self._begun(images, cores, agreement)
        if len(set(shares)) == 1:
            return call(early, cores=early.budget, keep=shares[0])
        chosen = torch.tensor(shares)
        order = [(chosen == share).nonzero().flatten() for share in chosen.unique()]
        parts = [call(early.of(o), cores=early.budget, keep=shares[o[0]]) for o in order]
        return content.joined(parts, order)

    def chosen(
        self,
        images: Tensor,
        cores: int | str | None = None,
        agreement: float | None = None,
    ) -> content.Chosen:
        """What keep="auto" takes for these images, without the rest of the pass."""
        early, shares = self._begun(images, cores, agreement)
        return content.Chosen(early.budget, shares)

    def remember(
        self, images: Tensor, cores: int | None = None, keep: float | None = None
    ) -> tuple[VecaOutput, CoreMemory]:
        """What `forward` gives, and the memory from which `read` gives any region again.

        The model is in eval mode: in training the places of the patches are drawn at random.

        Args:
            keep: 1 or None: where patches merge, one depends on others.
        """
        at, share, promise = self._asked(cores, keep)
        check_memorable(self.training, share)
        keys, values = [], []
        for before, layer in pairwise(self.walk(images, at, agreement=promise)):
            block = cast(Block, self.blocks[layer.number - 1])
            normed = block.norm_attn(before.tokens[:, : layer.core_xy.shape[1]])
            key, value = block.attn.keys_and_values(normed, layer.core_rotation)
            keys.append(key)
            values.append(value)
        out = self.output(layer)
        memory = CoreMemory(
            torch.stack(keys),
            torch.stack(values),
            out.cores,
            out.core_xy,
            out.grid,
            self.config.patch_size,
            weights_stamp(self),
        )
        return out, memory

    def read(
        self,
        memory: CoreMemory,
        images: Tensor,
        at: tuple[int, int] | Sequence[tuple[int, int]],
        *,
        projection: bool = True,
    ) -> VecaOutput:
        """A region's features as the pass over the whole picture gave them, from its own pixels.

        Args:
            memory: from `remember`, or `CoreMemory.load`.
            images: the region's pixels [B, 3, h, w], normalised; or, with the memory of one
                picture, those of B regions of it.
            at: the region's first pixel (row, column) in the picture, both multiples of the patch
                size; or one for each of the B.
            projection: False: patches before the output projection, as `tokens` gives them.

        Returns:
            The region's patches; the cores are the whole picture's, the grid is the region's.
        """
        c = self.config
        check_memorable(self.training, None)
        shape = check_images(images, c.in_channels, c.patch_size)
        check_finite(images)
        memory = memory.fitted_to(self, weights_stamp(self))
        corners = memory.corners(at, shape, images.shape[0])
        xy = [rope.region_coordinates(memory.grid, x, shape, images.device) for x in corners]
        periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction, images.device)
        rotation = rope.rotation(torch.stack(xy), periods)
        patches = self.patch_embed(images.to(self.dtype)).flatten(2).transpose(1, 2)
        count = patches.shape[1]
        # Matrix products may round the last rows of odd numbers in another way.
        missing = (0, 0, 0, -count % _ROWS)
        patches, cos, sin = (F.pad(x, missing) for x in (patches, *rotation))
        for block, keys, values in zip(self.blocks, memory.keys, memory.values, strict=True):
            patches = cast(Block, block).read(patches, keys, values, Rotation(cos, sin))
        cores, core_xy = (x.expand(len(patches), -1, -1) for x in (memory.cores, memory.core_xy))
        patches = self.norm(patches)
        patches = (self.project(patches) if projection else patches)[:, :count]
        return VecaOutput(cores, patches, core_xy, shape)

    def tokens(
        self,
        images: Tensor,
        cores: int | str | None = None,
        keep: float | str | None = None,
        agreement: float | None = None,
    ) -> VecaOutput:
        """The same before the output projection: after the last norm, as wide as the network."""
        if is_auto(cores, keep):
            return self._by_content(self.tokens, images, cores, keep, agreement)
        for layer in self.walk(images, cores, keep=keep, agreement=agreement):
            last = layer
        # One by one: gradients of the norm are summed in this order since 0.1.
        parts = last.tokens.tensor_split([last.core_xy.shape[1]], dim=1)
        normed, patches = (self.norm(part) for part in parts)
        core_xy = last.core_xy.expand(len(patches), -1, -1)
        return VecaOutput(normed, last.periphery.spread(patches, last.grid), core_xy, last.grid)

    def cores_only(
        self,
        images: Tensor,
        cores: int | str | None = None,
        keep: float | str | None = None,
        *,
        first: int | None = None,
        projection: bool = True,
        agreement: float | None = None,
    ) -> CoresOutput:
        """The cores of `forward` without the patches, for less: equal to rounding.

        In the last block the patches are only seen; their feed-forward and projection never run.

        >>> model.cores_only(images, first=1).cls     # the global embedding and nothing else

        Args:
            first: how many of the cores are wanted, 1..C, by default all of them.
            projection: False: before the output projection, as wide as the network.
        """
        cores, keep, agreement = self._asked(cores, keep, agreement)
        if is_auto(cores, keep):
            call = partial(self.cores_only, first=first, projection=projection)
            return self._by_content(call, images, cores, keep, agreement)
        rows = check_first(first, check_budget(cores, self.config.num_cores))
        for layer in self.walk(images, cores, keep=keep, rows=rows):
            last = layer
        x = self.norm(last.tokens)
        core_xy = last.core_xy[:, :rows].expand(x.shape[0], -1, -1)
        return CoresOutput(self.project(x) if projection else x, core_xy, last.grid)

    def forward_intermediates(
        self,
        images: Tensor,
        cores: int | str | None = None,
        layers: Sequence[int] | None = None,
        *,
        norm: bool = True,
        keep: float | str | None = None,
        agreement: float | None = None,
    ) -> list[VecaOutput]:
        """The same outputs after each of `layers` (1..L, default all), in one run.

        With `norm` the final norm and output projection are applied to each, so that the last
        layer's equals `forward`; without it they are the raw residual stream.
        """
        if is_auto(cores, keep):
            call = partial(self.forward_intermediates, layers=layers, norm=norm)
            return self._by_content(call, images, cores, keep, agreement)
        wanted = check_layers(layers, self.config.depth)
        walk = self.walk(images, cores, last=max(wanted), keep=keep, agreement=agreement)
        outputs = {
            layer.number: self.output(layer, norm)
            for layer in walk
            if layer.number in wanted and not layer.merging
        }
        return [outputs[number] for number in wanted]

    def forward_features(
        self,
        images: Tensor,
        cores: int | str | None = None,
        keep: float | str | None = None,
        agreement: float | None = None,
    ) -> Tensor:
        """[B, C + N, D'] the same as one tensor, as timm has it: all cores, then all patches."""
        out = self.forward(images, cores, keep, agreement)
        return torch.cat([out.cores, out.patches], dim=1)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_class_token: bool = False,
        return_extra_tokens: bool = False,
        norm: bool = True,
        *,
        cores: int | str | None = None,
        keep: float | str | None = None,
        projection: bool = True,
        agreement: float | None = None,
    ) -> tuple[Any, ...]:
        """Patch features after some blocks, one entry a block, in the order of the network: DINO's.

        `forward_intermediates` has all parts of the output, and counts blocks from 1.

        Args:
            x: images [B, 3, H, W], as `forward` takes them.
            n: the last n blocks; or which ones, from 0, negative ones from the end.
            reshape: [B, D', h, w] instead of [B, N, D'].
            return_class_token: (patches, cls [B, D']) for each block.
            return_extra_tokens: the cores but the first, [B, C - 1, D'], as the last of each entry.
            norm: through the final norm and output projection, so that the last block's are those
                of `forward`; else the raw residual stream, `embed_dim` wide.
            cores: the budget.
            keep, agreement: the share of patch tokens that go on, as in `forward`.
            projection: False: with `norm` through the norm alone, `embed_dim` wide.
        """
        blocks = check_blocks(n, self.config.depth)
        wanted = [block + 1 for block in blocks]
        outputs = self.forward_intermediates(
            x, cores, wanted, norm=norm and projection, keep=keep, agreement=agreement
        )
        layers = [LayerTokens(out.cores, out.patches, out.grid) for out in outputs]
        if norm and not projection:
            layers = [LayerTokens(self.norm(a), self.norm(b), grid) for a, b, grid in layers]
        return as_dino(
            layers,
            reshape=reshape,
            class_token=return_class_token,
            extra_tokens=return_extra_tokens,
        )

    def attention_maps(
        self,
        images: Tensor,
        cores: int | str | None = None,
        layers: Sequence[int] | None = None,
        *,
        kind: str = "softmax",
        per_head: bool = False,
        keep: float | str | None = None,
        agreement: float | None = None,
    ) -> Tensor:
        """Where each core looks, layer by layer: [B, layers, C, h, w], float32.

        Args:
            layers: 1..L, default all.
            kind: "softmax", attention weights averaged over heads; or "norm", the norm-based
                kind the paper draws, which sums to 1 over the patches.
            per_head: softmax weights of every head apart, [B, layers, H, C, h, w].
            keep, agreement: as in `forward`; what a core takes from a token is shared out among
                its patches.
        """
        check_choice("kind of attention map", kind, ATTENTION_KINDS)
        if per_head and kind == "norm":
            raise InputError(
                "norm-based maps sum the heads before taking the length, so they have no "
                "per-head form; use kind='softmax' with per_head=True."
            )
        if is_auto(cores, keep):
            call = partial(self.attention_maps, layers=layers, kind=kind, per_head=per_head)
            return self._by_content(call, images, cores, keep, agreement)
        wanted = check_layers(layers, self.config.depth)
        maps = {}
        walk = self.walk(images, cores, last=max(wanted), keep=keep, agreement=agreement)
        for before, layer in pairwise(walk):
            if layer.number in wanted and not layer.merging:
                weights = self.core_to_patch(before, layer, kind)
                if kind == "softmax" and not per_head:
                    weights = weights.mean(dim=1)
                maps[layer.number] = layer.on_grid(weights)
        return torch.stack([maps[number] for number in wanted], dim=1)

    def core_to_patch(self, before: LayerState, layer: LayerState, kind: str = "softmax") -> Tensor:
        """How much each core takes from each patch token, as `CoreAttention.core_to_patch`.

        Args:
            before, layer: two states that `walk` yields one after the other, the second of them
                after a block; its `on_grid` brings the result to the patches.
        """
        block = cast(Block, self.blocks[layer.number - 1])
        return block.attn.core_to_patch(
            block.norm_attn(before.tokens),
            layer.core_xy.shape[1],
            layer.core_rotation,
            layer.patch_rotation,
            kind,
            layer.periphery.multiplicity,
        )

    def walk(
        self,
        images: Tensor | EarlyWalk,
        cores: int | str | None = None,
        *,
        last: int | None = None,
        keep: float | str | None = None,
        rows: int | None = None,
        agreement: float | None = None,
    ) -> Iterator[LayerState]:
        """Run the network block by block: the state before the first, then after each.

        `forward` is this walk to its end, and then `output`. A walk that is left early runs no
        further block.

        >>> for layer in model.walk(images, cores=32):
        ...     print(layer.number, model.output(layer).patches.norm())

        Args:
            images: or what `before_merging` gave for them, to go on from.
            last: the block to stop after, 1..L, by default the last.
            keep, agreement: as in `forward`. Where windows merge, the state after that is yielded
                as well, with `merging` set. Images that choose different shares have as many
                tokens as the one with the most: the others are filled up with padding, which
                `Periphery.multiplicity` tells by a 0.
            rows: from the last block so many of the cores come out, and no patches.
        """
        c = self.config
        end = c.depth if last is None else check_layers([last], c.depth)[0]
        shares: tuple[float, ...]
        if isinstance(images, EarlyWalk):
            early, shares = images, (check_keep(keep),)
        elif is_auto(keep):
            early, shares = self._begun(images, cores, agreement)
        else:
            shares = (check_keep(keep),)
            start = self._start(images, self._budget(images, cores, keep, agreement))
            early = EarlyWalk([start])
        yield from (state for state in early.states if state.number <= end)
        state = early.states[-1]
        merges = batch_plan(c.merge_blocks, shares, state.grid, state.tokens.device)
        yield from self._blocks(state, end, merges, rows)

    def _budget(
        self,
        images: Tensor,
        cores: int | str | None,
        keep: float | str | None,
        agreement: float | None,
    ) -> int:
        """The budget of a call, by the calibration where that is asked for."""
        promise = check_agreement(agreement, cores, keep)
        if promise is None or not is_auto(cores):
            return check_budget(cores, self.config.num_cores)
        grid = check_images(images, self.config.in_channels, self.config.patch_size)
        each = self.calibration.of_each(promise, 2 if is_auto(keep) else 1)
        return self.calibration.budget(grid, each, self.config.num_cores)

    @property
    def calibration(self) -> content.Calibration:
        """What `cores="auto"` and `keep="auto"` go by; InputError where the weights have none."""
        return content.calibration_of(self.beside, self.name, self.config.merge_blocks)

    def before_merging(self, images: Tensor, cores: int | None = None) -> EarlyWalk:
        """The states of a walk up to where windows would merge first, whatever is kept.

        >>> early = model.before_merging(images)
        >>> for keep in (0.35, 0.5):
        ...     *_, end = model.walk(early, keep=keep)
        """
        start = self._start(images, check_budget(cores, self.config.num_cores))
        return EarlyWalk([start, *self._blocks(start, self.config.merge_blocks[0] - 1, {})])

    def _begun(
        self,
        images: Tensor,
        cores: int | str | None,
        agreement: float | None,
    ) -> tuple[EarlyWalk, tuple[float, ...]]:
        """`before_merging`, and the share that each image chooses there."""
        promise = check_agreement(agreement, cores, AUTO)
        assert promise is not None
        check_images(images, self.config.in_channels, self.config.patch_size)
        check_readable(images, self.training)
        calibration = self.calibration
        each = calibration.of_each(promise, 2 if is_auto(cores) else 1)
        budget = self._budget(images, cores, AUTO, promise)
        early = self.before_merging(images, budget)
        state = early.states[-1]
        differences = unlikeness(state.tokens[:, budget:], state.grid)
        return early, calibration.shares(differences, state.grid, each)

    def _start(self, images: Tensor, budget: int) -> LayerState:
        """The state before the first block."""
        c = self.config
        grid = check_images(images, c.in_channels, c.patch_size)
        if not self.training:
            check_finite(images)

        patches = self.patch_embed(images.to(self.patch_embed.weight.dtype))
        height, width = patches.shape[-2:]
        patches = patches.flatten(2).transpose(1, 2)
        tokens, raw = self.bank.prefix(budget)
        tokens = tokens.expand(patches.shape[0], -1, -1).to(patches.dtype)
        x = torch.cat([tokens, patches], dim=1)

        patch_xy = rope.grid_coordinates(height, width, x.device)
        if self.training:
            patch_xy = rope.augment_coordinates(
                patch_xy, c.rope_shift, c.rope_jitter, c.rope_rescale
            )
        periphery = Periphery(patch_xy.unsqueeze(0))
        patch_rotation = rope.rotation(periphery.xy, self._periods(x.device))

        # A copy: without gradients, views of parameters trip up torch's counter of FLOPs.
        raw = (raw if raw.dtype == torch.float64 else raw.float()).unsqueeze(0).clone()
        core_xy = raw.tanh()
        core_rotation = rope.rotation(core_xy, self._periods(x.device))
        return LayerState(0, x, core_xy, core_rotation, patch_rotation, grid, periphery, raw)

    def _blocks(
        self,
        state: LayerState,
        end: int,
        merges: dict[int, tuple[int, int, Tensor | None]],
        rows: int | None = None,
    ) -> Iterator[LayerState]:
        """From a state on to the block `end`: the state after each."""
        done, x, core_xy, core_rotation, patch_rotation, grid, periphery, raw, _ = state
        budget, periods = core_xy.shape[1], self._periods(x.device)
        for number, block in enumerate(self.blocks[done:end], start=done + 1):
            if number in merges:
                x, periphery = merge(x, periphery, grid, *merges[number], cores=budget)
                patch_rotation = rope.rotation(periphery.xy, periods)
                yield LayerState(
                    number - 1,
                    x,
                    core_xy,
                    core_rotation,
                    patch_rotation,
                    grid,
                    periphery,
                    raw,
                    merging=True,
                )
            if number > 1:
                raw = self.moves[number - 2](raw, x[:, :budget])
                core_xy = raw.tanh()
                core_rotation = rope.rotation(core_xy, periods)
            seen = periphery.multiplicity
            few = rows if number == end else None
            if self._recomputes(block):
                run = partial(_unpacked, block, budget, self.backend, seen, few)
                x = self._gradient_checkpointing_func(run, x, *core_rotation, *patch_rotation)
            else:
                x = block(x, budget, core_rotation, patch_rotation, self.backend, seen, few)
            yield LayerState(
                number, x, core_xy, core_rotation, patch_rotation, grid, periphery, raw
            )

    def _periods(self, device: torch.device) -> Tensor:
        c = self.config
        return rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction, device)

    def output(self, layer: LayerState, norm: bool = True) -> VecaOutput:
        """What comes out after a layer: through the final norm and output projection, or raw."""
        budget = layer.core_xy.shape[1]
        core_xy = layer.core_xy.expand(layer.tokens.shape[0], -1, -1)
        x = self.norm(layer.tokens) if norm else layer.tokens
        # It makes no difference to the features whether tokens are projected or their patches.
        # Tokens are fewer; but exported, what spreads them is many passes over wide features.
        late = is_exporting() and layer.periphery.multiplicity is not None
        if late:
            patches = layer.periphery.spread(x[:, budget:], layer.grid)
            x = torch.cat([x[:, :budget], patches], dim=1)
        x = self.project(x) if norm else x
        patches = x[:, budget:]
        if not late:
            patches = layer.periphery.spread(patches, layer.grid)
        return VecaOutput(x[:, :budget], patches, core_xy, layer.grid)


def _unpacked(
    block: nn.Module,
    budget: int,
    backend: str,
    multiplicity: Tensor | None,
    rows: int | None,
    x: Tensor,
    *tables: Tensor,
) -> Tensor:
    """A block whose tensors are arguments of their own, which checkpoints can see."""
    cores, patches = Rotation(*tables[:2]), Rotation(*tables[2:])
    return cast(Tensor, block(x, budget, cores, patches, backend, multiplicity, rows))


def create_model(name: str | VecaConfig, *, backend: str = "auto", **changes: object) -> Veca:
    """A model with fresh weights: a preset's name or a configuration, with fields changed.

    >>> create_model("veca_base_patch16")
    >>> create_model("small", output_width=768)
    """
    config = name if isinstance(name, VecaConfig) else preset(name)
    return Veca(config.replace(**changes) if changes else config, backend=backend)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def initialize(model: nn.Module) -> None:
    """Initialise every module of ours or of torch's, as published."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, CoreBank):
            module.reset_parameters()
        elif isinstance(module, CoreMove):
            nn.init.constant_(module.alpha, module.initial_step)


def spread_points(count: int, pool: int = 1000, reach: float = 0.95) -> Tensor:
    """`count` points of [-reach, reach]^2 in an order whose every prefix covers it evenly.

    Farthest-point sampling out of `pool` uniform draws, from the one nearest the origin.
    """
    # On the CPU whatever the default device: the loop reads values, which "meta" has none of.
    points = torch.empty(max(pool, count), 2, device="cpu").uniform_(-reach, reach)
    chosen = torch.empty(count, dtype=torch.long, device="cpu")
    chosen[0] = points.square().sum(dim=1).argmin()
    distance = torch.full((len(points),), math.inf, device="cpu")
    for i in range(1, count):
        newest = points[chosen[i - 1]]
        distance = torch.minimum(distance, (points - newest).square().sum(dim=1))
        chosen[i] = distance.argmax()
    return points[chosen]
