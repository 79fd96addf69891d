"""Features as HDF5 in the layout of toolkits for slides: `coords` [N, 2], `features` [N, D']."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from veca._util.extras import require
from veca.core_memory import CoreMemory
from veca.errors import OutputError, at_least
from veca.large.view import PictureView
from veca.large.writers import Features
from veca.large.writers.arrays import ConvertedWriter


class Hdf5Writer(ConvertedWriter):
    """One row a patch that is there, or a square of patches; `coords` are (x, y) of its corner, in
    pixels of the file's finest level."""

    def __init__(
        self, path: str | os.PathLike[str], dtype: Any = "float16", *, pool: int = 1
    ) -> None:
        """
        Args:
            pool: patches a side of a square whose mean is one row: 16 for squares of 256 px.
        """
        self._h5py = require("h5py", "writing HDF5", "large")
        super().__init__(path, dtype)
        self.pool = at_least("pool", pool)

    def convert(self, temporary: Path, memory: CoreMemory | None) -> None:
        layout, pool = self.layout, self.pool
        (height, width), size = layout.grid, layout.patch_size * pool
        there = np.ones(layout.grid, bool) if layout.mask is None else layout.mask
        starts = range(0, height, pool)
        kept = [
            np.flatnonzero([
                there[row : row + pool, column : column + pool].any()
                for column in range(0, width, pool)
            ])
            for row in starts
        ]  # fmt: skip
        total = sum(map(len, kept))
        if not total:
            raise OutputError(f"cannot write {self.path}: no patch is there.")
        with self._h5py.File(temporary, "w", libver="latest") as file:
            coords = file.create_dataset("coords", (total, 2), "int64")
            rows = file.create_dataset("features", (total, layout.width), self.dtype)
            at = 0
            for row, columns in zip(starts, kept, strict=True):
                if not len(columns):
                    continue
                band = self.rows(row, min(row + pool, height))
                mask = there[row : row + pool]
                rows[at : at + len(columns)] = self._pooled(band, mask, columns)
                corners = [self._corner(row, int(column) * pool) for column in columns]
                coords[at : at + len(columns)] = corners
                at += len(columns)
            scale = self._corner(size, 0, pixels=True)[1] - self._corner(0, 0, pixels=True)[1]
            coords.attrs.update({"patch_size": size, "patch_size_level0": scale})
            rows.attrs["veca"] = json.dumps(layout.facts, sort_keys=True)

    def _pooled(self, band: Features, mask: Features, columns: Features) -> Features:
        """The mean of the patches that are there, square by square [n, D']."""
        if self.pool == 1:
            return band[0, columns]
        parts = []
        for column in columns:
            part = np.s_[:, column * self.pool : (column + 1) * self.pool]
            parts.append(band[part][mask[part]].astype(np.float32).mean(axis=0))
        return np.stack(parts)

    def _corner(self, row: int, column: int, *, pixels: bool = False) -> tuple[int, int]:
        """(x, y) of a patch's corner in the finest level."""
        size = 1 if pixels else self.layout.patch_size
        y, x = row * size, column * size
        picture = self.layout.picture
        found = picture.finest(y, x) if isinstance(picture, PictureView) else (y, x)
        return round(found[1]), round(found[0])
