"""Small images in every format that is read here, as bytes: what image mutants are made of."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, features

from veca.images.formats import HEIC, is_readable

SIZE = (64, 48)


def photo(mode: str = "RGB", size: tuple[int, int] = SIZE) -> Image.Image:
    """Smooth colours and some noise."""
    rows, columns = np.mgrid[: size[1], : size[0]]
    rng = np.random.default_rng(0)
    shades = [rows * 4 + columns, rows + columns * 3, rows * columns // 8]
    pixels = (np.stack(shades, -1) + rng.integers(0, 20, (*rows.shape, 3))) % 256
    image = Image.fromarray(pixels.astype(np.uint8))
    if mode == "F":
        return Image.fromarray((pixels[..., 0] / 255).astype(np.float32))
    if mode == "I;16":
        return Image.fromarray((pixels[..., 0] * 200).astype(np.uint16))
    return image.convert(mode)


def _saved(format: str, mode: str = "RGB", **options: Any) -> Callable[[], bytes]:
    def make() -> bytes:
        file = io.BytesIO()
        photo(mode).save(file, format, **options)
        return file.getvalue()

    return make


def _exif() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "a camera"
    return exif.tobytes()


def _frames() -> dict[str, Any]:
    return {"save_all": True, "append_images": [photo().rotate(90), photo().rotate(180)]}


_MAKERS: dict[str, Callable[[], bytes]] = {
    "jpeg-baseline": _saved("JPEG"),
    "jpeg-progressive": _saved("JPEG", progressive=True, exif=_exif()),
    "jpeg-grey": _saved("JPEG", "L"),
    "jpeg-cmyk": _saved("JPEG", "CMYK"),
    "png-rgb": _saved("PNG"),
    "png-rgba": _saved("PNG", "RGBA"),
    "png-palette": _saved("PNG", "P", transparency=3),
    "png-16-bit": _saved("PNG", "I;16"),
    "png-1-bit": _saved("PNG", "1"),
    "png-animated": _saved("PNG", **_frames()),
    "gif": _saved("GIF", "P"),
    "gif-animated": _saved("GIF", "P", **_frames()),
    "bmp-24-bit": _saved("BMP"),
    "bmp-palette": _saved("BMP", "P"),
    "bmp-32-bit": _saved("BMP", "RGBA"),
    "ppm-colour": _saved("PPM"),
    "ppm-grey": _saved("PPM", "L"),
    "ppm-16-bit": _saved("PPM", "I;16"),
    "tiff-raw": _saved("TIFF"),
    "tiff-lzw": _saved("TIFF", compression="tiff_lzw"),
    "tiff-deflate": _saved("TIFF", "RGBA", compression="tiff_adobe_deflate"),
    "tiff-jpeg": _saved("TIFF", compression="jpeg"),
    "tiff-fax": _saved("TIFF", "1", compression="group4"),
    "tiff-16-bit": _saved("TIFF", "I;16"),
    "tiff-float": _saved("TIFF", "F"),
    "webp-lossy": _saved("WEBP"),
    "webp-lossless": _saved("WEBP", "RGBA", lossless=True),
    "webp-animated": _saved("WEBP", **_frames()),
    "avif": _saved("AVIF"),
    "avif-alpha": _saved("AVIF", "RGBA"),
}


def pictures() -> dict[str, bytes]:
    """By a name that begins with the format; those of libraries that are not there are left out."""
    made = {}
    for name, make in _MAKERS.items():
        if name.startswith("avif") and not features.check("avif"):
            continue
        made[name] = make()
    if is_readable(HEIC):
        import pillow_heif

        file = io.BytesIO()
        pillow_heif.from_pillow(photo()).save(file)
        made["heic"] = file.getvalue()
    return made


SUFFIX = {"jpeg": ".jpg", "tiff": ".tif"}


def suffix_of(format: str) -> str:
    kind = format.partition("-")[0]
    return SUFFIX.get(kind, f".{kind}")
