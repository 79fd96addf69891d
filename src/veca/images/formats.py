"""Which files are images here, and words for those that are not.

Some kinds always are. AVIF is one where Pillow was built with it, HEIC with the library of the
extra `heic`, JPEG XL with a plugin for Pillow; each plugin is imported at the first file that
needs it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from PIL import Image, features

from veca._util.extras import find_installation, require
from veca.errors import ImageError, MissingExtraError, VecaError

_SUFFIXES = "jpg jpeg jpe jfif png apng webp bmp tif tiff gif ppm pgm pbm pnm"
EXTENSIONS = frozenset(f".{suffix}" for suffix in _SUFFIXES.split())
"""Suffixes of files in a folder that count as images everywhere, in lower case; `extensions` has
those of the formats that this machine reads beside them."""

# Closed lists, so that a file cannot choose a rarer decoder (EPS, for one, starts Ghostscript).
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF")
"""What Pillow calls the formats that are always read."""

_VIDEO_SUFFIXES = "mp4 m4v mov avi mkv webm mpg mpeg wmv flv ogv 3gp mts m2ts"
_VIDEOS = frozenset(f".{suffix}" for suffix in _VIDEO_SUFFIXES.split())
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://|(?P<cut>https?|ftp|s3|gs):/")
HEADER = 64
"""Bytes at the start of a file that say what kind it is."""


class Kind(NamedTuple):
    """A format of images that needs more than every Pillow has."""

    name: str
    suffixes: tuple[str, ...]
    plugin: str | None
    """The library that makes Pillow read it; None: Pillow itself, where it was built with it."""


AVIF = Kind("AVIF", (".avif",), None)
HEIC = Kind("HEIC", (".heic", ".heif", ".hif"), "pillow_heif")
JPEG_XL = Kind("JPEG XL", (".jxl",), "pillow_jxl")
KINDS = (AVIF, HEIC, JPEG_XL)
VIDEO = "a video"

_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), AVIF),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"), HEIC),
}
_STARTS: dict[bytes, Kind | str] = {
    b"\xff\x0a": JPEG_XL,
    b"\x00\x00\x00\x0cJXL \r\n\x87\n": JPEG_XL,
    b"\x1aE\xdf\xa3": VIDEO,  # Matroska, WebM
    b"FLV\x01": VIDEO,
    b"\x00\x00\x01\xba": VIDEO,  # MPEG
}


def extensions() -> frozenset[str]:
    """Suffixes of files in a folder that count as images on this machine, in lower case."""
    return _extensions(len(Image.EXTENSION))  # which grows when a plugin is registered


@functools.cache
def _extensions(registered: int) -> frozenset[str]:
    more = (suffix for kind in KINDS if is_readable(kind) for suffix in kind.suffixes)
    return EXTENSIONS.union(more)


def is_readable(kind: Kind) -> bool:
    """Whether Pillow reads such files, or a library is installed that makes it do so."""
    if _registered(kind) is not None:
        return True
    if kind.plugin is None:
        return "avif" in features.modules and bool(features.check("avif"))
    return importlib.util.find_spec(kind.plugin) is not None


def _registered(kind: Kind) -> str | None:
    """What Pillow calls a format, once a plugin has made it known."""
    return Image.EXTENSION.get(kind.suffixes[0])


def kind_of(header: bytes) -> Kind | str | None:
    """The kind that the start of a file shows, if it is one of `KINDS` or a video."""
    if header[4:8] == b"ftyp":
        size = max(16, min(int.from_bytes(header[:4], "big"), HEADER))
        brands = [header[8:12], *(header[i : i + 4] for i in range(16, size, 4))]
        known = next((_BRANDS[brand] for brand in brands if brand in _BRANDS), None)
        return known or (HEIC if brands[0] in (b"mif1", b"msf1") else VIDEO)
    if header[:4] == b"RIFF" and header[8:11] == b"AVI":
        return VIDEO
    return next((kind for start, kind in _STARTS.items() if header.startswith(start)), None)


def formats_for(header: bytes) -> tuple[str, ...]:
    """What Pillow calls the formats that a file with such a start may be opened as.

    Raises:
        ImageError: it is a video, or of a kind that cannot be read on this machine.
    """
    kind = kind_of(header)
    if kind is None:
        return FORMATS
    if isinstance(kind, str):
        raise ImageError(_no_video("FILE"))
    if _registered(kind) is None:
        _register(kind)
    name = _registered(kind)
    if name is None:
        raise ImageError(advice(kind))
    return (name,)


def _register(kind: Kind) -> None:
    """Make Pillow know a format."""
    if kind.plugin is None:
        Image.init()  # Pillow's own
        return
    try:
        plugin = require(kind.plugin, f"reading {kind.name} images")
    except MissingExtraError as error:
        raise ImageError(str(error)) from error
    if kind is HEIC:
        plugin.register_heif_opener()


def advice(kind: Kind) -> str:
    """What it takes to read a kind of images that cannot be read now."""
    if kind.plugin is None:
        return (
            f"reading {kind.name} images needs Pillow 11.3 or newer, built with libavif; install "
            f"it with: {find_installation().installer} --upgrade pillow"
        )
    try:
        require(kind.plugin, f"reading {kind.name} images")
    except MissingExtraError as error:
        return str(error)
    return f"{kind.plugin} does not make Pillow read {kind.name} images; upgrade it"


def advice_for(suffix: str) -> str | None:
    """What to do about files in a folder that are passed over, where something can be done."""
    if suffix in _VIDEOS:
        return _no_video(f"FILE{suffix}")
    kind = next((kind for kind in KINDS if suffix in kind.suffixes), None)
    return None if kind is None or is_readable(kind) else advice(kind)


def check_name(source: str | os.PathLike[str], error: type[VecaError] = ImageError) -> None:
    """Refuse what cannot be an image file whatever it holds: the address of one, or a video.

    Args:
        error: the class of what is raised.
    """
    name = os.fspath(source)
    address = _ADDRESS.match(name) if isinstance(name, str) else None
    if address is not None:
        if address["cut"]:  # a path forgets one of two slashes
            name = name.replace(":/", "://", 1)
        raise error(
            f"{name}: an address, and images are read from disk, not from a network; download it "
            "first, then give the file or its folder."
        )
    if isinstance(name, str) and is_video(name) and not Path(name).is_dir():
        raise error(f"{name}: {_no_video(name)}.")


def is_video(name: str) -> bool:
    """Whether a file is a video by its suffix."""
    return os.path.splitext(name)[1].lower() in _VIDEOS  # noqa: PTH122


def _no_video(name: str) -> str:
    frames = f"ffmpeg -i {shlex.quote(name)} frame-%06d.png"
    return f"{VIDEO}, and only images are read; take its frames out first, such as with: {frames}"
