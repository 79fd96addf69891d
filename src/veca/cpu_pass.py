"""The forward pass on a CPU, in the precision that the processor is fast in.

All of a layer but its attention concerns one token at a time. It is done for a block of rows from
end to end, so that what is wide in between, the sums of whole numbers and the hidden layer, stays
in the cache; and a compiled function is one for all sizes, budgets and shares of tokens. Residual
stream, norms and whatever is written in between are float32; products are in the precision asked
for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veca import rope
from veca.attention import core_attention
from veca.attention.reference import core_bias
from veca.config import VecaConfig
from veca.merging import Periphery, merge, merge_plan
from veca.model import Block, CoreMove, Veca
from veca.quantization import Recipe, quantized_rows, quantized_weight

ROWS = 256
"""Tokens in a block, about: as wide as they get, they fit a cache of 1 MiB."""


class Rounded(NamedTuple):
    """A linear layer in int8."""

    weight: Tensor
    """int8 [in, out], a transposed view, as the product reads fastest."""
    scale: Tensor
    bias: Tensor


class Plain(NamedTuple):
    """A linear layer in float32 or bfloat16."""

    weight: Tensor
    bias: Tensor


Linear: TypeAlias = "Rounded | Plain"


class Layer(NamedTuple):
    """One block's weights, with q, k and v as one layer, and the move before it."""

    norm_attn: tuple[Tensor, Tensor]
    qkv: Linear
    out: Linear
    norm_ffn: tuple[Tensor, Tensor]
    up: Linear
    down: Linear
    move: tuple[Tensor, Tensor]
    """Head weight [2, D] and bias [2], both times alpha; zero in the first layer."""


