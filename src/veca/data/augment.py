"""The views a student and its teacher see of an image: cut, mirrored, recoloured, mixed.

Everything random about a view comes from its sample's key (`veca.data.draws`), so it is the same
whatever the batch, the rank and the device. Views are cut from the source in one step of
resampling (`veca.data.resample`), the teacher's from the very same box at its own size. Mixing
(`veca.data.mixing`) comes last, and is the only step in which an image meets another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from veca.data import mixing, trivial_augment
from veca.data.draws import Keys, uniform
from veca.data.resample import Size, copy_to_device, crop_resize_batch
from veca.errors import DataError, check_choice

KINDS = ("paper", "rrc", "none")

_FLIP, _DOWN, _ACROSS = 0, 1, 2
_OP, _BIN, _SIGN = 3, 4, 5
_BRIGHTNESS, _CONTRAST, _SATURATION = 6, 7, 8
_TRIES = 16  # streams from here on: four for each try at a box
_MAX_TRIES = 10
_MIX = 100  # streams from here on: `mixing.STREAMS`

_LUMA = (0.299, 0.587, 0.114)


@dataclasses.dataclass(frozen=True)
class AugmentConfig:
    """What is done to training images; every field is a plain value of JSON and TOML.

    "paper": the image is resized so that its short side is `resize` times the crop, a random crop
    is taken and mirrored with probability `flip`, then one operation of TrivialAugmentWide.
    "rrc": a random box of `area` (share of the image) and `aspect` (of the box in the view's own
    aspect) is resized to the view, mirrored, and its brightness, contrast and saturation are
    multiplied by factors in 1 - strength .. 1 + strength.
    "none": the same resize as "paper" and the central crop; for validation.

    With any of them, finished views can be mixed in pairs, each in one way at most; the teacher's
    are mixed like the student's.
    """

    kind: str = "paper"
    resize: float = 9 / 8
    flip: float = 0.5
    trivial: bool = True
    """Whether TrivialAugmentWide follows the crop of "paper"."""
    area: tuple[float, float] = (0.35, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    mixup: float = 0.0
    """Probability that a view is blended with its partner's; its own weight is then 0.5 to 1."""
    cutmix: float = 0.0
    """Probability that a rectangle of a view, up to half of it, is its partner's."""

    def __post_init__(self) -> None:
        for name in ("area", "aspect"):
            pair = getattr(self, name)
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise DataError(f"augment.{name} must be two numbers, low and high; got {pair!r}.")
            object.__setattr__(self, name, tuple(_number(name, side) for side in pair))
        check_choice("augmentation", self.kind, KINDS, DataError)
        if not isinstance(self.trivial, bool):
            raise DataError(f"augment.trivial must be true or false; got {self.trivial!r}.")
        if not _number("resize", self.resize) >= 1:
            raise DataError(f"augment.resize must be at least 1; got {self.resize!r}.")
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise DataError(f"augment.area must rise within 0..1; got {self.area!r}.")
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise DataError(f"augment.aspect must rise above 0; got {self.aspect!r}.")
        for name in ("flip", "brightness", "contrast", "saturation", "mixup", "cutmix"):
            if not 0 <= _number(name, getattr(self, name)) <= 1:
                raise DataError(f"augment.{name} must lie in 0..1; got {getattr(self, name)!r}.")
        if self.mixup + self.cutmix > 1 + 1e-9:  # 1, but for rounding
            raise DataError(
                f"augment.mixup and augment.cutmix must add up to at most 1, since a view is mixed "
                f"in one way only; got {self.mixup!r} and {self.cutmix!r}."
            )

    @property
    def mixing(self) -> bool:
        """Whether images are mixed at all; batches then need pairs."""
        return self.mixup > 0 or self.cutmix > 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AugmentConfig:
        """Read a table of a TOML or JSON file; an unknown name is refused."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            check_choice("augmentation setting", name, known, DataError)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain JSON values."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"augment.{name} must be a finite number; got {value!r}.")
    return float(value)


class Crops(NamedTuple):
    """Where each view lies in its image."""

    boxes: NDArray[np.float64]
    """[B, 4]: left, top, right, bottom as fractions of width and height."""
    flips: NDArray[np.bool_]
    """[B]: mirrored left and right."""


class Views(NamedTuple):
    """Pixels float32 in 0..1, not normalised."""

    student: Tensor
    """[B, 3, h, w]."""
    teacher: Tensor | None
    """[B, 3, H, W]; None when the teacher sees the student's pixels."""


