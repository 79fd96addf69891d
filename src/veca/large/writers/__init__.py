"""Where features of large pictures go. `TileWriter` is all that a pass knows of one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from veca._util import files
from veca.core_memory import CoreMemory
from veca.errors import OutputError, check_choice
from veca.large.picture import Picture
from veca.large.plan import Mask

Features = np.ndarray[Any, Any]
DTYPES = ("float16", "float32")


class Layout(NamedTuple):
    """What a pass tells a writer before the first tile."""

    grid: tuple[int, int]
    """(h, w): patches down and across."""
    width: int
    """Numbers of a patch's features."""
    tile: int
    """Patches a side of a tile; those at the edges may be smaller."""
    patch_size: int
    picture: Picture
    mask: Mask | None
    facts: Mapping[str, Any]
    """JSON: how the features are made."""


@runtime_checkable
class TileWriter(Protocol):
    """Takes the features of a grid of patches, tile by tile, each once or again after a stop."""

    def begin(self, layout: Layout, resumed: bool) -> bool:
        """Before the first tile.

        Args:
            resumed: an earlier pass was stopped; tiles that it added are not added again if they
                are still there, which the answer says.
        """
        ...

    def add(self, row: int, column: int, features: Features) -> None:
        """The features [h, w, D'] of a tile whose first patch is there; 0 where masked."""
        ...

    def finish(self, memory: CoreMemory | None) -> None:
        """All tiles are there; those that never came are masked."""
        ...

    def close(self) -> None:
        """After `finish`, or a failure."""
        ...


def as_writer(
    out: TileWriter | str | os.PathLike[str] | None, dtype: str | None = None
) -> TileWriter:
    """A writer, from one, a path whose name says what it is, or None: in memory.

    Args:
        dtype: of the features; None: float32 in memory and in .npy, float16 elsewhere.
    """
    from veca.large.writers.arrays import ArrayWriter, NumpyWriter
    from veca.large.writers.geotiff import GeoTiffWriter
    from veca.large.writers.hdf5 import Hdf5Writer
    from veca.large.writers.zarr_store import ZarrWriter

    if dtype is not None:
        check_choice("dtype of the features", dtype, DTYPES)
    if out is None:
        return ArrayWriter(dtype or "float32")
    if isinstance(out, (str, os.PathLike)):
        path = files.place_for(out)
        kinds: dict[str, Any] = {
            ".npy": lambda: NumpyWriter(path, dtype or "float32"),
            ".zarr": lambda: ZarrWriter(path, dtype or "float16"),
            **dict.fromkeys((".h5", ".hdf5"), lambda: Hdf5Writer(path, dtype or "float16")),
            **dict.fromkeys((".tif", ".tiff"), lambda: GeoTiffWriter(path)),
        }
        if path.suffix.lower() not in kinds:
            raise OutputError(
                f"cannot write {path}: features of a large picture end in {', '.join(kinds)}."
            )
        made: TileWriter = kinds[path.suffix.lower()]()
        return made
    if isinstance(out, TileWriter):
        return out
    raise OutputError(f"out must be a path, a writer or None, got {type(out).__name__}.")


def place_of(writer: TileWriter) -> Path | None:
    """Where a writer writes, if it says so: the state of a pass lies beside it."""
    found = getattr(writer, "path", None)
    return found if isinstance(found, Path) else None
