"""Features as a raster on the earth: a few principal components, or the classes of a head."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from veca._util import tensor_file
from veca._util.extras import require
from veca.core_memory import CoreMemory
from veca.embed import pca
from veca.errors import LargeError, OutputError, at_least
from veca.large.sources import geo
from veca.large.view import PictureView
from veca.large.writers import Features, Layout
from veca.large.writers.arrays import ConvertedWriter

_SAMPLE = 65_536  # patches that the components are found of
_NO_CLASS = 255
_BLOCK = 256


class GeoTiffWriter(ConvertedWriter):
    """One pixel a patch, in the picture's coordinate system.

    Bands are the principal components of the features, float32 with NaN where masked; or, with a
    head, one band of classes, uint8 with 255 where masked.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        components: int = 3,
        head: str | os.PathLike[str] | None = None,
    ) -> None:
        """
        Args:
            head: a .safetensors file with a linear classifier of patches: `weight` [classes, D']
                and `bias` [classes].
        """
        self._rasterio = require("rasterio", "writing GeoTIFF", "geo")
        super().__init__(path, "float16")
        self.components = at_least("components", components)
        self.head = None if head is None else read_head(Path(head).expanduser())

    def begin(self, layout: Layout, resumed: bool) -> bool:
        if self.head is not None and self.head[0].shape[1] != layout.width:
            raise LargeError(
                f"the head takes features of {self.head[0].shape[1]} numbers, and these have "
                f"{layout.width}; compute those it was trained on (native or projected)."
            )
        if self.head is None and self.components > layout.width:
            raise LargeError(f"features of {layout.width} numbers have no {self.components} parts.")
        return super().begin(layout, resumed)

    def convert(self, temporary: Path, memory: CoreMemory | None) -> None:
        (height, width), layout = self.layout.grid, self.layout
        bands = 1 if self.head is not None else self.components
        reduce = None if self.head is not None else self._components()
        place = layout.picture.place if isinstance(layout.picture, PictureView) else None
        where: dict[str, Any] = {}
        if place is not None:
            found = place.part(0, 0, layout.patch_size, layout.patch_size)
            where = {"transform": self._rasterio.Affine(*found.transform)}
            where |= {"crs": found.crs} if found.crs else {}
        profile = {
            "driver": "GTiff", "width": width, "height": height, "count": bands,
            "dtype": "uint8" if self.head is not None else "float32",
            "nodata": _NO_CLASS if self.head is not None else float("nan"),
            "compress": "deflate", "tiled": True, "blockxsize": _BLOCK, "blockysize": _BLOCK,
            "bigtiff": "if_safer", **where,
        }  # fmt: skip
        with geo.quiet(self._rasterio), self._rasterio.open(temporary, "w", **profile) as file:
            for row in range(0, height, _BLOCK):
                stop = min(row + _BLOCK, height)
                band = self.rows(row, stop)
                values = self._classes(band) if reduce is None else reduce(band)
                if layout.mask is not None:
                    values[~layout.mask[row:stop]] = profile["nodata"]
                window = self._rasterio.windows.Window(0, row, width, stop - row)
                file.write(np.moveaxis(values, -1, 0), window=window)

    def _components(self) -> Any:
        height, width = self.layout.grid
        mask = self.layout.mask
        total = height * width if mask is None else int(mask.sum())
        if total <= self.components:
            raise OutputError(
                f"cannot write {self.path}: {total} patches have no {self.components} components."
            )
        step = max(1, -(-total // _SAMPLE))
        samples, seen = [], 0
        for row in range(height):
            there = self.rows(row, row + 1)[0]
            there = there if mask is None else there[mask[row]]
            samples.append(there[-seen % step :: step].astype(np.float32))
            seen += len(there)
        fitted = pca.fit({"patches": np.concatenate(samples)}, self.components)

        def reduce(band: Features) -> Features:
            found: Features = fitted("patches", torch.from_numpy(band.astype(np.float32))).numpy()
            return found

        return reduce

    def _classes(self, band: Features) -> Features:
        assert self.head is not None
        weight, bias = self.head
        scores = torch.from_numpy(band.astype(np.float32)) @ weight.T + bias
        return scores.argmax(dim=-1, keepdim=True).to(torch.uint8).numpy()


def read_head(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [classes, D'] and bias [classes] of a linear classifier."""
    tensors, _ = tensor_file.read_file(path, LargeError)
    weights = [t for name, t in tensors.items() if name.split(".")[-1] == "weight"]
    biases = [t for name, t in tensors.items() if name.split(".")[-1] == "bias"]
    weight = weights[0].flatten(1).float() if len(weights) == 1 and weights[0].ndim > 1 else None
    if weight is None or len(biases) > 1 or len(tensors) != len(weights) + len(biases):
        raise LargeError(
            f"{path} is no linear classifier: it must hold a weight [classes, width] and a bias "
            f"[classes], and has {', '.join(sorted(tensors))}."
        )
    bias = biases[0].float() if biases else weight.new_zeros(len(weight))
    if bias.shape != weight.shape[:1] or len(weight) > _NO_CLASS:
        raise LargeError(f"{path}: its weight and bias do not agree, or are over 255 classes.")
    return weight, bias
