"""The model on a CPU in the precision that the processor is fast in.

`at_precision` gives a model with the same weights whose blocks, patch embedding and output
projection compute in bfloat16 or in int8; all else of `Veca` is what it is, so that it takes any
budget, any share of tokens and any size. All of a block but its attention concerns one token at a
time. It is done for some rows from end to end, so that what is wide in between, the sums of whole
numbers and the hidden layer, stays in the cache. The residual stream, norms and what is written in
between are float32.
"""

from __future__ import annotations

import copy
import functools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veca import native
from veca.attention import PartialAttention, core_attention, partial_attention
from veca.attention.reference import core_bias
from veca.checks import check_model
from veca.config import VecaConfig
from veca.dense import DenseVit
from veca.errors import InputError, check_choice
from veca.model import Block, Veca
from veca.quantization import (
    GATE,
    Agreement,
    Rounding,
    equalised,
    mean_agreement,
    photo_batches,
    quantized_rows,
    quantized_weight,
)
from veca.rope import Rotation

PRECISIONS = ("fp32", "bf16", "fp16", "int8")
"""What a model computes in: one vocabulary for all commands."""
OLD_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""What 0.1 called them."""
PROTOCOL_NAMES = {"fp32": "float32", "fp16": "float16"}
"""What protocols of probes go on calling them."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NUMBERS = 2**19
"""In the widest layer of a part of the rows, about: with 4 bytes each they fit a cache."""
_PROJECTED = 256
"""Rows of a part of the embedding and of the output projection."""
_FUSED = 2**22
_ALLOCATION = 31 * 2**20
_ROOM = 16
"""Products in bfloat16 are made for a multiple of so many rows, those of attention for 1, 2, 4, ...
images: for each new shape oneDNN compiles code, which takes milliseconds, and half a megabyte that
it keeps."""


# ------------------------------------------------------------------------------------- processor


class Processor(NamedTuple):
    """What a CPU multiplies fast."""

    bf16: str
    """The instructions for bfloat16, or ""."""
    int8: str
    """The instructions for int8, or ""."""


@functools.cache
def processor() -> Processor:
    """What this machine's CPU multiplies fast, by the flags it shows."""
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.partition(":")[2].split())
                break
    except OSError:
        if platform.machine() == "arm64":  # macOS on Apple's own chips, all of which have it
            flags = {"asimddp"}
    return Processor(_first(flags, _BF16), _first(flags, _INT8))


_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "bf16": "NEON bf16"}
_INT8 = {
    "amx_int8": "AMX",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "i8mm": "NEON i8mm",
    "asimddp": "NEON dot product",
}


def _first(flags: set[str], names: dict[str, str]) -> str:
    return next((name for flag, name in names.items() if flag in flags), "")


def check_precision(precision: str, *more: str) -> str:
    """A precision by its name of today; InputError with the nearest for any other."""
    precision = OLD_NAMES.get(precision, precision)
    if precision == "auto" and precision not in more:
        raise InputError(
            "precision auto is for compile_for_inference, quickstart and demo; here name one: "
            f"{', '.join(PRECISIONS)}."
        )
    check_choice("precision", precision, (*PRECISIONS, *more))
    return precision


def protocol_name(precision: str) -> str:
    """What the protocols of probes call it."""
    return PROTOCOL_NAMES.get(precision, precision)


# ----------------------------------------------------------------------------------------- model

_Module = TypeVar("_Module", bound=nn.Module)
_Network = TypeVar("_Network", Veca, DenseVit)
GATES = {"bf16": Agreement(0.9995, 0.999), "int8": GATE}
"""The least agreement with float32 at which `fastest` takes a precision."""
_ROUNDS = 5


class Fastest(NamedTuple):
    """A model, and why it is this one."""

    model: Veca
    reason: str


