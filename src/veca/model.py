"""VECA, the method in one file: patches that talk only through an ordered bank of cores.

Read top-down: the core bank, moving cores, attention, feed-forward, block, model.

Shapes: B images, N patches (h x w of them), C active cores (the budget), T = C + N tokens,
D width, L layers. Tokens are kept as [cores ; patches] through the whole network.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from veca import rope
from veca.attention import BACKENDS, core_attention
from veca.config import VecaConfig, preset
from veca.errors import InputError, suggest, whole
from veca.rope import Rotation, transformed

ATTENTION_KINDS = ("softmax", "norm")
CPU_ROWS = 512
"""Tokens that a CPU takes through the feed-forward at a time when it needs no gradients."""


class VecaOutput(NamedTuple):
    """What the model knows about a batch of images."""

    cores: Tensor
    """[B, C, D'] every active core; D' is `config.feature_width`."""
    patches: Tensor
    """[B, N, D'] dense features, row by row."""
    core_xy: Tensor
    """[B, C, 2] where each core ended, (x, y) in [-1, 1]."""
    grid: tuple[int, int]
    """(h, w): patches down and across."""

    @property
    def cls(self) -> Tensor:
        """[B, D'] the first core: the global embedding."""
        return self.cores[:, 0]

    def feature_map(self) -> Tensor:
        """[B, D', h, w] the dense features as an image."""
        return self.patches.transpose(1, 2).unflatten(2, self.grid)


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
    ) -> Tensor:
        q, k, v = (self.split_heads(project(x)) for project in (self.q, self.k, self.v))
        mixed = core_attention(
            q,
            k,
            v,
            num_cores,
            core_rotation=core_rotation,
            patch_rotation=patch_rotation,
            backend=backend,
        )
        out = self.out(mixed.transpose(1, 2).flatten(2))
        return F.dropout(out, self.dropout, self.training)

    def core_to_patch(
        self,
        x: Tensor,
        num_cores: int,
        core_rotation: Rotation,
        patch_rotation: Rotation,
        kind: str,
    ) -> Tensor:
        """How much each core takes from each patch, float32.

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
    ) -> Tensor:
        x = x + self.attn(self.norm_attn(x), num_cores, core_rotation, patch_rotation, backend)
        return x + self.ffn(self.norm_ffn(x))


class _Layer(NamedTuple):
    """The state after one block, as `Veca._layers` walks through them."""

    number: int
    """1 for the first block."""
    tokens: Tensor
    """[B, C + N, D], the residual stream."""
    core_xy: Tensor
    """[B or 1, C, 2], where the cores stood in this block."""


class Veca(nn.Module):
    """The elastic backbone: one set of weights, any image size on the patch grid, any budget.

    >>> model = Veca(VecaConfig()).eval()
    >>> out = model(images, cores=32)     # images [B, 3, H, W], normalised
    >>> out.cls, out.patches, out.cores, out.core_xy, out.grid
    """

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
        if name not in BACKENDS:
            raise InputError(f"unknown attention backend {suggest(str(name), BACKENDS)}")
        self._backend = name

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade time for memory in training: keep one tensor a block, recompute the rest."""
        self.gradient_checkpointing = enable

    def forward(self, images: Tensor, cores: int | None = None) -> VecaOutput:
        """Features of `images` [B, 3, H, W] (float, normalised) at the budget `cores`.

        H and W are multiples of the patch size (`veca.preprocess` sees to that); `cores` is
        1..M, by default all M.
        """
        budget, grid = self._check(images, cores)
        last = deque(self._layers(images, budget), maxlen=1).pop()
        return self._finish(last, budget, grid)

    def tokens(self, images: Tensor, cores: int | None = None) -> VecaOutput:
        """The same before the output projection: after the last norm, as wide as the network."""
        raw = self.forward_intermediates(images, cores, (self.config.depth,), norm=False)[0]
        return raw._replace(cores=self.norm(raw.cores), patches=self.norm(raw.patches))

    def forward_intermediates(
        self,
        images: Tensor,
        cores: int | None = None,
        layers: Sequence[int] | None = None,
        *,
        norm: bool = True,
    ) -> list[VecaOutput]:
        """The same outputs after each of `layers` (1..L, default all), in one run.

        With `norm` the final norm and output projection are applied to each, so that the last
        layer's equals `forward`; without it they are the raw residual stream.
        """
        budget, grid = self._check(images, cores)
        wanted = self._check_layers(layers)
        outputs = {
            layer.number: self._finish(layer, budget, grid, norm)
            for layer in self._layers(images, budget, last=max(wanted))
            if layer.number in wanted
        }
        return [outputs[number] for number in wanted]

    def attention_maps(
        self,
        images: Tensor,
        cores: int | None = None,
        layers: Sequence[int] | None = None,
        *,
        kind: str = "softmax",
        per_head: bool = False,
    ) -> Tensor:
        """Where each core looks, layer by layer: [B, layers, C, h, w], float32.

        Args:
            layers: 1..L, default all.
            kind: "softmax", attention weights averaged over heads; or "norm", the norm-based
                kind the paper draws, which sums to 1 over the patches.
            per_head: softmax weights of every head apart, [B, layers, H, C, h, w].
        """
        if kind not in ATTENTION_KINDS:
            raise InputError(f"unknown kind of attention map {suggest(str(kind), ATTENTION_KINDS)}")
        if per_head and kind == "norm":
            raise InputError(
                "norm-based maps sum the heads before taking the length, so they have no "
                "per-head form; use kind='softmax' with per_head=True."
            )
        budget, grid = self._check(images, cores)
        wanted = self._check_layers(layers)
        maps = {}

        def look(number: int, block: Block, x: Tensor, core: Rotation, patch: Rotation) -> None:
            if number in wanted:
                weights = block.attn.core_to_patch(block.norm_attn(x), budget, core, patch, kind)
                if kind == "softmax" and not per_head:
                    weights = weights.mean(dim=1)
                maps[number] = weights.unflatten(-1, grid)

        deque(self._layers(images, budget, last=max(wanted), look=look), maxlen=0)
        return torch.stack([maps[number] for number in wanted], dim=1)

    def _layers(
        self,
        images: Tensor,
        budget: int,
        last: int | None = None,
        look: Callable[[int, Block, Tensor, Rotation, Rotation], None] | None = None,
    ) -> Iterator[_Layer]:
        """Run the network block by block; `look` sees what goes into each."""
        patches = self.patch_embed(images.to(self.patch_embed.weight.dtype))
        height, width = patches.shape[-2:]
        patches = patches.flatten(2).transpose(1, 2)
        tokens, raw = self.bank.prefix(budget)
        tokens = tokens.expand(patches.shape[0], -1, -1).to(patches.dtype)
        x = torch.cat([tokens, patches], dim=1)

        c = self.config
        periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction, x.device)
        patch_xy = rope.grid_coordinates(height, width, x.device)
        if self.training:
            patch_xy = rope.augment_coordinates(
                patch_xy, c.rope_shift, c.rope_jitter, c.rope_rescale
            )
        patch_rotation = rope.rotation(patch_xy.unsqueeze(0), periods)

        # A copy: without gradients, views of parameters trip up torch's counter of FLOPs.
        raw = (raw if raw.dtype == torch.float64 else raw.float()).unsqueeze(0).clone()
        for number, block in enumerate(self.blocks[:last], start=1):
            if number > 1:
                raw = self.moves[number - 2](raw, x[:, :budget])
            core_xy = raw.tanh()
            core_rotation = rope.rotation(core_xy, periods)
            if look is not None:
                look(number, cast(Block, block), x, core_rotation, patch_rotation)
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(
                    block,
                    x,
                    budget,
                    core_rotation,
                    patch_rotation,
                    self.backend,
                    use_reentrant=False,
                )
            else:
                x = block(x, budget, core_rotation, patch_rotation, self.backend)
            yield _Layer(number, x, core_xy)

    def _finish(
        self, layer: _Layer, budget: int, grid: tuple[int, int], norm: bool = True
    ) -> VecaOutput:
        x = self.project(self.norm(layer.tokens)) if norm else layer.tokens
        core_xy = layer.core_xy.expand(x.shape[0], -1, -1)
        return VecaOutput(x[:, :budget], x[:, budget:], core_xy, grid)

    def _check(self, images: Tensor, cores: int | None) -> tuple[int, tuple[int, int]]:
        """Refuse what the model cannot take; return the budget and the patch grid."""
        budget = check_budget(cores, self.config.num_cores)
        grid = check_images(images, self.config.in_channels, self.config.patch_size)
        if not self.training:
            check_finite(images)
        return budget, grid

    def _check_layers(self, layers: Sequence[int] | None) -> list[int]:
        depth = self.config.depth
        if layers is None:
            return list(range(1, depth + 1))
        wanted = [whole(layer) for layer in layers] if isinstance(layers, Iterable) else []
        known = [layer for layer in wanted if layer is not None and 1 <= layer <= depth]
        if not wanted or len(known) < len(wanted):
            raise InputError(
                f"layers must be a list of whole numbers from 1 to {depth}, got {layers!r}; "
                "1 is the first block."
            )
        return known


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


