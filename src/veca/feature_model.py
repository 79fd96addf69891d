"""What users of timm and transformers try first on a model, the same on each of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from veca.config import AUTO, DEFAULT_SIZE, VecaConfig
from veca.errors import check_choice
from veca.images import ImageTransform, Preprocessed, Size, Source, preprocess

if TYPE_CHECKING:
    from veca.points import OperatingPoint
    from veca.quantization import Rounding


class FeatureModel:
    """A model that turns images into features: its sizes, its preprocessing, itself in one line."""

    config: VecaConfig
    name: str | None = None
    """What its weights are called, if they have a name; neither stored nor trained."""
    provenance: Mapping[str, Any] = MappingProxyType({})
    """Where its weights come from, as stored with them; `veca.save` keeps it."""
    beside: Mapping[str, bytes] = MappingProxyType({})
    """Files that lie beside its weights and belong to them, by name; `veca.save` keeps them."""
    point: OperatingPoint | None = None
    """The operating point it was loaded at: where calls that say neither cores nor keep work."""
    precision: str = "fp32"
    """What `veca.precision.at_precision` made of it; a dtype of the weights is none of this."""
    quantization: Rounding | None = None
    """How its weights were rounded before they were stored, if they were."""
    _has_cores = True

    if TYPE_CHECKING:  # each class has its own way of knowing these

        @property
        def device(self) -> torch.device: ...

        @property
        def dtype(self) -> torch.dtype: ...

    def take_origin(self, other: FeatureModel) -> None:
        """Be known as coming from where the weights of `other` come from."""
        self.provenance, self.beside = other.provenance, other.beside

    @property
    def num_features(self) -> int:
        """Width of the features that come out."""
        return self.config.feature_width

    @property
    def embed_dim(self) -> int:
        """Width of the tokens inside."""
        return self.config.width

    @property
    def patch_size(self) -> int:
        """Pixels a side of one patch."""
        return self.config.patch_size

    def preprocess(
        self,
        images: Source | Iterable[Source],
        size: Size | Literal["auto"] = AUTO,
        **options: Any,
    ) -> Preprocessed:
        """Images as this model wants them: `veca.preprocess` with its mean, deviation and patches.

        Args:
            size: as in `veca.preprocess`; "auto" is that of the model's `point`, or else 512
                (`veca.config.DEFAULT_SIZE`).
            options: as in `veca.preprocess`; what is given there wins.
        """
        pixels: Size = DEFAULT_SIZE if self.point is None else self.point.size
        if isinstance(size, str):
            check_choice("size", size, [AUTO])
        else:
            pixels = size
        return preprocess(images, pixels, model=self, **options)

    def transform(
        self,
        size: int | tuple[int, int] = DEFAULT_SIZE,
        *,
        shape: str = "square",
        max_pixels: int | None = None,
    ) -> ImageTransform:
        """From one image to the tensor [3, H, W] that this model takes, for a `Dataset`.

        >>> ImageFolder("photos", transform=model.transform(224))

        Args:
            size: pixels, one number for both sides or (height, width).
            shape: "square" cuts the middle out of an image of another shape, "squash" takes it
                whole, "short" keeps its shape and makes the short side `size`.
            max_pixels: the most that an image may have, as in `veca.images.read_image`.
        """
        c = self.config
        return ImageTransform(size, shape, c.patch_size, c.image_mean, c.image_std, max_pixels)

    def __repr__(self) -> str:
        c = self.config
        facts = [f'"{self.name}"'] if self.name else []
        facts += [f"{c.depth} layers", f"width {c.width}"]
        facts += [f"{c.num_cores} cores"] if self._has_cores else []
        facts += [f"patch {c.patch_size}"]
        if isinstance(self, nn.Module):
            count = sum(p.numel() for p in self.parameters())
            facts += [f"{count / 1e6:.1f} M parameters" if count >= 1e5 else f"{count} parameters"]
        facts += [f"{self.device} {str(self.dtype).removeprefix('torch.')}"]
        return f"{type(self).__name__}({', '.join(facts)})"