def described(model: Veca) -> str:
    """What a CPU computes a model's precision with."""
    has = processor()
    if model.precision == "fp32":
        return "as the model is"
    wide = f"bfloat16 ({has.bf16})" if has.bf16 else "bfloat16 (no instructions: slow)"
    if model.precision == "bf16":
        return wide
    rest = wide if has.bf16 else "float32"
    blocks = (cast(FastBlock, block) for block in model.blocks)
    fast = any(isinstance(block.steps, NativeSteps) for block in blocks)
    found = native.compiled()
    steps = found.reason if fast or found.functions is None else "by torch"
    how = has.int8 or "no instructions: slow"
    return f"int8 ({how}), what is left in {rest}, steps in between {steps}"


def expected(device: torch.device | str = "cpu") -> tuple[str, str]:
    """What `choose` most likely takes for "auto" on a device, and why; nothing is measured."""
    if torch.device(device).type != "cpu":
        return "fp32", f"auto chooses among what CPUs compute in, and this is {device}"
    has = processor()
    fast = {name: getattr(has, name) for name in ("bf16", "int8") if getattr(has, name)}
    if not fast:
        return "fp32", "the processor shows no instructions for bf16 or int8"
    tried = " and ".join(f"{name} ({how})" for name, how in fast.items())
    return [*fast][-1], f"it has {tried}; auto measures, and takes what agrees with float32"


def choose(
    model: Veca,
    precision: str,
    size: int | tuple[int, int] | None = None,
    cores: int | None = None,
) -> Fastest:
    """A float32 model in a precision; "auto" is `fastest`, and fp32 on what is no CPU."""
    if check_precision(precision, "auto") != "auto":
        return Fastest(in_precision(model, precision), "asked for")
    if model.device.type != "cpu":
        return Fastest(model, expected(model.device)[1])
    return fastest(model, size, cores)


@torch.inference_mode()
def fastest(
    model: Veca, size: int | tuple[int, int] | None = None, cores: int | None = None
) -> Fastest:
    """The model in the precision that is fastest here, by a short measurement in turns.

    It is measured at a size in pixels, by default about 224.

    Those that the processor has instructions for are tried, and taken only where they agree with
    float32 on the bundled photos (`GATES`) and are faster. Else it is the model as it is.
    """
    if model.device.type != "cpu":
        raise InputError(f"fastest measures a CPU, and this model is on {model.device}.")
    if model.precision != "fp32":
        return Fastest(model, f"it computes in {model.precision} already")
    has, rejected = processor(), []
    candidates = {"fp32": model}
    for precision, flag in (("bf16", has.bf16), ("int8", has.int8)):
        if not flag:
            rejected.append(f"{precision}: the processor has no instructions for it")
            continue
        one = at_precision(model, precision)
        if model.config.in_channels == 3:
            found = mean_agreement(one, model, photo_batches(model, size=224))
            if not found.passes(GATES[precision]):
                rejected.append(
                    f"{precision}: agrees {found.cls:.4f} (CLS), {found.patches:.4f} (patches)"
                )
                continue
        candidates[precision] = one
    height, width = measured_at(model.config, size)
    images = torch.zeros(1, model.config.in_channels, height, width)
    taken = median_times([partial(one, images, cores=cores) for one in candidates.values()])
    medians = dict(zip(candidates, taken, strict=True))
    best = min(medians, key=lambda name: medians[name])
    ratios = [f"{n} {medians['fp32'] / t:.2f}x" for n, t in medians.items() if n != "fp32"]
    measured = f"beside float32 at {height} x {width} px: {', '.join(ratios)}" if ratios else ""
    reason = "; ".join([*([measured] if measured else []), *rejected])
    return Fastest(candidates[best], reason)


def measured_at(config: VecaConfig, size: int | tuple[int, int] | None) -> tuple[int, int]:
    """The size in pixels at which speeds are compared: as given, or about 224."""
    if size is None:
        size = max(1, round(224 / config.patch_size)) * config.patch_size
    return (size, size) if isinstance(size, int) else size