class Augmentation:
    """Turns images into views; holds no state and draws nothing but from the keys.

    `__call__` does everything for a batch that is already decoded. A loader that decodes on the
    CPU uses the two halves: `crops` (where to cut) and `colour` (on the device).

    Where the settings ask for mixing, images 2k and 2k + 1 of a batch are partners, and it must
    have an even number of them.
    """

    def __init__(self, config: AugmentConfig | None = None) -> None:
        self.config = config if config is not None else AugmentConfig()

    def __call__(
        self,
        images: Tensor,
        keys: ArrayLike | Tensor,
        size: int | Size,
        teacher_size: int | Size | None = None,
    ) -> Views:
        """Cut, recolour and mix a batch.

        Args:
            images: [B, 3, H, W], uint8 or float in 0..1 (rounded to 8 bits), on any device.
            keys: one whole number per image, see `veca.data.sample_keys`.
            size: (height, width) of the student's views; one number for a square.
            teacher_size: the teacher's, if it differs: views of the same boxes in the same colours,
                cut from the images at this size.
        """
        images, words = _check_images(images), _check_keys(keys, len(images))
        size = as_size(size)
        wanted = None if teacher_size is None else as_size(teacher_size)
        height, width = images.shape[2:]
        heights, widths = np.full(len(words), height), np.full(len(words), width)
        boxes, flips = self.crops(words, heights, widths, size)
        student = crop_resize_batch(images, boxes, flips, size)
        teacher = None
        if wanted is not None and wanted != size:
            teacher = crop_resize_batch(images, boxes, flips, wanted)
        return self.colour(student, words, teacher)

    def crops(
        self, keys: Keys, heights: NDArray[np.integer], widths: NDArray[np.integer], size: Size
    ) -> Crops:
        """The box and flip of each sample, for images of these sizes [B] in pixels."""
        config = self.config
        if config.kind == "none":
            return Crops(self._resized(heights, widths, size, None), np.zeros(len(keys), bool))
        flips = uniform(keys, _FLIP) < config.flip
        if config.kind == "paper":
            return Crops(self._resized(heights, widths, size, keys), flips)
        return Crops(self._random_boxes(keys, heights, widths, size), flips)

    def colour(
        self, student: Tensor, keys: ArrayLike | Tensor, teacher: Tensor | None = None
    ) -> Views:
        """Recolour and mix views that are cut already, uint8 [B, 3, h, w] (and [B, 3, H, W])."""
        config, words = self.config, _check_keys(keys, len(student))
        if config.mixing:
            mixing.check_pairs(len(student))
        views = self._recolour(student, words, teacher)
        if not config.mixing:
            return views
        drawn = mixing.draw_mixture(words, _MIX, config.mixup, config.cutmix)
        seen = mixing.mix(views.student, drawn)
        shown = None if views.teacher is None else mixing.mix(views.teacher, drawn)
        return Views(seen, shown)

    def _recolour(self, student: Tensor, keys: Keys, teacher: Tensor | None) -> Views:
        if self.config.kind == "rrc":
            return self._jitter(student, keys, teacher)
        if self.config.kind == "paper" and self.config.trivial:
            drawn = trivial_augment.draw_operations(keys, (_OP, _BIN, _SIGN))
            student, *rest = trivial_augment.apply_operations(student, drawn, teacher)
            teacher = rest[0] if rest else None
        return Views(_to_unit(student), None if teacher is None else _to_unit(teacher))

    def _resized(
        self, heights: NDArray, widths: NDArray, size: Size, keys: Keys | None
    ) -> NDArray[np.float64]:
        """Boxes of whole-pixel crops of the image resized to cover `resize` times the view."""
        aims = [round(self.config.resize * side) for side in size]
        scale = np.maximum(aims[0] / heights, aims[1] / widths)
        # One side is the aim exactly; rounding must not make it fall short.
        lengths = [
            np.maximum(np.floor(sides * scale + 0.5), aim)
            for sides, aim in zip((heights, widths), aims, strict=True)
        ]
        room = [length - side for length, side in zip(lengths, size, strict=True)]
        if keys is None:
            top, left = (np.floor(space / 2) for space in room)
        else:
            top, left = (
                np.floor(uniform(keys, stream) * (space + 1))
                for stream, space in zip((_DOWN, _ACROSS), room, strict=True)
            )
        return np.stack(
            [
                left / lengths[1],
                top / lengths[0],
                (left + size[1]) / lengths[1],
                (top + size[0]) / lengths[0],
            ],
            axis=1,
        )

    def _random_boxes(
        self, keys: Keys, heights: NDArray, widths: NDArray, size: Size
    ) -> NDArray[np.float64]:
        """The first of ten random boxes that fits; else the largest central one that may be."""
        config = self.config
        low, high = (math.log(side) for side in config.aspect)
        # The aspect is that of the view, so that 1 means undistorted whatever the view's shape.
        shape = size[1] / size[0]
        across = np.full(len(keys), np.nan)
        down, left, top = across.copy(), across.copy(), across.copy()
        for attempt in range(_MAX_TRIES):
            first = _TRIES + 4 * attempt
            share = config.area[0] + uniform(keys, first) * (config.area[1] - config.area[0])
            aspect = np.exp(low + uniform(keys, first + 1) * (high - low)) * shape
            wide = np.sqrt(share * heights * widths * aspect)
            tall = wide / aspect
            fits = np.isnan(across) & (wide <= widths) & (tall <= heights)
            across[fits], down[fits] = wide[fits], tall[fits]
            left[fits] = (uniform(keys, first + 2) * (widths - wide))[fits]
            top[fits] = (uniform(keys, first + 3) * (heights - tall))[fits]
            if not np.isnan(across).any():
                break
        missed = np.isnan(across)
        aspect = np.clip(widths / heights, shape * config.aspect[0], shape * config.aspect[1])
        wide = np.minimum(widths, heights * aspect)
        across[missed], down[missed] = wide[missed], (wide / aspect)[missed]
        left[missed] = ((widths - across) / 2)[missed]
        top[missed] = ((heights - down) / 2)[missed]
        return np.stack(
            [left / widths, top / heights, (left + across) / widths, (top + down) / heights], axis=1
        )

    def _jitter(self, student: Tensor, keys: Keys, teacher: Tensor | None) -> Views:
        """Brightness, then contrast about the mean luma, then saturation.

        The three are linear in the colour, so they are one map, with one clip to 0..1 at the end.
        The mean is that of the student's view, for the teacher's as well.
        """
        bright, contrast, vivid = (
            1 + strength * (2 * uniform(keys, stream) - 1)
            for strength, stream in (
                (self.config.brightness, _BRIGHTNESS),
                (self.config.contrast, _CONTRAST),
                (self.config.saturation, _SATURATION),
            )
        )
        gain = contrast * bright
        factors = np.stack([gain * vivid, gain * (1 - vivid), (1 - contrast) * bright])
        table = copy_to_device(factors.astype(np.float32), student.device)[..., None, None, None]
        pixels = _to_unit(student)
        luma = _luma(pixels)
        shift = table[2] * luma.mean((2, 3), keepdim=True)

        def recolour(pixels: Tensor, luma: Tensor) -> Tensor:
            return pixels.mul_(table[0]).add_(luma.mul_(table[1]).add_(shift)).clamp_(0, 1)

        seen = recolour(pixels, luma)
        if teacher is None:
            return Views(seen, None)
        pixels = _to_unit(teacher)
        return Views(seen, recolour(pixels, _luma(pixels)))


