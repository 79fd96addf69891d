"""A command's worth of work: how a picture is opened, masked, computed and written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed import ProcessGroup

from veca._util import files
from veca.errors import LargeError, OutputError
from veca.large.masks import mask_of
from veca.large.picture import patch_grid
from veca.large.plan import Estimate, Mask
from veca.large.sources import open_source
from veca.large.sweep import (
    COMMON_CONTEXT,
    LargeOutput,
    check_pass,
    estimate,
    features,
)
from veca.large.view import PictureLook, PictureView
from veca.large.work import Progress
from veca.large.writers import TileWriter, as_writer
from veca.large.writers.geotiff import GeoTiffWriter
from veca.large.writers.hdf5 import Hdf5Writer
from veca.large.writers.zarr_store import ZarrWriter
from veca.model import Veca


@dataclass(frozen=True)
class LargeJob:
    """What `veca large` is asked for, but for the picture and the weights; see there."""

    out: Path
    look: PictureLook
    mask: str | None = None
    context: str = COMMON_CONTEXT
    cores: int | None = None
    keep: float | None = None
    width: str = "native"
    dtype: str | None = None
    memory: str = "1GB"
    spill: str = "auto"
    state: Path | None = None
    components: int = 3
    head: Path | None = None
    pool: int = 1
    keep_features: bool = True
    overwrite: bool = False

    def open(self, path: str | os.PathLike[str]) -> PictureView:
        """The picture, as it is to be looked at."""
        return PictureView(open_source(path), self.look)

    def mask_for(self, picture: PictureView, model: Veca) -> Mask | None:
        """Which patches are computed."""
        if self.mask is None:
            return None
        found = mask_of(picture, self.mask, model.config.patch_size)
        if not found.any():
            raise LargeError(f"the mask {self.mask} leaves no patch of the picture.")
        return found

    def check(self, model: Veca) -> None:
        """Refuse settings that do not go together."""
        check_pass(model, self.context, self.keep, self.width, self.mask)
        if not self.keep_features and self.context in ("tile", "tile+overview"):
            raise LargeError(
                f"context={self.context!r} leaves no core memory of the whole picture, so nothing "
                "would be kept; keep the features, or choose the context image or overview."
            )

    def estimate(self, model: Veca, picture: PictureView, mask: Mask | None) -> Estimate:
        """What `run` will take; InputError or LargeError where it would refuse."""
        self.check(model)
        found = estimate(
            model,
            picture,
            self.out,
            cores=self.cores,
            context=self.context,
            mask=mask,
            memory=self.memory,
            spill=self.spill,
            state=self.state,
        )
        c = model.config
        numbers = c.feature_width if self.width == "projected" else c.width
        each = numbers * (4 if (self.dtype or "float16") == "float32" else 2)
        total = found.grid[0] * found.grid[1] * each
        return replace(found, feature_bytes=total if self.keep_features else 0)

    def run(
        self,
        model: Veca,
        picture: PictureView,
        mask: Mask | None,
        *,
        group: ProcessGroup | None = None,
        progress: Progress | None = None,
    ) -> LargeOutput:
        """Compute and write the features."""
        self.check(model)
        writer = self._writer()
        return features(
            model,
            picture,
            writer,
            cores=self.cores,
            context=self.context,
            keep=self.keep,
            width=self.width,
            mask=mask,
            memory=self.memory,
            spill=self.spill,
            state=self.state,
            progress=progress,
            group=group,
        )

    def _writer(self) -> TileWriter:
        path, suffix = files.place_for(self.out), self.out.suffix.lower()
        kinds: dict[str, Callable[[], TileWriter]] = {
            ".zarr": lambda: ZarrWriter(
                path,
                self.dtype or "float16",
                features=self.keep_features,
                overwrite=self.overwrite,
            ),
            ".h5": lambda: Hdf5Writer(path, self.dtype or "float16", pool=self.pool),
            ".tif": lambda: GeoTiffWriter(path, components=self.components, head=self.head),
        }
        for name, kind, given in (
            ("--head", ".tif", self.head is not None),
            ("--pool", ".h5", self.pool != 1),
            ("--no-features", ".zarr", not self.keep_features),
        ):
            if given and suffix != kind:
                raise OutputError(f"{name} is for an output that ends in {kind}, got {path}.")
        writer = kinds[suffix]() if suffix in kinds else as_writer(path, self.dtype)
        if suffix != ".zarr" and path.exists() and not self.overwrite:
            raise OutputError(f"{path} is there already; choose another name, or --overwrite it.")
        return writer


def describe(picture: PictureView, patch_size: int) -> str:
    """A picture in a line, its width before its height as in `--region`."""
    height, width = picture.shape
    rows, columns = patch_grid(picture, patch_size)
    levels = len(picture.source.levels)
    where = f", level {picture.level} of {levels}" if levels > 1 else ""
    size = "" if picture.microns is None else f", {_length(max(picture.microns))} a pixel"
    return (
        f"{picture.source.path}: {width} x {height} pixels{where}{size}; {columns} x {rows} patches"
    )


def _length(microns: float) -> str:
    return f"{microns / 1e6:.3g} m" if microns >= 1e4 else f"{microns:.3g} micrometres"
