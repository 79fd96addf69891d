"""The image processor: `veca.preprocess` under transformers' interface. No torchvision."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import load_image
from transformers.processing_utils import ImagesKwargs

from veca.config import DEFAULT_SIZE
from veca.errors import ImageError
from veca.images import FITS, IMAGENET_MEAN, IMAGENET_STD, preprocess
from veca.integrations.transformers.configuration import VecaConfig
from veca.weights.processor import FILE

_DONE: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "resample": Image.Resampling.BICUBIC,
    "default_to_square": True,
    "do_center_crop": False,
    "crop_size": None,
    "do_pad": False,
    "pad_size": None,
    "data_format": "channels_first",
    "device": "cpu",
    "image_seq_length": None,
}
"""Options of transformers' processors that have no other value here: what is always done."""
_OF_A_STEP = {"crop_size": "do_center_crop", "pad_size": "do_pad"}
"""Options that ask for nothing where another says no."""
_OPTIONS = (
    "options are do_resize, size, fit, do_normalize, image_mean, image_std, patch_size and "
    "input_data_format"
)


class VecaImagesKwargs(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    """Options beyond the usual ones."""

    fit: str
    patch_size: int


class VecaImageProcessor(BaseImageProcessor):  # type: ignore[misc]
    """Reads images, scales them, fits them to the patch grid and normalises them.

    Gives exactly the pixels of `veca.preprocess`.

    Args:
        do_resize: scale to `size`. Without it images keep their size, but for the grid.
        size: {"height": h, "width": w}, or {"shortest_edge": s} to keep the aspect ratio; a number
            is both sides. Default 512 x 512, so that any images make a batch.
        fit: how an image comes onto the grid: "resize", "pad", "crop" or "error", as in
            `veca.preprocess`.
        do_normalize: subtract `image_mean` and divide by `image_std`.
        patch_size: the grid.
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012
    valid_kwargs = VecaImagesKwargs

    def __init__(
        self,
        do_resize: bool = True,
        size: int | Mapping[str, int] | None = None,
        fit: str = "resize",
        do_normalize: bool = True,
        image_mean: Sequence[float] = IMAGENET_MEAN,
        image_std: Sequence[float] = IMAGENET_STD,
        patch_size: int = 16,
        **kwargs: Any,
    ) -> None:
        _check_done(kwargs)
        for name in ("image_processor_type", *_DONE):
            kwargs.pop(name, None)  # said when saved, always so
        super().__init__(**kwargs)
        self.do_resize = do_resize
        self.size = dict(_size(DEFAULT_SIZE if size is None else size))
        self.fit = _fit(fit)
        self.do_rescale = True
        self.do_convert_rgb = True
        self.do_normalize = do_normalize
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)
        self.patch_size = patch_size

    @classmethod
    def from_config(cls, config: VecaConfig, **kwargs: Any) -> VecaImageProcessor:
        """With the mean, deviation and patch size that a model wants."""
        wanted = {name: getattr(config, name) for name in ("image_mean", "image_std", "patch_size")}
        return cls(**{**wanted, **kwargs})

    @classmethod
    def get_image_processor_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As usual; from a folder of `veca.save`, which has no settings, from its configuration."""
        folder = Path(str(pretrained_model_name_or_path)) / str(kwargs.get("subfolder") or "")
        if (folder / "config.json").is_file() and not any(
            (folder / n).is_file() for n in (FILE, "processor_config.json")
        ):
            config = VecaConfig.from_pretrained(folder)
            hub = ("cache_dir", "force_download", "local_files_only", "revision", "token")
            for name in (*hub, "subfolder", "proxies", "image_processor_filename", "_from_auto"):
                kwargs.pop(name, None)
            return cls.from_config(config).to_dict(), kwargs
        return super().get_image_processor_dict(pretrained_model_name_or_path, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        return {
            "image_processor_type": type(self).__name__,
            "do_resize": self.do_resize,
            "size": dict(self.size),
            "fit": self.fit,
            "do_rescale": True,
            "do_normalize": self.do_normalize,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "patch_size": self.patch_size,
        }

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def __call__(self, images: Any, *args: Any, **kwargs: Any) -> BatchFeature:
        return self.preprocess(images, *args, **kwargs)

    def preprocess(
        self,
        images: Any,
        do_resize: bool | None = None,
        size: int | Mapping[str, int] | None = None,
        fit: str | None = None,
        do_normalize: bool | None = None,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        return_tensors: Any = None,
        patch_size: int | None = None,
        input_data_format: str | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """`pixel_values` [B, 3, H, W] of one image or several; options as for the class.

        An image is a path, a URL, a Pillow image, or an 8-bit array or tensor with its colours
        first or last; several are a list of those or one array with a batch axis. Where the colours
        are is told from the shape, or by `input_data_format` ("channels_first" or "channels_last").
        """
        unknown = [name for name in kwargs if name not in VecaImagesKwargs.__annotations__]
        if unknown:
            raise ImageError(f"unknown option {unknown[0]!r} for VecaImageProcessor; {_OPTIONS}.")
        _check_done(kwargs)
        resize = self.do_resize if do_resize is None else do_resize
        normalise = self.do_normalize if do_normalize is None else do_normalize
        mean = self.image_mean if image_mean is None else image_mean
        std = self.image_std if image_std is None else image_std
        pixels = [
            preprocess(
                image,
                _pixels(self.size if size is None else size) if resize else None,
                fit=_fit(self.fit if fit is None else fit),
                patch_size=self.patch_size if patch_size is None else patch_size,
                mean=mean if normalise else (0.0, 0.0, 0.0),
                std=std if normalise else (1.0, 1.0, 1.0),
            ).pixels[0]
            for image in _listed(images, input_data_format)
        ]
        if not pixels:
            raise ImageError("no images given; expected at least one.")
        shapes = {tuple(image.shape[1:]) for image in pixels}
        if len(shapes) == 1:
            return BatchFeature({"pixel_values": torch.stack(pixels)}, tensor_type=return_tensors)
        if return_tensors is None:
            return BatchFeature({"pixel_values": pixels})
        sizes = ", ".join(f"{h} x {w}" for h, w in sorted(shapes))
        raise ImageError(
            f"images of one batch must have one size, but these come out at {sizes}; pass "
            "size={'height': ..., 'width': ...}, or leave out return_tensors for a list."
        )


def _check_done(options: Mapping[str, Any]) -> None:
    """Refuse options of transformers' whose value is not what is done anyway."""
    for name, done in _DONE.items():
        value = options.get(name)
        idle = name in _OF_A_STEP and options.get(_OF_A_STEP[name]) is False
        if value is None or idle or _same(value, done):
            continue
        always = "it has no such step" if done in (None, False) else f"it is always {done!r}"
        raise ImageError(
            f"{name}={value!r} cannot be asked of VecaImageProcessor ({always}); leave it out. "
            f"The {_OPTIONS}."
        )


def _same(value: Any, done: Any) -> bool:
    if isinstance(done, float):
        return math.isclose(value, done, rel_tol=1e-6)
    return value == done or str(value).partition(":")[0] == done  # a device may have a number


def _listed(images: Any, layout: str | None = None) -> list[Any]:
    """One image or several, as a list of what `veca.preprocess` reads."""
    if isinstance(images, (list, tuple)):
        return [image for entry in images for image in _listed(entry, layout)]
    if isinstance(images, (np.ndarray, Tensor)):
        if images.ndim == 4:
            return [_picture(image, layout) for image in images]
        return [_picture(images, layout)]
    if isinstance(images, str) and images.startswith(("http://", "https://")):
        return [load_image(images)]
    return [images]


def _picture(image: np.ndarray[Any, Any] | Tensor, layout: str | None = None) -> Any:
    """An array or a tensor as `veca.preprocess` wants it, colours last; grey becomes a picture."""
    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    if array.dtype != np.uint8:
        raise ImageError(
            f"an image of dtype {array.dtype}, expected 8-bit (uint8) values from 0 to 255; "
            "multiply by 255 and convert, or call the model on pixels that are normalised already."
        )
    if array.ndim == 3 and _colours_first(array.shape, layout):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array)) if array.ndim == 2 else array


def _colours_first(shape: tuple[int, ...], layout: str | None) -> bool:
    if layout is None:
        return shape[0] in (1, 3)
    if layout not in ("channels_first", "channels_last"):
        raise ImageError(
            f"input_data_format must be 'channels_first' or 'channels_last', got {layout!r}."
        )
    return layout == "channels_first"


def _size(size: int | Mapping[str, int]) -> Mapping[str, int]:
    """{"height", "width"} or {"shortest_edge"}, whichever way it was said."""
    if isinstance(size, int) and not isinstance(size, bool):
        return {"height": size, "width": size}
    if isinstance(size, (tuple, list)) and len(size) == 2:
        return {"height": size[0], "width": size[1]}
    try:
        fields = {name: value for name, value in dict(size).items() if value}  # type: ignore[arg-type]
    except (TypeError, ValueError):
        fields = {}
    if set(fields) not in ({"height", "width"}, {"shortest_edge"}):
        raise ImageError(
            "size must be {'height': h, 'width': w} or {'shortest_edge': s} in pixels, got "
            f"{size!r}."
        )
    return fields


def _pixels(size: int | Mapping[str, int]) -> int | tuple[int, int]:
    fields = _size(size)
    return fields.get("shortest_edge") or (fields["height"], fields["width"])


def _fit(fit: str) -> str:
    if fit not in FITS:
        raise ImageError(f"unknown fit {fit!r}; expected one of {', '.join(FITS)}.")
    return fit
