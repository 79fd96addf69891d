"""Zarr arrays, and OME-Zarr pyramids of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from veca._util.extras import require
from veca.errors import LargeError
from veca.large.sources.source import Pixels, Source, damaged, file_identity

_MICRONS = {
    "meter": 1e6,
    "centimeter": 1e4,
    "millimeter": 1e3,
    "micrometer": 1.0,
    "nanometer": 1e-3,
}
_NODES = ("zarr.json", ".zarray", ".zgroup")


def is_zarr(path: Path) -> bool:
    """Whether a folder is an array or a group of Zarr."""
    return any((path / name).is_file() for name in _NODES)


class ZarrSource(Source):
    """An array [H, W], [H, W, bands] or [bands, H, W], or the first pyramid of an OME-Zarr."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        zarr = require("zarr", "reading Zarr", "large")
        try:
            root = zarr.open(path, mode="r")
            if hasattr(root, "shape"):
                arrays, axes = [root], _axes(root.shape)
            else:
                arrays, axes = self._pyramid(root)
        except LargeError:
            raise
        except Exception as error:
            raise damaged(path, error) from error
        self._arrays, self._axes = arrays, axes
        if set("yx") - set(axes) or any(
            arrays[0].shape[axes.index(a)] != 1 for a in axes if a in "tz"
        ):
            raise LargeError(
                f"{path}: its axes {axes} of {list(arrays[0].shape)} are no single picture; "
                "export one plane."
            )
        at = [axes.index(name) for name in "yx"]
        self.levels = [(array.shape[at[0]], array.shape[at[1]]) for array in arrays]

    def _pyramid(self, root: Any) -> tuple[list[Any], str]:
        facts = dict(root.attrs)
        found = facts.get("ome", facts).get("multiscales")
        if not found:
            raise LargeError(
                f"{self.path} is a group of Zarr without the multiscales of OME-Zarr; name one of "
                f"its arrays: {', '.join(sorted(root.array_keys())) or 'it has none'}."
            )
        scales = found[0]["datasets"]
        arrays = [root[scale["path"]] for scale in scales]
        listed = found[0].get("axes") or list("tczyx")[-arrays[0].ndim :]
        names = [axis if isinstance(axis, str) else axis["name"] for axis in listed]
        axes = "".join(names)
        first = [
            t["scale"]
            for t in scales[0].get("coordinateTransformations", ())
            if t.get("type") == "scale"
        ]
        units = [axis.get("unit", "") if isinstance(axis, dict) else "" for axis in listed]
        if first and all(units[axes.index(name)] in _MICRONS for name in "yx"):
            y, x = (first[0][axes.index(n)] * _MICRONS[units[axes.index(n)]] for n in "yx")
            self.microns = (float(y), float(x))
        return arrays, axes

    def read(self, level: int, top: int, left: int, height: int, width: int) -> Pixels:
        places: dict[str, Any] = {
            "y": slice(top, top + height),
            "x": slice(left, left + width),
            "c": slice(None),
        }
        found = np.asarray(self._arrays[level][tuple(places.get(a, 0) for a in self._axes)])
        kept = [name for name in self._axes if name in places]
        return found.transpose([kept.index(name) for name in "yxc" if name in kept])

    def identity(self) -> str:
        node = next(self.path / name for name in _NODES if (self.path / name).is_file())
        return file_identity(node)


def _axes(shape: tuple[int, ...]) -> str:
    if len(shape) == 2:
        return "yx"
    if len(shape) == 3:
        return "yxc" if shape[2] <= 16 else "cyx"
    return "?" * len(shape)
