"""What a teacher is: a frozen network that gives global and dense features on a student's grid.

A subclass says how to run its network on normalised pixels (`_extract`). Everything around that
is here: which size to show the image at, resizing, normalising, precision, freezing, pooling
onto a coarser grid, checking what comes out.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veca.errors import TeacherError as TeacherError

Grid = tuple[int, int]
Triple = tuple[float, float, float]

UNKNOWN_LICENCE = "unknown"

_STUDENT_PATCH = 16
"""Pixels of a student's patch, to turn grids into image sizes in messages."""
# Pixels are 0..1. Augmentation may overshoot a little; normalised pixels reach about -2 and 2.5.
_PIXEL_RANGE = (-0.5, 1.5)
_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that use CUDA graphs."""


class TeacherFeatures(NamedTuple):
    """What a teacher says about a batch of images, float32."""

    cls: Tensor
    """[B, D] the global feature; D is `teacher.width`."""
    patches: Tensor
    """[B, h * w, D'] dense features, row by row; D' is `teacher.dense_width`, mostly equal to D."""
    grid: Grid
    """(h, w): cells down and across."""

    def feature_map(self) -> Tensor:
        """[B, D', h, w] the dense features as an image."""
        return self.patches.transpose(1, 2).unflatten(2, self.grid)


class Teacher(nn.Module):
    """Base of every teacher. Frozen: no gradients, always in eval mode.

    >>> teacher = load_teacher("dinov3-vitb16", device="cuda", dtype=torch.bfloat16)
    >>> out = teacher.features(pixels, grid=(16, 16))    # pixels [B, 3, H, W], 0..1
    >>> out.cls, out.patches, out.grid
    """

    name: str
    source: str
    """Where it came from, in words that `load_teacher` understands where possible."""
    licence: str
    """Of the weights, as their publisher states it."""
    width: int
    """Width of the global feature, D."""
    dense_width: int
    """Width of the dense features, D'."""
    stride: int
    """Pixels per cell of its own grid."""
    image_mean: Triple
    """Its own normalisation: (pixels - mean) / std, on pixels in 0..1."""
    image_std: Triple
    sizes: tuple[Grid, ...] | None
    """The pixel sizes (H, W) it can run at; None for every multiple of `stride`."""
    memory_format: torch.memory_format = torch.contiguous_format
    _mean: Tensor
    _std: Tensor

    def __init__(
        self,
        *,
        name: str,
        width: int,
        stride: int,
        licence: str = UNKNOWN_LICENCE,
        image_mean: Sequence[float] = (0.0, 0.0, 0.0),
        image_std: Sequence[float] = (1.0, 1.0, 1.0),
        dense_width: int | None = None,
        sizes: Iterable[Grid] | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.source = name if source is None else source
        self.licence = licence or UNKNOWN_LICENCE
        self.width = _positive("width", width)
        self.dense_width = self.width if dense_width is None else _positive("width", dense_width)
        self.stride = _positive("stride", stride)
        self.image_mean = _triple("image_mean", image_mean)
        self.image_std = _triple("image_std", image_std)
        if min(self.image_std) <= 0:
            raise TeacherError(f"image_std must be positive, got {self.image_std}.")
        self.sizes = None if sizes is None else _check_sizes(sizes, self.stride)
        self.training = False
        self._autocast: torch.dtype | None = None
        self._seen = False
        self._compiled: list[nn.Module] = []
        self._graphs = False
        for name_, values in (("_mean", self.image_mean), ("_std", self.image_std)):
            tensor = torch.tensor(values, dtype=torch.float32).view(1, 3, 1, 1)
            self.register_buffer(name_, tensor, persistent=False)

    # ------------------------------------------------------------------- what a subclass defines

    @abstractmethod
    def _extract(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images [B, 3, H, W] at a size it takes -> cls [B, D], patches [B, N, D']."""

    def classify(self, cls: Tensor) -> Tensor | None:
        """The teacher's own classifier on global features [B, D] -> logits, or None without one.

        Gradients flow through it to `cls`, so that a student can be judged by it too.
        """
        return None

    def patch_embedding(
        self, image_mean: Sequence[float] | None = None, image_std: Sequence[float] | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Weight [D, 3, p, p] and bias [D] of its patch convolution, float32, or None without one.

        With `image_mean` and `image_std` (a student's) they are changed so that they give the
        same tokens on pixels normalised that way.
        """
        found = self._patch_convolution()
        if found is None:
            return None
        weight, bias = (tensor.detach().float().cpu().clone() for tensor in found)
        if image_mean is None and image_std is None:
            return weight, bias
        mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (self.image_mean, self.image_std))
        new_mean = mean if image_mean is None else torch.tensor(image_mean).view(1, 3, 1, 1)
        new_std = std if image_std is None else torch.tensor(image_std).view(1, 3, 1, 1)
        # Ours = (theirs * new_std + new_mean - mean) / std, and the convolution is linear in it.
        bias = bias + (weight * ((new_mean - mean) / std)).sum(dim=(1, 2, 3))
        return weight * (new_std / std), bias

    def _patch_convolution(self) -> tuple[Tensor, Tensor] | None:
        return None

    def _compilable(self) -> list[nn.Module]:
        """The modules that `compile` compiles, each on its own."""
        return []

    def _weights_sha256(self) -> str | None:
        """A hash that names the weights, if there is a cheap one."""
        return None

    # ------------------------------------------------------------------------- grids and sizes

    def input_size(self, grid: Grid) -> Grid:
        """The pixel size (H, W) at which its own grid falls on `grid` (a student's).

        Raises:
            TeacherError: there is none; the message lists the grids that have one.
        """
        return self._fit(grid)[0]

    def grid_for(self, size: int | Grid) -> Grid:
        """Its own grid for images of about `size` pixels: 37 x 37 for patch 14 and 512 pixels.

        `input_size` of it is the size nearest to the one asked for (here 518) that it takes.
        """
        height, width = (size, size) if isinstance(size, int) else size
        height, width = _positive("size", height), _positive("size", width)
        if self.sizes is not None:
            best = min(self.sizes, key=lambda s: abs(s[0] - height) + abs(s[1] - width))
            return best[0] // self.stride, best[1] // self.stride
        # Half a cell counts up, and there is one cell at least.
        return tuple(max(1, (2 * x + self.stride) // (2 * self.stride)) for x in (height, width))  # type: ignore[return-value]

    def _fit(self, grid: Grid) -> tuple[Grid, int]:
        """The input size for `grid`, and how many of its own cells make one of the grid's."""
        grid = check_grid(grid)
        if self.sizes is None:
            return (grid[0] * self.stride, grid[1] * self.stride), 1
        fits = []
        for size in self.sizes:
            own = (size[0] // self.stride, size[1] // self.stride)
            factor = own[0] // grid[0]
            if factor and own == (grid[0] * factor, grid[1] * factor):
                fits.append((factor, size))
        if fits:
            factor, size = min(fits)
            return size, factor
        raise TeacherError(self._no_fit(grid))

    def _no_fit(self, grid: Grid) -> str:
        sizes = self.sizes or ()
        grids = set()
        for height, width in sizes:
            own = (height // self.stride, width // self.stride)
            for factor in range(1, min(own) + 1):
                if own[0] % factor == 0 and own[1] % factor == 0:
                    grids.add((own[0] // factor, own[1] // factor))
        shown = sorted(grids, reverse=True)[:8]
        p = _STUDENT_PATCH
        return (
            f"teacher {self.name} runs at {_list(sizes)} pixels only (stride {self.stride}), which "
            f"does not fall on a grid of {grid[0]} x {grid[1]}; grids that work: {_list(shown)}, "
            f"so with patches of {p} pixels a student needs images of "
            f"{_list((h * p, w * p) for h, w in shown)} pixels."
        )

    # -------------------------------------------------------------------------------- features

    def features(self, pixels: Tensor, grid: Grid) -> TeacherFeatures:
        """Global and dense features of `pixels` [B, 3, H, W] on `grid` (h, w).

        Args:
            pixels: float in 0..1, not normalised, of any size: they are resized (bicubic,
                antialiased) to `input_size(grid)` where they differ. uint8 0..255 is taken too.
            grid: the student's patch grid; the whole image lies on it, whatever its proportions.
        """
        size, factor = self._fit(grid)
        self._check_pixels(pixels)
        with torch.no_grad(), self._precision():
            images = self._prepare(pixels, size)
            cls, patches = self._run(images)
            own = (size[0] // self.stride, size[1] // self.stride)
            self._check_output(cls, patches, own, len(pixels))
            cls, patches = cls.float(), patches.float()
            if factor > 1:
                square = patches.transpose(1, 2).unflatten(2, own)
                patches = F.avg_pool2d(square, factor).flatten(2).transpose(1, 2)
            return TeacherFeatures(cls, patches, (own[0] // factor, own[1] // factor))

    def forward(self, pixels: Tensor, grid: Grid) -> TeacherFeatures:
        """The same as `features`."""
        return self.features(pixels, grid)

    def _prepare(self, pixels: Tensor, size: Grid) -> Tensor:
        """Pixels as the network wants them: its size, its normalisation, its dtype."""
        pixels = pixels.to(self.device, non_blocking=True)
        pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()
        if pixels.shape[-2:] != size:
            pixels = F.interpolate(
                pixels, size, mode="bicubic", align_corners=False, antialias=True
            ).clamp(0, 1)
        return self._normalise(pixels)

    def _normalise(self, pixels: Tensor) -> Tensor:
        """What `_extract` is given, from float32 pixels of the right size."""
        return ((pixels - self._mean) / self._std).to(
            self.weight_dtype, memory_format=self.memory_format
        )

    def _run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if not self._compiled:
            return self._extract(images)
        try:
            if not self._graphs:
                return self._extract(images)
            # CUDA graphs write their next results over their last; these are handed out.
            torch.compiler.cudagraph_mark_step_begin()
            cls, patches = self._extract(images)
            return cls.clone(), patches.clone()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.uncompile()
            result = self._extract(images)  # if this fails too, compiling was not to blame
            reason = " ".join(str(error).split())[:300]
            warnings.warn(
                f"teacher {self.name} could not be compiled ({type(error).__name__}: {reason}); "
                "it runs uncompiled from here on, which is slower and otherwise the same.",
                RuntimeWarning,
                stacklevel=4,
            )
            return result

    def _check_pixels(self, pixels: Tensor) -> None:
        if not isinstance(pixels, Tensor):
            raise TeacherError(
                f"pixels must be a tensor [batch, 3, height, width], got {type(pixels).__name__}."
            )
        if pixels.ndim != 4 or pixels.shape[1] != 3 or 0 in pixels.shape:
            raise TeacherError(
                f"pixels must be [batch, 3, height, width], none of them 0; got shape "
                f"{tuple(pixels.shape)}."
            )
        if not pixels.is_floating_point() and pixels.dtype != torch.uint8:
            raise TeacherError(f"pixels must be float in 0..1 or uint8, got {pixels.dtype}.")
        # Once only: reading values back makes a GPU wait.
        if not self._seen and pixels.is_floating_point():
            low, high = (float(x) for x in pixels.detach().float().aminmax())
            if not _PIXEL_RANGE[0] <= low <= high <= _PIXEL_RANGE[1]:
                raise TeacherError(
                    f"pixels must be in 0..1 and not normalised (the teacher does that), got "
                    f"values from {low:.3g} to {high:.3g}."
                )
            self._seen = True

    def _check_output(self, cls: Tensor, patches: Tensor, own: Grid, batch: int) -> None:
        wanted = (batch, self.width), (batch, own[0] * own[1], self.dense_width)
        found = tuple(cls.shape), tuple(patches.shape)
        if found != wanted:
            raise TeacherError(
                f"teacher {self.name} gave a global feature of shape {found[0]} and dense features "
                f"of shape {found[1]} where {wanted[0]} and {wanted[1]} (a grid of {own[0]} x "
                f"{own[1]}) were expected; its width, stride or token layout is not what it says."
            )

    # --------------------------------------------------------------------- device and precision

    @property
    def device(self) -> torch.device:
        return self._mean.device

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of its weights and of the images that enter the network."""
        for module in self.modules():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                for parameter in module.parameters(recurse=False):
                    if parameter.is_floating_point():
                        return parameter.dtype
        return torch.float32

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in: that of autocast if that is on, else of its weights."""
        return self._autocast or self.weight_dtype

    def to(self, *args: Any, **kwargs: Any) -> Teacher:
        """Move it, or change the dtype of its weights.

        Buffers (rotation frequencies, normalisation, a classifier) and batch norms stay float32:
        rounding those costs accuracy and saves nothing.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and not dtype.is_floating_point:
            raise TeacherError(f"a teacher's dtype must be a floating-point one, got {dtype}.")
        if device is not None:
            super().to(device=device, non_blocking=non_blocking)
        if dtype is not None:
            for module in self.modules():
                if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                    for parameter in module.parameters(recurse=False):
                        if parameter.is_floating_point():
                            parameter.data = parameter.data.to(dtype)
        return self

    def float(self) -> Teacher:
        return self.to(torch.float32)

    def half(self) -> Teacher:
        return self.to(torch.float16)

    def bfloat16(self) -> Teacher:
        return self.to(torch.bfloat16)

    def double(self) -> Teacher:
        return self.to(torch.float64)

    def autocast(self, dtype: torch.dtype | None) -> Teacher:
        """Keep the weights and compute under autocast in `dtype`; None turns it off.

        More exact than `to(dtype)` (norms and residuals stay float32), a little slower.
        """
        self._autocast = dtype
        return self

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        # A caller's autocast must not reach the teacher: its features would then depend on who
        # asks. Its own, if any, is entered instead.
        with torch.autocast(
            self.device.type, dtype=self._autocast, enabled=self._autocast is not None
        ):
            yield

    # ------------------------------------------------------------------------ frozen, compiled

    def freeze(self) -> Teacher:
        """Take gradients off and put everything in eval mode; every constructor ends with this."""
        self.requires_grad_(False)
        for module in self.modules():
            module.training = False
        return self

    def train(self, mode: bool = True) -> Teacher:
        """Nothing: a teacher is always in eval mode, even inside a module that trains."""
        return self

    def compile(self, **options: Any) -> None:
        """Compile its blocks with torch.compile (`options` are its; static shapes by default).

        Compilation happens at the first images of each size and batch (torch keeps 8 variants).
        If it fails, a warning says why and the teacher runs on uncompiled.
        """
        options = {"dynamic": False, **options}
        self.uncompile()
        self._graphs = options.get("mode") in _GRAPH_MODES
        for module in self._compilable():
            module.compile(**options)
            self._compiled.append(module)

    def uncompile(self) -> None:
        """Undo `compile`."""
        for module in self._compiled:
            module._compiled_call_impl = None
        self._compiled = []

    # ---------------------------------------------------------------------------- description

    def describe(self) -> dict[str, Any]:
        """What a student's provenance should say about it, as plain JSON values."""
        return {
            "name": self.name,
            "source": self.source,
            "licence": self.licence,
            "width": self.width,
            "dense_width": self.dense_width,
            "stride": self.stride,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "dtype": str(self.dtype).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in self.parameters()),
            "weights_sha256": self._weights_sha256(),
        }

    def extra_repr(self) -> str:
        # Without the name, so that the same teacher found elsewhere reads the same.
        return f"width={self.width}, stride={self.stride}"


def weight_and_bias(convolution: nn.Conv2d) -> tuple[Tensor, Tensor]:
    """Of a convolution; zeros where it has no bias."""
    weight, bias = convolution.weight, convolution.bias
    return weight, weight.new_zeros(len(weight)) if bias is None else bias


def check_grid(grid: object) -> Grid:
    """(h, w) as two positive whole numbers."""
    whole = isinstance(grid, (tuple, list)) and all(
        isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in grid
    )
    if not whole or len(grid) != 2:  # type: ignore[arg-type]
        raise TeacherError(f"a grid is (rows, columns), two positive whole numbers, got {grid!r}.")
    return grid[0], grid[1]  # type: ignore[index]


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TeacherError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return value


def _triple(name: str, values: Sequence[float]) -> Triple:
    try:
        first, second, third = (float(x) for x in values)
    except (TypeError, ValueError):
        raise TeacherError(f"{name} must be three numbers (R, G, B), got {values!r}.") from None
    return first, second, third


def _check_sizes(sizes: Iterable[Grid], stride: int) -> tuple[Grid, ...]:
    checked = tuple(sorted({check_grid(size) for size in sizes}))
    wrong = [size for size in checked if size[0] % stride or size[1] % stride]
    if not checked or wrong:
        raise TeacherError(
            f"sizes must be (height, width) in pixels, multiples of the stride {stride}, got "
            f"{_list(wrong) if wrong else 'none'}."
        )
    return checked


def _list(pairs: Iterable[Grid]) -> str:
    return ", ".join(f"{h} x {w}" for h, w in pairs) or "none"
