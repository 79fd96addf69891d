"""int8 that keeps its accuracy: the arithmetic, by definition.

A weight is rounded per output channel, once. Activations are rounded per token while the network
runs, each token by its own largest number: one scale for all tokens would be set by the few that
are a hundred times larger, and leave the others no digits. Products are summed as whole numbers.

`equalised` moves what makes a channel of the activations large into the weights that read it,
which changes nothing in float and leaves less to round. The inference engine runs the same
arithmetic fast; `emulated` runs it in float, as the yardstick for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veca.checks import check_model
from veca.dense import DenseVit
from veca.errors import ConfigError, InputError
from veca.images import Source, preprocess
from veca.images.bundled import bundled_photos
from veca.model import Block, Veca, evaluating
from veca.outputs import VecaOutput

LARGEST = 127
"""Of a rounded number; -128 is left out, so that rounding is symmetric."""
_EXACT = 2**24
"""Whole numbers up to here are exact in float32."""
_SMALL = 1e-5
_LEAST = torch.finfo(torch.float32).tiny
CALIBRATION_SIZE = 224
"""Short side of the photos that equalisation looks at, in pixels."""


# ------------------------------------------------------------------------------------ arithmetic


def quantized_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as int8 [out, in] and one float32 scale an output channel, [out]."""
    quantised, scale = quantized_rows(weight.detach().float())
    return quantised, scale.squeeze(-1)


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations [..., in] as int8 and one scale a token, [..., 1]: largest number / 127.

    Rounds half to even. A token of zeros stays zeros.
    """
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(_LEAST * LARGEST) / LARGEST
    return (x / scale).round_().to(torch.int8), scale


def quantized_linear_reference(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """What a linear layer in int8 computes, by definition: [..., in] -> [..., out], float32.

    Args:
        x: float activations; each token is rounded by its own scale.
        weight, scale: as `quantized_weight` gives them.
    """
    rounded, row = quantized_rows(x.float())
    # Sums of whole numbers, exact in whatever order they are added.
    exact = torch.float32 if x.shape[-1] * LARGEST**2 < _EXACT else torch.float64
    product = F.linear(rounded.to(exact), weight.to(exact)).float()
    product = product * scale * row
    return product if bias is None else product + bias


class QuantizedLinear(nn.Module):
    """`quantized_linear_reference` in place of a linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight: Tensor
        self.scale: Tensor
        weight, scale = quantized_weight(linear.weight)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear_reference(x, self.weight, self.scale, self.bias).to(x.dtype)


# ------------------------------------------------------------------------------------ the recipe


