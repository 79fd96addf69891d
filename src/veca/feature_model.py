"""What users of timm and transformers try first on a model, the same on each of ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from veca.config import DEFAULT_SIZE, VecaConfig
from veca.images import Preprocessed, Size, Source, preprocess


class FeatureModel:
    """A model that turns images into features: its sizes, its preprocessing, itself in one line."""

    config: VecaConfig
    name: str | None = None
    """What its weights are called, if they have a name; neither stored nor trained."""
    _has_cores = True

    if TYPE_CHECKING:  # each class has its own way of knowing these

        @property
        def device(self) -> torch.device: ...

        @property
        def dtype(self) -> torch.dtype: ...

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
        self, images: Source | Iterable[Source], size: Size = DEFAULT_SIZE, **options: Any
    ) -> Preprocessed:
        """Images as this model wants them: `veca.preprocess` with its mean, deviation and patches.

        Args:
            options: as in `veca.preprocess`; what is given there wins.
        """
        return preprocess(images, size, model=self, **options)

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