class CpuPass:
    """Weights packed for a CPU. Any thread may call it.

    Args:
        wide: of the layers that are not rounded: float32 or bfloat16.
        recipe: which layers are int8; None: none.
        attention: what attention is computed in.
    """

    def __init__(
        self,
        model: Veca,
        *,
        wide: torch.dtype,
        recipe: Recipe | None,
        attention: torch.dtype,
        compile: bool,
    ) -> None:
        self.config: VecaConfig = model.config
        self._attention = attention
        rounded = set() if recipe is None else set(recipe.layers(model))

        def packed(*names: str) -> Linear:
            linears = [cast(nn.Linear, model.get_submodule(name)) for name in names]
            weight = torch.cat([part.weight.detach() for part in linears]).float()
            bias = torch.cat([part.bias.detach() for part in linears]).float()
            if len(names) > 1:
                weight, bias = _pairs_apart(weight, self.config), _pairs_apart(bias, self.config)
            if rounded.issuperset(names):
                whole, scale = quantized_weight(weight)
                return Rounded(whole.t(), scale, bias)
            return Plain(weight.to(wide), bias.to(wide))

        embed = model.patch_embed
        assert embed.bias is not None
        self._embed = Plain(*(p.detach().to(wide) for p in (embed.weight.flatten(1), embed.bias)))
        self._tokens, self._raw = (x.detach().float().clone() for x in model.bank.prefix(10**9))
        self._norm = _floats(model.norm)
        self._project = packed("project") if isinstance(model.project, nn.Linear) else None
        moves = [None, *(cast(CoreMove, move) for move in model.moves)]
        self._layers = []
        for number, (block, move) in enumerate(zip(model.blocks, moves, strict=True)):
            name, block = f"blocks.{number}", cast(Block, block)
            layer = Layer(
                norm_attn=_floats(block.norm_attn),
                qkv=packed(*(f"{name}.attn.{part}" for part in "qkv")),
                out=packed(f"{name}.attn.out"),
                norm_ffn=_floats(block.norm_ffn),
                up=packed(f"{name}.ffn.up"),
                down=packed(f"{name}.ffn.down"),
                move=_move(move, self._tokens),
            )
            self._layers.append(layer)
        self._read: Callable[..., None] = _read
        self._write: Callable[..., None] = _write
        self._last: Callable[..., Tensor] = _last
        if compile:
            options: dict[str, Any] = {"dynamic": True, "fullgraph": True}
            self._read = torch.compile(_read, **options)
            self._write = torch.compile(_write, **options)
            self._last = torch.compile(_last, **options)

    def __call__(
        self,
        images: Tensor,
        budget: int,
        grid: tuple[int, int],
        keep: float,
        rows: int | None,
        project: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Cores and patches [B, C + N, D'], or `rows` cores alone, and raw coordinates [B, C, 2].

        Args:
            project: through the output projection; else as wide as the network.
        """
        c = self.config
        periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction)
        periphery = Periphery(rope.grid_coordinates(*grid).unsqueeze(0))
        merges = merge_plan(c.merge_blocks, keep, grid)
        x = self._embedded(images, budget)
        batch = len(x)
        raw = self._raw[:budget].expand(batch, -1, -1)
        tables = _tables(periphery, periods, batch, budget)
        for number, layer in enumerate(self._layers, start=1):
            if number in merges:
                patches, periphery = merge(x[:, budget:], periphery, grid, *merges[number])
                x = torch.cat([x[:, :budget], patches], dim=1)
                tables = _tables(periphery, periods, batch, budget)
            raw = raw + F.linear(x[:, :budget], *layer.move)
            turn = rope.rotation(raw.tanh(), periods)
            for table, own in zip(tables, turn, strict=True):
                table[:, :budget] = own
            q, k, v = self._heads(x, layer, tables)
            if rows is not None and number == len(self._layers):
                q, x = q[:, :, :rows], x[:, :rows].contiguous()
            mixed = self._mixed(q, k, v, budget, periphery.multiplicity)
            flat = x.view(-1, c.width)
            for part, seen in zip(_blocks(flat), _blocks(mixed), strict=True):
                self._write(part, seen, layer, c.norm_eps)
        return self._finished(x, budget, grid, periphery, rows, project), raw

    def _embedded(self, images: Tensor, budget: int) -> Tensor:
        batch, side = len(images), self.config.patch_size
        patches = F.unfold(images.float(), side, stride=side).transpose(1, 2)
        patches = _product(patches, self._embed)
        return torch.cat([self._tokens[:budget].expand(batch, -1, -1), patches], dim=1)

    def _heads(
        self, x: Tensor, layer: Layer, tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [B, H, T, d] each; q and k turned."""
        c = self.config
        batch, count, width = x.shape
        heads = torch.empty(batch * count, 3, c.heads, c.head_width, dtype=self._attention)
        parts = zip(
            _blocks(x.view(-1, width)),
            *(_blocks(table.view(batch * count, -1)) for table in tables),
            _blocks(heads),
            strict=True,
        )
        for part, cos, sin, out in parts:
            self._read(out, part, cos, sin, layer, c.norm_eps)
        q, k, v = heads.view(batch, count, 3, c.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        return q, k, v

    def _mixed(
        self, q: Tensor, k: Tensor, v: Tensor, budget: int, multiplicity: Tensor | None
    ) -> Tensor:
        """What attention finds, [B * T, D]."""
        if self._attention == torch.float32:
            mixed = core_attention(q, k, v, budget, multiplicity=multiplicity).transpose(1, 2)
            return mixed.reshape(-1, self.config.width)
        mixed = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
        bias = None if multiplicity is None else core_bias(multiplicity, budget).to(q.dtype)
        mixed[:, :budget] = _attend(q[:, :, :budget], k, v, bias).transpose(1, 2)
        if q.shape[2] > budget:
            k, v = k[:, :, :budget], v[:, :, :budget]
            mixed[:, budget:] = _attend(q[:, :, budget:], k, v, None).transpose(1, 2)
        return mixed.view(-1, self.config.width)

    def _finished(
        self,
        x: Tensor,
        budget: int,
        grid: tuple[int, int],
        periphery: Periphery,
        rows: int | None,
        project: bool,
    ) -> Tensor:
        last = self._project if project else None
        if rows is None and periphery.token_of is not None:
            x = F.layer_norm(x, x.shape[-1:], *self._norm, self.config.norm_eps)
            x = torch.cat([x[:, :budget], periphery.spread(x[:, budget:], grid)], dim=1)
            if last is None:
                return x
            flat = x.flatten(0, 1)
            found = [_product(part, last) for part in _blocks(flat)]
        else:
            flat = x.flatten(0, 1)
            found = [self._last(p, self._norm, last, self.config.norm_eps) for p in _blocks(flat)]
        return torch.cat(found).view(*x.shape[:-1], -1)


def _blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """Rows in blocks of about `ROWS`, all of nearly one length: a short last one costs as much."""
    count = max(1, round(len(rows) / ROWS))
    return rows.split(-(-len(rows) // count))


def _pairs_apart(rows: Tensor, config: VecaConfig) -> Tensor:
    """Rows of q, k and v [3 * D, ...] with the channels of q and k that turn together apart.

    First the even ones of a head, then the odd ones: products of q and k stay what they are, and
    halves are faster to turn than neighbours.
    """
    heads, width = config.heads, config.head_width
    q, k, v = rows.unflatten(0, (3, heads, width))
    q, k = (torch.cat([x[:, 0::2], x[:, 1::2]], dim=1) for x in (q, k))
    return torch.stack([q, k, v]).flatten(0, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Plain attention; on a CPU torch's fused kernel is slower than this in bfloat16."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    return scores.softmax(dim=-1) @ v


def _floats(norm: nn.Module) -> tuple[Tensor, Tensor]:
    weight, bias = cast(nn.LayerNorm, norm).weight, cast(nn.LayerNorm, norm).bias
    return weight.detach().float().clone(), bias.detach().float().clone()


def _move(move: CoreMove | None, like: Tensor) -> tuple[Tensor, Tensor]:
    if move is None:
        return like.new_zeros(2, like.shape[1]), like.new_zeros(2)
    alpha, head = move.alpha.detach().float(), move.head
    return head.weight.detach().float() * alpha, head.bias.detach().float() * alpha


def _tables(
    periphery: Periphery, periods: Tensor, batch: int, budget: int
) -> tuple[Tensor, Tensor]:
    """Rotary tables of all tokens, [B, C + T, d / 2]; the cores' rows are still to be written."""
    found = []
    for table in rope.rotation(periphery.xy, periods):
        table = table.expand(batch, -1, -1)
        found.append(torch.cat([table.new_empty(batch, budget, table.shape[-1]), table], dim=1))
    return found[0], found[1]


def _product(x: Tensor, layer: Linear) -> Tensor:
    """A linear layer on float32 rows [..., in]; float32 comes out."""
    if isinstance(layer, Plain):
        return F.linear(x.to(layer.weight.dtype), layer.weight, layer.bias).float()
    rounded, row = quantized_rows(x)
    # As in `quantized_linear_reference`: equal to rounding.
    return torch.addcmul(layer.bias, torch._int_mm(rounded, layer.weight) * layer.scale, row)


def _read(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layer: Layer, eps: float) -> None:
    """Rows' q, k and v into `out` [R, 3, H, d], q and k turned."""
    found = _product(F.layer_norm(x, x.shape[-1:], *layer.norm_attn, eps), layer.qkv)
    found = found.view(out.shape)
    cos, sin = cos[:, None, None], sin[:, None, None]
    even, odd = found[:, :2].chunk(2, dim=-1)
    half = even.shape[-1]
    out[:, :2, :, :half] = even * cos - odd * sin
    out[:, :2, :, half:] = even * sin + odd * cos
    out[:, 2] = found[:, 2]


def _write(x: Tensor, mixed: Tensor, layer: Layer, eps: float) -> None:
    """Rows of the residual stream after the layer, in place, given what attention found."""
    after = x + _product(mixed.float(), layer.out)
    hidden = _product(F.layer_norm(after, x.shape[-1:], *layer.norm_ffn, eps), layer.up)
    gate, value = hidden.chunk(2, dim=-1)
    x.copy_(after + _product(F.silu(gate) * value, layer.down))


def _last(x: Tensor, norm: tuple[Tensor, Tensor], project: Linear | None, eps: float) -> Tensor:
    x = F.layer_norm(x, x.shape[-1:], *norm, eps)
    return x if project is None else _product(x, project)