def check_model(model: object, caller: str) -> None:
    """Refuse what `caller` was given instead of a model: a wrapped one, weights, anything else."""
    if not isinstance(model, Veca):
        wrapped = hasattr(model, "module") or hasattr(model, "_orig_mod")
        hint = "; pass the model inside it" if wrapped else ""
        raise InputError(f"{caller} takes a Veca model, got {type(model).__name__}{hint}.")


def check_budget(cores: int | None, num_cores: int) -> int:
    """The budget to use: `cores`, or the whole bank when it is None."""
    if cores is None:
        return num_cores
    budget = cores if type(cores) is int else whole(cores)
    if budget is None or not 1 <= budget <= num_cores:
        raise InputError(
            f"cores must be a whole number from 1 to {num_cores} (the size of this model's bank), "
            f"got {cores!r}."
        )
    return budget


def check_images(images: Tensor, channels: int, patch_size: int) -> tuple[int, int]:
    """The patch grid (h, w) of a batch of images that the model can take."""
    if not isinstance(images, Tensor):
        advice = "veca.preprocess makes one from files and PIL images"
        if isinstance(getattr(images, "pixels", None), Tensor):
            advice = "pass its .pixels"
        raise InputError(
            f"images must be a tensor [batch, {channels}, height, width], got "
            f"{type(images).__name__}; {advice}."
        )
    if images.ndim != 4:
        hint = " Add a batch axis with images[None]." if images.ndim == 3 else ""
        raise InputError(
            f"images must be [batch, {channels}, height, width], got shape "
            f"{tuple(images.shape)}.{hint}"
        )
    if images.shape[1] != channels:
        hint = (
            " It looks channels-last; use images.permute(0, 3, 1, 2)."
            if images.shape[3] == channels
            else ""
        )
        raise InputError(f"images must have {channels} channels, got {images.shape[1]}.{hint}")
    if not images.is_floating_point():
        raise InputError(
            f"images must be floating point and normalised, got {images.dtype}; use "
            "veca.preprocess, or scale to 0..1, subtract the mean and divide by the deviation."
        )
    if images.shape[0] == 0:
        raise InputError("the batch is empty; images must hold at least one image.")
    height, width = images.shape[2:]
    if height < patch_size or width < patch_size or height % patch_size or width % patch_size:
        raise InputError(
            f"image height and width must be multiples of the patch size {patch_size}, got "
            f"{height} x {width}; veca.preprocess fits any size to the grid."
        )
    return height // patch_size, width // patch_size


def check_finite(images: Tensor) -> None:
    """Refuse NaN and infinite pixels. Skipped where values are not known, as in tracing."""
    if is_compiling() or (images.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if images.is_meta or isinstance(images, FakeTensor) or transformed():
        return
    # The sum is NaN or infinite if any pixel is: one pass and no mask. It can overflow on its
    # own only with pixels far outside any normalisation, hence the second, exact look.
    if not torch.isfinite(images.sum(dtype=torch.float32)):
        bad = (~torch.isfinite(images)).flatten(1).any(dim=1).nonzero().flatten().tolist()
        if bad:
            raise InputError(
                f"images {bad} of the batch have NaN or infinite pixels; every pixel must be "
                "finite. Check how they were decoded and normalised."
            )