def median_times(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds that each call takes, the median over rounds in which they take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(_ROUNDS + 1):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if turn:  # the first is to warm up
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def at_precision(
    model: _Network,
    precision: str,
    *,
    rounding: Rounding | None = None,
    compile: bool | None = None,
) -> _Network:
    """The model, on a CPU, computing in a precision; it shares the weights, which stay float32.

    Its `precision` says which. The model itself for "fp32". For inference alone: no gradients.

    Args:
        model: a `Veca`; or the yardstick, a `DenseVit`, whose weights are rounded as they are.
        precision: "fp32", "bf16" or "int8".
        rounding: with "int8", which layers are rounded; by default that of the weights where they
            are quantised, or else `Rounding()`, equalised on the bundled photos.
        compile: whether int8 takes the steps between its products from `veca.native`, which a C++
            compiler makes in a second or two. By default where there is one.
    """
    if not isinstance(model, DenseVit):
        check_model(model, "at_precision")
    precision = check_precision(precision)
    if model.device.type != "cpu":
        raise InputError(
            f"{precision} of at_precision is for a CPU, and this model is on {model.device}; "
            "there it is model.to(torch.bfloat16)."
        )
    if precision == "fp16":
        raise InputError("processors are slow in fp16; choose bf16 or int8 on a CPU.")
    if precision == "fp32" or model.precision == precision:
        return model
    if model.precision != "fp32":
        raise InputError(f"the model computes in {model.precision} already; take the plain one.")
    has = processor()
    wide = torch.bfloat16 if has.bf16 or precision == "bf16" else torch.float32
    source: nn.Module = model
    rounded = set[str]()
    if precision == "int8":
        given = rounding or model.quantization
        rounded = set((given or Rounding()).layers(model))
        if given is None and isinstance(model, Veca):
            source = _equalised(model)
    calls = _native(precision, compile)
    _keep_pages()
    fast = _shallow(model)
    fast.precision = precision
    embedding = fast.patch_embed = _as(FastEmbedding, model.patch_embed)
    embedding.packed = cast(WideLinear, _packed([model.patch_embed], wide, False))
    fast.blocks = nn.ModuleList(_as(FastBlock, block) for block in model.blocks)
    block: Any
    for number, block in enumerate(fast.blocks):
        own = cast(Block, source.get_submodule(f"blocks.{number}"))
        block.packed = _packed_block(own, f"blocks.{number}", wide, rounded)
        block.steps = _steps(block.packed, block.attn.heads, block.norm_attn.eps, calls)
    if isinstance(model.project, nn.Linear):
        projection = fast.project = _as(FastProjection, model.project)
        projection.packed = _packed([model.project], wide, "project" in rounded)
    return fast.eval()


def in_precision(model: _Network, name: str) -> _Network:
    """A float32 model in a precision, on whatever device it is; a dtype is given to it itself.

    Args:
        model: a `Veca`, or a `DenseVit` beside it.
        name: one of today, or what 0.1 called it and folders of features may say. "bfloat16" is
            then the plain model in bfloat16, so that such folders are continued exactly; what
            "bf16" is on a CPU is faster and more exact.
    """
    precision = check_precision(name)
    if precision in DTYPES and (name == "bfloat16" or model.device.type != "cpu"):
        return model.to(DTYPES[precision])
    return model.half() if precision == "fp16" else at_precision(model, precision)


def recorded(model: Veca) -> str:
    """The name by which features say what computed them, and which `in_precision` takes."""
    if model.precision != "fp32":
        return model.precision
    return str(model.dtype).removeprefix("torch.")


def hint(model: Veca) -> str | None:
    """What a user of float32 would gain from another precision, in a line."""
    has = processor()
    faster = [f"--precision {name}" for name in ("bf16", "int8") if getattr(has, name)]
    if not faster or model.device.type != "cpu" or recorded(model) != "float32":
        return None
    later = ", after the seconds that int8 takes to prepare" if has.int8 else ""
    return (
        f"computing in fp32; {' or '.join(faster)} would be about 2 to 5 times faster on this "
        f"processor{later}, and features differ a little."
    )


def _native(precision: str, compile: bool | None) -> native.Functions | None:
    """The compiled steps for int8, if they are wanted and can be had."""
    if precision != "int8" or compile is False:
        return None
    found = native.compiled()
    if compile and found.functions is None:
        raise InputError(f"int8 runs {found.reason}; leave compile=True out.")
    return found.functions


def _steps(
    layer: PackedBlock, heads: int, eps: float, calls: native.Functions | None
) -> TorchSteps | NativeSteps:
    parts = (layer.qkv, layer.out, layer.up, layer.down)
    if calls is None or not all(isinstance(part, RoundedLinear) for part in parts):
        return TorchSteps(layer, heads, eps)
    return NativeSteps(calls, layer, heads, eps)


def _equalised(model: Veca) -> Veca:
    """Equalised on the bundled photos; other than three channels they do not fit."""
    return equalised(model) if model.config.in_channels == 3 else model


def _shallow(module: _Module) -> _Module:
    """A copy that shares all weights, and may be given other parts."""
    found = copy.copy(module)
    found._modules = dict(module._modules)
    return found


def _as(kind: type[nn.Module], module: nn.Module) -> Any:
    found = _shallow(module)
    found.__class__ = kind
    return found


@functools.cache
def _keep_pages() -> None:
    """Have the C library keep what is freed, so that no pass takes fresh pages for each layer.

    glibc does so for sizes up to that of the largest block that was ever given back.
    """
    torch.empty(_ALLOCATION, dtype=torch.uint8)


class FastEmbedding(nn.Conv2d):
    """The patch embedding as a product over patches."""

    packed: WideLinear

    def forward(self, images: Tensor) -> Tensor:
        (high, wide), dtype = self.kernel_size, self.packed.weight.dtype
        batch, channels, height, width = images.shape
        grid = height // high, width // wide
        patches = images.to(dtype).view(batch, channels, grid[0], high, grid[1], wide)
        rows = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch * grid[0] * grid[1], -1)
        found = _product_in_parts(rows, self.packed)
        return found.unflatten(0, (batch, -1)).transpose(1, 2).unflatten(2, grid)