@dataclass(frozen=True)
class Rounding:
    """Which layers are rounded, and how the weights are prepared."""

    leave: tuple[str, ...] = ("project",)
    """Names or patterns of linear layers that stay as they are, such as "blocks.0.*". Patches
    leave the network through the output projection, where an error has no layer to mend it."""
    alpha: float | None = 0.3
    """How much of a channel's size moves from activations to weights, 0..1; None: nothing."""

    def __post_init__(self) -> None:
        leave = self.leave
        if isinstance(leave, str) or not all(isinstance(name, str) for name in leave):
            raise ConfigError(f"leave of a rounding must be names of layers, got {leave!r}.")
        object.__setattr__(self, "leave", tuple(leave))
        if self.alpha is not None:
            _check_alpha(self.alpha)

    def layers(self, model: Veca | DenseVit) -> list[str]:
        """Names of the layers that are rounded; InputError where `leave` fits no layer."""
        names = list(linear_layers(model))
        for pattern in self.leave:
            if pattern != "project" and not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"no linear layer is called {pattern!r}; they are {names[0]}, {names[1]}, "
                    f"... {names[-1]}."
                )
        return [n for n in names if not any(fnmatchcase(n, pattern) for pattern in self.leave)]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "leave": list(self.leave)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Rounding:
        try:
            return cls(tuple(fields["leave"]), fields["alpha"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{fields!r} does not say how weights were rounded.") from error


def linear_layers(model: Veca | DenseVit) -> dict[str, nn.Linear]:
    """The linear layers that all tokens pass, by name, in their order.

    The patch embedding reads pixels once and the cores' steps are two numbers wide: neither is
    among them.
    """
    names = ("attn.q", "attn.k", "attn.v", "attn.out", "ffn.up", "ffn.down")
    found = {
        f"blocks.{number}.{name}": cast(nn.Linear, block.get_submodule(name))
        for number, block in enumerate(model.blocks)
        for name in names
    }
    if isinstance(model.project, nn.Linear):
        found["project"] = model.project
    return found


def emulated(model: Veca, rounding: Rounding | None = None) -> Veca:
    """A copy whose rounded layers compute `quantized_linear_reference`; slow, and the definition.

    Weights are taken as they are: `equalised` comes before.
    """
    rounding = rounding or Rounding()
    ours = copy.deepcopy(model).float().eval()
    for name in rounding.layers(ours):
        parent, _, last = name.rpartition(".")
        linear = linear_layers(ours)[name]
        setattr(ours.get_submodule(parent), last, QuantizedLinear(linear))
    return ours


# ---------------------------------------------------------------------------------- equalisation


@torch.no_grad()
def equalised(
    model: Veca,
    photos: Sequence[Source] | None = None,
    alpha: float = 0.3,
    *,
    size: int | None = None,
) -> Veca:
    """A float32 copy that computes the same and has activations which are easier to round.

    Channel j of what a layer reads is divided by max|x_j|^alpha / max|w_j|^(1 - alpha), and its
    weights take that over, so that nothing changes in float but rounding. Done where rounding
    per token loses most: for the way down in the feed-forwards, folded into the value half of the
    way up, and for the output projection, folded into the last norm. Measured: elsewhere it
    changes nothing, and a larger alpha helps the patches less than it hurts the cores.

    Args:
        photos: what activations are taken from; by default the bundled ones.
        size: short side of the photos in pixels, by default `CALIBRATION_SIZE`.
    """
    check_model(model, "equalised")
    _check_alpha(alpha)
    ours = copy.deepcopy(model).float().eval()
    largest = _largest_inputs(ours, photo_batches(ours, photos, size))
    layers = linear_layers(ours)
    for name, writers in _folds(ours):
        weight = layers[name].weight
        step = largest[name].clamp_min(_SMALL) ** alpha
        step = step / weight.abs().amax(dim=0).clamp_min(_SMALL) ** (1 - alpha)
        weight.mul_(step)
        for part in writers:
            part.div_(step.view(-1, *[1] * (part.ndim - 1)))
    return ours


def _folds(model: Veca) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Layers, and what writes the channels they read: tensors with these channels first."""
    for number, block in enumerate(cast(Iterable[Block], model.blocks)):
        up, hidden = block.ffn.up, block.ffn.down.in_features
        yield f"blocks.{number}.ffn.down", (up.weight[hidden:], up.bias[hidden:])
    if isinstance(model.project, nn.Linear):
        yield "project", (model.norm.weight, model.norm.bias)


def _largest_inputs(model: Veca, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """The largest number in each channel of what each linear layer reads."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor]) -> None:
            largest = inputs[0].detach().abs().flatten(0, -2).amax(dim=0)
            found[name] = largest if name not in found else torch.maximum(found[name], largest)

        return hook

    hooks = [layer.register_forward_pre_hook(note(n)) for n, layer in linear_layers(model).items()]
    try:
        with evaluating(model):
            for images in batches:
                model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def photo_batches(
    model: Veca, photos: Sequence[Source] | None = None, size: int | None = None
) -> Iterator[Tensor]:
    """Photos one by one as the model takes them, [1, 3, H, W]; by default the bundled ones."""
    sources = bundled_photos() if photos is None else list(photos)
    if not sources:
        raise InputError("there are no photos; give at least one.")
    for photo in sources:
        pixels = preprocess(photo, CALIBRATION_SIZE if size is None else size, model=model.config)
        yield pixels.pixels.to(model.device)


def _check_alpha(alpha: object) -> None:
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not number or not 0 <= cast(float, alpha) <= 1:
        raise InputError(f"alpha must be a number from 0 to 1, got {alpha!r}.")


# ------------------------------------------------------------------------------------- agreement


class Agreement(NamedTuple):
    """Mean cosines with what a model in float32 says."""

    cls: float
    patches: float

    def passes(self, gate: Agreement) -> bool:
        """Whether neither is below the gate."""
        return self.cls >= gate.cls and self.patches >= gate.patches


GATE = Agreement(cls=0.998, patches=0.996)
"""What weights in int8 must reach."""


def agreement(found: VecaOutput, wanted: VecaOutput) -> Agreement:
    """Of two outputs for the same images: of the global embeddings, and of the patches."""

    def mean(a: Tensor, b: Tensor) -> float:
        return float(F.cosine_similarity(a.double(), b.double(), dim=-1).mean())

    return Agreement(
        mean(found.cores[:, 0], wanted.cores[:, 0]), mean(found.patches, wanted.patches)
    )


@torch.inference_mode()
def mean_agreement(
    run: Callable[[Tensor], VecaOutput],
    reference: Callable[[Tensor], VecaOutput],
    batches: Iterable[Tensor],
) -> Agreement:
    """`agreement` of two models, the mean over batches."""
    found = [agreement(run(images), reference(images)) for images in batches]
    if not found:
        raise InputError("there are no photos to compare on; give at least one.")
    return Agreement(*(sum(values) / len(found) for values in zip(*found, strict=True)))
