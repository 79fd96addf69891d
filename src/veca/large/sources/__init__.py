"""Files and folders that pictures are read from; each kind has a file here."""

from __future__ import annotations

import os
from pathlib import Path

from veca._util.files import check_regular
from veca.errors import ImageError, LargeError, MissingExtraError
from veca.images.formats import check_name
from veca.large.sources import geo, slide
from veca.large.sources.folders import ZOOMIFY, DeepZoomSource, ZoomifySource
from veca.large.sources.ome_zarr import ZarrSource, is_zarr
from veca.large.sources.plain import NumpySource, PillowSource
from veca.large.sources.source import Place, Source, damaged
from veca.large.sources.tiff import TiffSource, tiff_library

__all__ = ["Place", "Source", "open_source"]

_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_GEO_TAGS = (33550, 34264, 34735)
"""A scale, a transformation, a coordinate system."""


def open_source(place: str | os.PathLike[str]) -> Source:
    """The source of a path, chosen by what is there; nothing but its head is read.

    Raises:
        LargeError: it is missing, damaged, or of a kind that is not read.
        MissingExtraError: a library is needed; the message says how to get it.
    """
    check_name(place, LargeError)
    path = Path(place).expanduser()
    try:
        check_regular(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LargeError(f"cannot open the picture {path} ({reason}); check the path.") from error
    if path.is_dir():
        return _of_folder(path)
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return NumpySource(path)
    if suffix == ".dzi":
        return DeepZoomSource(path)
    if path.name == ZOOMIFY:
        return ZoomifySource(path.parent)
    if suffix in slide.SUFFIXES:
        return slide.SlideSource(path)
    if suffix in geo.SUFFIXES:
        return geo.GeoSource(path)
    with path.open("rb") as file:
        start = file.read(4)
    if start in _TIFF:
        return _of_tiff(path)
    return _pillow(path)


def _of_folder(path: Path) -> Source:
    if is_zarr(path):
        return ZarrSource(path)
    if (path / ZOOMIFY).is_file():
        return ZoomifySource(path)
    raise LargeError(
        f"{path} is a folder, and neither Zarr nor Zoomify ({ZOOMIFY}); name a picture, such as a "
        ".dzi file or a .zarr folder."
    )


def _of_tiff(path: Path) -> Source:
    try:
        tifffile = tiff_library()
    except MissingExtraError as missing:
        try:
            return _pillow(path)  # one that is small
        except LargeError:
            raise missing from None
    try:
        with tifffile.TiffFile(path) as file:
            tags = file.pages[0].tags
            if any(tag in tags for tag in _GEO_TAGS):
                return geo.GeoSource(path)
    except (LargeError, MissingExtraError):
        raise
    except Exception as error:
        raise damaged(path, error) from error
    return TiffSource(path)


def _pillow(path: Path) -> Source:
    try:
        return PillowSource(path)
    except ImageError as error:
        raise LargeError(str(error)) from error