class FastProjection(nn.Linear):
    """The output projection, rows by rows."""

    packed: PackedLinear

    def forward(self, x: Tensor) -> Tensor:
        return _product_in_parts(x.flatten(0, -2), self.packed).view(*x.shape[:-1], -1)


class FastBlock(Block):
    """A block in low precision."""

    packed: PackedBlock
    steps: TorchSteps | NativeSteps

    @torch.no_grad()
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
        """As in `Block`; the attention backend is this module's own."""
        batch, count, width = x.shape
        patches = patch_rotation or (None, None)
        tables = (_table(a, b, batch) for a, b in zip(core_rotation, patches, strict=True))
        flat = x.reshape(-1, width).contiguous()
        q, k, v = self._asked(flat, batch, *tables)
        if rows is not None:
            q, flat = q[:, :, :rows], x[:, :rows].reshape(-1, width).contiguous()
        mixed = _mixed(q, k, v, num_cores, count, multiplicity, self.steps.softmax)
        return self.steps.write(flat, mixed).view(batch, -1, width)

    @torch.no_grad()
    def read(self, patches: Tensor, keys: Tensor, values: Tensor, rotation: Rotation) -> Tensor:
        """As in `Block`."""
        return self._seen(patches, self._looked(patches, rotation)[0], keys, values)

    @torch.no_grad()
    def through(
        self,
        patches: Tensor,
        rotation: Rotation,
        keys: Tensor,
        values: Tensor,
        queries: Tensor,
        beside: tuple[Rotation, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, PartialAttention]:
        """As `veca.large.layers.through`: patches [B, n, D] after the block, which see the cores'
        `keys` and `values`; and what the cores, with their `queries`, take from them."""
        q, k, v = self._looked(patches, rotation)
        part = partial_attention(_in_halves(queries), k, v)
        if beside is None:
            return self._seen(patches, q, keys, values), part
        there, others, theirs = beside
        both = [_scores(q, keys), _scores(self._looked(patches, there)[0], others)]
        scores = torch.cat(both, dim=-1)
        weights = self.steps.softmax(scores, scores.shape[-1])
        seen = torch.cat([x.expand(len(q), -1, -1, -1) for x in (values, theirs)], dim=2)
        return self._joined(patches, weights @ seen.to(q.dtype)), part

    def _looked(self, patches: Tensor, rotation: Rotation) -> list[Tensor]:
        """Queries, keys and values [B, H, n, d] of patches [B, n, D] alone."""
        batch, count, width = patches.shape
        tables = (_table(table, None, batch) for table in rotation)
        found = self._asked(patches.reshape(-1, width).contiguous(), batch, *tables)
        return [part[:, :, :count] for part in found]

    def _seen(self, patches: Tensor, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Patches after the block, with queries [B, H, n, d] for the cores' keys and values."""
        scores = _scores(q, keys)
        mixed = self.steps.softmax(scores, scores.shape[-1]) @ values.to(q.dtype)
        return self._joined(patches, mixed)

    def _joined(self, patches: Tensor, mixed: Tensor) -> Tensor:
        """Patches after the block, given what their heads found [B, H, n, d]."""
        flat = patches.reshape(-1, patches.shape[-1]).contiguous()
        return self.steps.write(flat, (mixed,)).view(patches.shape)

    def _asked(
        self, flat: Tensor, batch: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H, n, d] of rows [R, D], turned, in halves.

        In bfloat16 n is rounded up, with rows of zeros: see `_ROOM`.
        """
        heads, width, tokens = self.attn.heads, flat.shape[1], len(flat) // batch
        dtype = _attention_dtype(self.packed)
        room = tokens if dtype == torch.float32 else -(-tokens // _ROOM) * _ROOM
        qkv = torch.empty(3, batch, heads, room, width // heads, dtype=dtype)
        qkv[:, :, :, tokens:] = 0
        self.steps.read(flat, cos, sin, tokens, qkv)
        q, k, v = qkv.unbind()
        return q, k, v


# ------------------------------------------------------------------------------------ arithmetic


class RoundedLinear(NamedTuple):
    """A linear layer in int8."""

    weight: Tensor
    """int8 [in, out]: a transposed view of [out, in]."""
    scale: Tensor
    bias: Tensor


class WideLinear(NamedTuple):
    """A linear layer in float32 or bfloat16."""

    weight: Tensor
    bias: Tensor


PackedLinear: TypeAlias = "RoundedLinear | WideLinear"


class PackedBlock(NamedTuple):
    """A block's weights, with q, k and v as one layer."""

    norm_attn: tuple[Tensor, Tensor]
    qkv: PackedLinear
    out: PackedLinear
    norm_ffn: tuple[Tensor, Tensor]
    up: PackedLinear
    down: PackedLinear


def _packed(layers: list[Any], wide: torch.dtype, rounded: bool, heads: int = 0) -> PackedLinear:
    """Layers that read the same as one; with `heads`, q, k and v."""
    weight = torch.cat([layer.weight.detach().flatten(1) for layer in layers]).float()
    bias = torch.cat([layer.bias.detach() for layer in layers]).float()
    if heads:
        weight, bias = _for_attention(weight, heads), _for_attention(bias, heads)
    if rounded:
        whole, scale = quantized_weight(weight)
        return RoundedLinear(whole.t(), scale, bias)
    return WideLinear(weight.to(wide, copy=True), bias.to(wide, copy=True))


def _packed_block(block: Block, name: str, wide: torch.dtype, rounded: set[str]) -> PackedBlock:
    def one(*parts: str) -> PackedLinear:
        layers = [block.get_submodule(part) for part in parts]
        heads = block.attn.heads if len(parts) > 1 else 0
        every = rounded.issuperset(f"{name}.{part}" for part in parts)
        return _packed(layers, wide, every, heads)

    def norm(module: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        return module.weight.detach().float().clone(), module.bias.detach().float().clone()

    return PackedBlock(
        norm_attn=norm(block.norm_attn),
        qkv=one("attn.q", "attn.k", "attn.v"),
        out=one("attn.out"),
        norm_ffn=norm(block.norm_ffn),
        up=one("ffn.up"),
        down=one("ffn.down"),
    )


def _for_attention(rows: Tensor, heads: int) -> Tensor:
    """Rows of q, k and v [3 * D, ...] as attention is fast with; what it finds stays what it is.

    Of q and k first the even channels of a head, then the odd ones: halves are faster to turn than
    neighbours. Queries are times the scale of the scores.
    """
    q, k, v = rows.unflatten(0, (3, heads, -1))
    q = q * q.shape[1] ** -0.5
    q, k = (torch.cat([x[:, 0::2], x[:, 1::2]], dim=1) for x in (q, k))
    return torch.stack([q, k, v]).flatten(0, 2)


def _parts(rows: int, layer: PackedBlock) -> list[tuple[int, int]]:
    """Where parts of rows begin and end, whose widest layer is about `NUMBERS` numbers.

    All are of nearly one length, as a short last one costs as much; but for that one they are
    multiples of `_ROOM`.
    """
    count = max(1, round(rows * len(layer.up.bias) / NUMBERS))
    step = -(-rows // (count * _ROOM)) * _ROOM
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _table(cores: Tensor, patches: Tensor | None, batch: int) -> Tensor:
    """A rotary table with a row for each token of each image, [B * T, d / 2]."""
    both = [table.expand(batch, -1, -1) for table in (cores, patches) if table is not None]
    return torch.cat(both, dim=1).flatten(0, 1)


def _in_halves(x: Tensor) -> Tensor:
    """Channels of heads in the order that `_for_attention` gives them."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """Of queries in halves, which are times the scale, for cores' plain keys."""
    return q @ _in_halves(keys).to(q.dtype).transpose(-1, -2)


def _attention_dtype(layer: PackedBlock) -> torch.dtype:
    wide = processor().bf16 or any(part[0].dtype == torch.bfloat16 for part in layer[1:3])
    return torch.bfloat16 if wide else torch.float32


def _mixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    budget: int,
    tokens: int,
    multiplicity: Tensor | None,
    softmax: Callable[[Tensor, int], Tensor],
) -> tuple[Tensor, ...]:
    """What attention finds for [B, H, n, d]: for cores, and for patches if there are any.

    Both as [B, H, m, d]; `q` is times the scale. Of k and v the first `tokens` count; what is found
    for further rows of q means nothing.
    """
    if q.dtype == torch.float32:
        found = core_attention(q * q.shape[-1] ** 0.5, k, v, budget, multiplicity=multiplicity)
        parts = found.split([min(budget, found.shape[2]), max(0, found.shape[2] - budget)], dim=2)
        return tuple(part.contiguous() for part in parts if part.shape[2])
    bias = None
    if multiplicity is not None:
        bias = core_bias(multiplicity, budget).to(q.dtype).expand(len(q), -1, -1, -1)
    groups = [
        _mixed_of(
            q[some], k[some], v[some], budget, tokens, None if bias is None else bias[some], softmax
        )
        for some in _in_powers(len(q))
    ]
    return groups[0] if len(groups) == 1 else tuple(map(torch.cat, zip(*groups, strict=True)))


def _mixed_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    budget: int,
    tokens: int,
    bias: Tensor | None,
    softmax: Callable[[Tensor, int], Tensor],
) -> tuple[Tensor, ...]:
    cores = _attend(q[:, :, :budget], k, v, tokens, bias, softmax)
    if q.shape[2] <= budget:
        return (cores,)
    k, v = k[:, :, :budget], v[:, :, :budget]
    return cores, _attend(q[:, :, budget:], k, v, budget, None, softmax)


def _in_powers(count: int) -> list[slice]:
    """Images in groups whose lengths are powers of two."""
    found, first = [], 0
    while first < count:
        length = 1 << ((count - first).bit_length() - 1)
        found.append(slice(first, first + length))
        first += length
    return found


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    count: int,
    bias: Tensor | None,
    softmax: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Plain attention to the first `count` keys; on a CPU torch's fused kernel is slower than this
    in bfloat16.

    It is not where there are so many scores that they would leave the cache: full attention.
    """
    if bias is None and q.shape[-2] * k.shape[-2] > _FUSED:
        k, v = k[:, :, :count], v[:, :, :count]
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)
    scores = q @ k.transpose(-1, -2)
    if bias is not None:
        scores[..., :count] += bias
    return softmax(scores, count) @ v


def _product(x: Tensor, layer: PackedLinear) -> Tensor:
    """A linear layer on float32 rows [R, in]; float32 comes out."""
    if isinstance(layer, WideLinear):
        x, rows = x.to(layer.weight.dtype), len(x)
        if x.dtype == torch.bfloat16 and rows % _ROOM:
            x = F.pad(x, (0, 0, 0, -rows % _ROOM))
        return F.linear(x, layer.weight, layer.bias)[:rows].float()
    rounded, row = quantized_rows(x)
    # As in `quantized_linear_reference`, equal to rounding.
    product = torch._int_mm(rounded, layer.weight).float().mul_(layer.scale)
    return torch.addcmul(layer.bias, product, row)


def _product_in_parts(x: Tensor, layer: PackedLinear) -> Tensor:
    """The same, some rows at a time."""
    found = torch.empty(len(x), len(layer.bias))
    for first in range(0, len(x), _PROJECTED):
        part = slice(first, first + _PROJECTED)
        found[part] = _product(x[part], layer)
    return found


class TorchSteps:
    """A block's rows before and after attention, in torch."""

    def __init__(self, layer: PackedBlock, heads: int, eps: float) -> None:
        self.layer, self.heads, self.eps = layer, heads, eps

    def read(self, x: Tensor, cos: Tensor, sin: Tensor, tokens: int, out: Tensor) -> None:
        """Rows' queries and keys, turned, and their values, into `out` [3, B, H, n, d]."""
        layer = self.layer
        half = cos.shape[-1]
        one = out.shape[1] == 1  # whose rows are never in two images
        rows = (
            out[:, 0, :, :tokens].permute(2, 0, 1, 3)
            if one
            else out.new_empty(len(x), 3, self.heads, 2 * half)
        )
        for first, last in _parts(len(x), layer):
            part = F.layer_norm(x[first:last], x.shape[-1:], *layer.norm_attn, self.eps)
            found = _product(part, layer.qkv).view(last - first, 3, self.heads, 2 * half)
            c, s = (table[first:last, None, None] for table in (cos, sin))
            even, odd = found[:, :2].chunk(2, dim=-1)
            to = rows[first:last]
            to[:, :2, :, :half] = even * c - odd * s
            to[:, :2, :, half:] = even * s + odd * c
            to[:, 2] = found[:, 2]
        if not one:
            out[:, :, :, :tokens] = rows.unflatten(0, (-1, tokens)).permute(2, 0, 3, 1, 4)

    def softmax(self, scores: Tensor, count: int) -> Tensor:
        """Over the first `count` of each row; the weights of the rest are zero."""
        scores[..., count:] = -torch.inf
        return scores.softmax(dim=-1)

    def write(self, x: Tensor, mixed: tuple[Tensor, ...]) -> Tensor:
        """Rows of the residual stream after the block, given what attention found."""
        layer = self.layer
        seen = torch.cat([part.transpose(1, 2) for part in mixed], dim=1)
        seen = seen[:, : len(x) // len(seen)].reshape(x.shape)
        out = torch.empty_like(x)
        for first, last in _parts(len(x), layer):
            after = x[first:last] + _product(seen[first:last].float(), layer.out)
            hidden = F.layer_norm(after, x.shape[-1:], *layer.norm_ffn, self.eps)
            gate, value = _product(hidden, layer.up).chunk(2, dim=-1)
            found = _product(F.silu(gate).mul_(value), layer.down)
            torch.add(after, found, out=out[first:last])
        return out


class NativeSteps:
    """The same by `veca.native`, for a block in which all layers are rounded."""

    def __init__(self, call: native.Functions, layer: PackedBlock, heads: int, eps: float) -> None:
        self.call, self.layer, self.heads, self.eps = call, layer, heads, eps
        self.qkv, self.out, self.up, self.down = (
            cast(RoundedLinear, part) for part in (layer.qkv, layer.out, layer.up, layer.down)
        )

    def read(self, x: Tensor, cos: Tensor, sin: Tensor, tokens: int, out: Tensor) -> None:
        call, width, eps = self.call, x.shape[1], self.eps
        turn = "turn_bf16" if out.dtype == torch.bfloat16 else "turn_float"
        images, room = out.shape[1], out.shape[3]
        for first, last in _parts(len(x), self.layer):
            rows = last - first
            whole, scale = _whole(rows, width)
            call("norm", x[first:], *self.layer.norm_attn, eps, rows, width, whole, scale)
            sums = torch._int_mm(whole, self.qkv.weight)
            given = (sums, self.qkv.scale, self.qkv.bias, scale, cos[first:], sin[first:])
            where = (first, images, tokens, room)
            call(turn, *given, rows, self.heads, cos.shape[1], *where, out)

    def softmax(self, scores: Tensor, count: int) -> Tensor:
        if scores.dtype != torch.bfloat16:  # without rows of zeros
            return scores.softmax(dim=-1)
        scores = scores.contiguous()
        room = scores.shape[-1]
        self.call("softmax_bf16", scores, scores.numel() // room, count, room)
        return scores

    def write(self, x: Tensor, mixed: tuple[Tensor, ...]) -> Tensor:
        call, width = self.call, x.shape[1]
        norm = (*self.layer.norm_ffn, self.eps)
        seen, scales = self._gathered(x, mixed)
        after = torch.empty_like(x)
        for first, last in _parts(len(x), self.layer):
            rows, to = last - first, after[first:]
            sums = torch._int_mm(seen[first:last], self.out.weight)
            whole, scale = _whole(rows, width)
            given = (sums, self.out.scale, self.out.bias, scales[first:], x[first:])
            call("add_norm", *given, *norm, rows, width, to, whole, scale)
            sums = torch._int_mm(whole, self.up.weight)
            hidden, step = _whole(rows, sums.shape[1] // 2)
            both = (sums, self.up.scale, self.up.bias, scale)
            call("gate", *both, rows, hidden.shape[1], hidden, step)
            sums = torch._int_mm(hidden, self.down.weight)
            call("add", sums, self.down.scale, self.down.bias, step, rows, width, to)
        return after

    def _gathered(self, x: Tensor, mixed: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """What attention found as int8 rows of all heads."""
        seen, scales = _whole(*x.shape)
        name = "gather_bf16" if mixed[0].dtype == torch.bfloat16 else "gather_float"
        mixed = tuple(part.contiguous() for part in mixed)
        batch, heads, _, width = mixed[0].shape
        to = 0
        for image in range(batch):
            for part in mixed:
                room = part.shape[2]
                count = min(room, (image + 1) * len(x) // batch - to)
                self.call(name, part, count, heads, width, image, room, seen[to:], scales[to:])
                to += count
        return seen, scales


def _whole(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Room for rows in int8, and their scales."""
    return torch.empty(rows, width, dtype=torch.int8), torch.empty(rows)
