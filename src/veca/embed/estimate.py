"""What a run will take, told before it starts: on the disk, and in memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from veca._util.memory import forward_bytes, too_large
from veca._util.numbers import gigabytes
from veca.config import VecaConfig
from veca.data.decode import EncodedImage
from veca.data.sources import ImageSource
from veca.embed.settings import stored_widths, with_later
from veca.errors import InputError, VecaError, VecaWarning
from veca.images import Size, target_size
from veca.model import Veca

_LOOKED_AT = 16
_BYTES = {"float16": 2, "float32": 4}


@dataclass(frozen=True)
class DiskEstimate:
    """About how much the features of some images take on the disk."""

    images: int
    widths: dict[str, int]
    """Numbers in a vector of each kind of feature."""
    patches: int
    """Of an image: the mean of a few that were looked at."""
    dtype: str

    @property
    def bytes(self) -> int:
        numbers = self.widths.get("cls", 0) + self.patches * self.widths.get("patches", 0)
        return self.images * numbers * _BYTES[self.dtype]

    def __str__(self) -> str:
        parts = [f"cls {self.widths['cls']:,}"] if "cls" in self.widths else []
        if "patches" in self.widths:
            parts.append(f"{self.patches:,} patches x {self.widths['patches']:,}")
        images = f"{self.images:,} image{'' if self.images == 1 else 's'}"
        return (
            f"about {gigabytes(self.bytes)} on disk: {images} x ({' + '.join(parts)}) numbers of "
            f"{self.dtype}"
        )


def estimate(
    source: ImageSource, images: int, settings: dict[str, Any], what: Sequence[str]
) -> DiskEstimate:
    """What `images` images take, of a source a few of whose headers are looked at.

    Args:
        settings: of a folder of embeddings or of features.
    """
    settings = with_later(settings)
    config = VecaConfig.from_dict(settings["config"])
    widths = stored_widths(config, settings["width"], settings["pca"])
    patches = 0
    if "patches" in what:
        size = settings["size"]
        pixels: Size = (size[0], size[1]) if isinstance(size, list) else size
        patches = _patches(source, pixels, settings.get("fit", "resize"), config.patch_size)
    return DiskEstimate(images, {name: widths[name] for name in what}, patches, settings["dtype"])


def _patches(source: ImageSource, size: Size, fit: str, patch: int) -> int:
    """Patches of an image, on average over a few spread through the source."""
    if isinstance(size, tuple):
        height, width = target_size(*size, size, fit, patch)
        return height * width // patch**2
    found = []
    count = min(_LOOKED_AT, len(source))
    for i in range(count):
        with contextlib.suppress(VecaError, OSError):
            original = EncodedImage.of(source, i * len(source) // count).size
            height, width = target_size(*original, size, fit, patch)
            found.append(height * width // patch**2)
    return round(sum(found) / len(found)) if found else 0


def warn_of_memory(model: Veca, size: Size, images: int, batch: int, at_once: int) -> None:
    """Refuse a size of which not one image fits in the free memory; warn of too large batches.

    A single image is looked at when it is read, where its own shape is known.
    """
    if size is None:  # each image's own: each is looked at when it is read
        return
    height, width = size if isinstance(size, tuple) else (size, size)
    one = forward_bytes(model.config, height, width)
    device = model.device
    much = too_large(one, device)
    if much:
        raise InputError(
            f"an image of {height} x {width} pixels needs {much}; use a smaller size (--size)."
        )
    together = min(images, batch * at_once)
    much = too_large(one * together, device)
    if much and together > 1:
        warnings.warn(
            f"{together} images of {height} x {width} pixels at once need {much}; use a smaller "
            "batch size (--batch-size), fewer threads (--threads) or a smaller size.",
            VecaWarning,
            stacklevel=3,
        )
