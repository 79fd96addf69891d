"""What `veca large` wrote as Zarr, opened again: regions from the store, or from the memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from veca._util.extras import require
from veca.core_memory import CoreMemory
from veca.errors import LargeError, MissingExtraError, at_least
from veca.large.picture import Picture, normalized, tile_window
from veca.large.sources import open_source
from veca.large.view import PictureLook, PictureView
from veca.large.writers.zarr_store import FACTS, FEATURES, MASK, MEMORY
from veca.model import Veca

Array = np.ndarray[Any, Any]


class FeatureStore:
    """Features of a large picture on disk.

    Attributes:
        facts: how they were made, of what.
        grid: (h, w), patches down and across.
        features: the Zarr array [h, w, D']; None where only the memory was kept.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        zarr = require("zarr", "reading features of large pictures", "large")
        self.path = Path(path).expanduser()
        try:
            root = zarr.open_group(self.path, mode="r")
            self.facts: dict[str, Any] = dict(root.attrs)[FACTS]
            self.features: Any = root.get(FEATURES)
            self._mask: Any = root.get(MASK)
            height, width = self.facts["grid"]
            self.grid = (int(height), int(width))
            self.patch_size = at_least("patch_size", self.facts["patch_size"])
        except MissingExtraError:
            raise
        except Exception as error:  # zarr raises almost any type on what is none
            raise LargeError(
                f"{self.path} holds no features of a large picture; `veca large` writes them."
            ) from error

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width) of the picture in pixels."""
        height, width = self.facts["shape"]
        return height, width

    @cached_property
    def mask(self) -> Array | None:
        """Booleans [h, w]: which patches are there; None: all."""
        return None if self._mask is None else np.asarray(self._mask[:])

    @cached_property
    def memory(self) -> CoreMemory | None:
        """The core memory; None where each tile had a context of its own."""
        path = self.path / MEMORY
        return CoreMemory.load(path) if path.exists() else None

    def patches(self, region: Sequence[int]) -> tuple[int, int, int, int]:
        """(row, column, rows, columns) of the patches that a region (x, y, width, height) touches.

        Raises:
            LargeError: it is not inside the picture.
        """
        x, y, width, height = (int(side) for side in region)
        rows, columns = self.shape
        if min(x, y) < 0 or min(width, height) < 1 or x + width > columns or y + height > rows:
            raise LargeError(
                f"the region x={x}, y={y}, {width} wide and {height} high is empty or outside the "
                f"picture, which is {columns} wide and {rows} high."
            )
        size = self.patch_size
        row, column = y // size, x // size
        return row, column, -(-(y + height) // size) - row, -(-(x + width) // size) - column

    def read(self, region: Sequence[int]) -> Array:
        """Features [h, w, D'] of the patches that a region touches, from the store."""
        row, column, rows, columns = self.patches(region)
        if self.features is None:
            raise LargeError(f"{self.path} keeps the core memory alone; compute the region.")
        try:
            return np.asarray(self.features[row : row + rows, column : column + columns])
        except Exception as error:
            raise LargeError(
                f"{self.path} is damaged in this region ({error}); compute it from the memory, or "
                "make the store again."
            ) from error

    @torch.no_grad()
    def compute(self, model: Veca, region: Sequence[int], picture: Picture | None = None) -> Array:
        """The same features, exactly, from the core memory and the region's pixels.

        Args:
            model: of the weights and the precision that the store was made with.
            picture: by default the file that the features were made of.
        """
        row, column, rows, columns = self.patches(region)
        memory = self.memory
        if memory is None:
            raise LargeError(
                f"with context={self.facts['context']!r} every tile has cores of its own, and "
                "nothing is kept of them; read the features from the store."
            )
        source = self.picture() if picture is None else picture
        window = tile_window(source, model.config.patch_size, (row, column), (rows, columns))
        pixels = normalized(window, model.config)
        size = self.patch_size
        out = model.read(
            memory,
            pixels.to(model.device, model.dtype),
            (row * size, column * size),
            projection=self.facts["width"] == "projected",
        )
        found = out.patches[0].float().cpu().numpy().reshape(rows, columns, -1)
        if self.mask is not None:
            found[~self.mask[row : row + rows, column : column + columns]] = 0
        return np.asarray(found.astype(self.facts["dtype"]))

    def picture(self, path: str | os.PathLike[str] | None = None) -> PictureView:
        """The picture that the features were made of, unchanged.

        Args:
            path: where it is now, if it has moved.
        """
        known = self.facts.get("path") if path is None else path
        if known is None:
            raise LargeError(f"{self.path} does not know its picture's file; name it.")
        view = PictureView(open_source(known), PictureLook.of(self.facts.get("look", {})))
        same = view.identity() == self.facts["picture"]
        if view.shape != self.shape or not (same or path is not None):
            raise LargeError(
                f"{known} has changed since its features were computed; compute them anew, or name "
                "the picture, if it is the same."
            )
        return view