def as_size(size: int | Size) -> Size:
    """(height, width) of at least one pixel, from a pair or from one side of a square."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or not all(isinstance(side, int) and side >= 1 for side in sides):
        raise DataError(f"a size is (height, width) in whole pixels of at least 1; got {size!r}.")
    return sides[0], sides[1]


def _to_unit(levels: Tensor) -> Tensor:
    return levels.float().div_(255)


def _luma(pixels: Tensor) -> Tensor:
    """[B, 1, h, w]."""
    red, green, blue = pixels.unbind(1)
    # Sums, not a matrix product: that would be rounded where TF32 is switched on.
    return (red * _LUMA[0]).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])[:, None]


def _check_images(images: Tensor) -> Tensor:
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        raise DataError(f"images of shape {list(images.shape)}, expected [B, 3, height, width].")
    if images.is_floating_point():
        return images.mul(255).round_().clamp_(0, 255).to(torch.uint8)
    if images.dtype != torch.uint8:
        raise DataError(f"images of dtype {images.dtype}, expected uint8 or float in 0..1.")
    return images


def _check_keys(keys: ArrayLike | Tensor, count: int) -> Keys:
    array = keys.cpu().numpy() if isinstance(keys, Tensor) else np.asarray(keys)
    if array.shape != (count,) or array.dtype.kind not in "iu":
        raise DataError(
            f"keys must be one whole number per image, {count} here; got {array.dtype} "
            f"{list(array.shape)}. Make them with veca.data.sample_keys(seed, epoch, indices)."
        )
    return array.astype(np.uint64)
