"""Features as a Zarr group, from which `veca read` gives any region again.

features       [h, w, D']  one shard a tile, with a checksum; masked tiles are not stored
mask           [h, w]      which patches are there, where some are not
core_memory.safetensors    beside them, where there is one for the whole picture
attributes     "veca": how the features were made, of what picture, and where it lies
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from veca._util import files
from veca._util.extras import require
from veca.core_memory import CoreMemory
from veca.errors import AlreadyThereError, OutputError, shown
from veca.large.writers import Features, Layout

MEMORY = "core_memory.safetensors"
FEATURES, MASK, FACTS = "features", "mask", "veca"
_CHUNK = 16  # patches a side, where tiles are made of them: 256 px are read at once


class ZarrWriter:
    """It grows in a hidden folder beside the target, which takes its place at the end."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: Any = "float16",
        *,
        features: bool = True,
        overwrite: bool = False,
    ) -> None:
        """
        Args:
            features: False: keep the core memory alone, from which regions are computed again.
            overwrite: replace a store that is there.
        """
        self.zarr = require("zarr", "writing Zarr", "large")
        self.path = files.place_for(path)
        self.dtype = np.dtype(dtype)
        self.part = self.path.with_name(f".{self.path.name}.part")
        self._keeps_features, self._overwrite = features, overwrite
        self._done = False
        self._features: Any = None

    def begin(self, layout: Layout, resumed: bool) -> bool:
        facts = {**layout.facts, "dtype": str(self.dtype)}
        self._done = self._is_done(facts, resumed)
        if self._done:
            return True
        with files.output_errors(self.part):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            there = resumed and self._is_ours(facts)
            if not there:
                shutil.rmtree(self.part, ignore_errors=True)
                self._create(layout, facts)
        if self._keeps_features:
            self._features = self.zarr.open_array(self.part / FEATURES, mode="r+")
        return there

    def _is_done(self, facts: dict[str, Any], resumed: bool) -> bool:
        """Whether a pass was killed when its store stood already; another store is refused."""
        if not os.path.lexists(self.path) or self._overwrite:
            return False
        try:
            there = dict(self.zarr.open_group(self.path, mode="r").attrs)[FACTS]
        except (OSError, ValueError, KeyError) as error:
            raise OutputError(
                f"cannot write {self.path}: something else is there; choose another name."
            ) from error
        if there == facts:
            if resumed:
                return True
            raise AlreadyThereError(
                f"{self.path} holds these features already; --overwrite computes them anew."
            )
        other = next(name for name in facts | there if there.get(name) != facts.get(name))
        raise OutputError(
            f"{self.path} holds features of other {other} ({shown(there.get(other))}, now "
            f"{shown(facts.get(other))}); choose another name, or --overwrite it."
        )

    def _is_ours(self, facts: dict[str, Any]) -> bool:
        try:
            root = self.zarr.open_group(self.part, mode="r")
            return dict(root.attrs).get(FACTS) == facts and (
                not self._keeps_features or FEATURES in root
            )
        except (OSError, ValueError, KeyError):
            return False

    def _create(self, layout: Layout, facts: dict[str, Any]) -> None:
        root = self.zarr.create_group(self.part)
        if layout.mask is not None:
            root.create_array(MASK, data=layout.mask, dimension_names=["y", "x"])
        if self._keeps_features:
            side = layout.tile
            chunk = _CHUNK if side % _CHUNK == 0 else side
            root.create_array(
                FEATURES,
                shape=(*layout.grid, layout.width),
                dtype=self.dtype,
                chunks=(chunk, chunk, layout.width),
                shards=(side, side, layout.width),
                compressors=[self.zarr.codecs.Crc32cCodec()],
                fill_value=0,
                dimension_names=["y", "x", "feature"],
            )
        root.attrs[FACTS] = facts  # last: with them the store is whole

    def add(self, row: int, column: int, features: Features) -> None:
        if self._features is None:
            return
        height, width = features.shape[:2]
        with files.output_errors(self.part):
            self._features[row : row + height, column : column + width] = features.astype(
                self.dtype
            )

    def finish(self, memory: CoreMemory | None) -> None:
        if self._done:
            return
        if memory is not None:
            memory.save(self.part / MEMORY)
        with files.output_errors(self.part):
            for file in sorted(self.part.rglob("*")):
                if file.is_file():
                    files.flush(file)
            remove_store(self.path)
            os.replace(self.part, self.path)  # noqa: PTH105
            files.flush_folder(self.path.parent)

    def close(self) -> None:
        self._features = None


def remove_store(path: Path) -> None:
    """Remove a store that was written here; a folder with anything else is refused."""
    if not path.exists():
        return
    found = {one.name for one in path.iterdir()}
    if found - {"zarr.json", FEATURES, MASK, MEMORY}:
        raise OutputError(f"{path} is a folder with other things; choose another name.")
    shutil.rmtree(path)
