"""Reading one image: any mode, bit depth and orientation becomes upright 8-bit RGB.

Colour profiles (ICC) are not applied: CMYK and LAB are converted with Pillow's built-in formulas.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from veca._util.files import open_file
from veca._util.room import room_for
from veca.errors import ImageError, whole
from veca.images.formats import FORMATS, HEADER, KINDS, check_name, formats_for, is_readable

MAX_PIXELS = 178_956_970
"""The count at which Pillow itself refuses to open a file, with its default settings."""
MAX_PIXELS_VARIABLE = "VECA_MAX_PIXELS"
"""The environment variable, which --max-pixels sets, that puts another limit in place of it."""

# What undoes each EXIF orientation; 1 and anything unknown is upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PNG = b"\x89PNG\r\n\x1a\n"
_BAND = 2**22  # pixels that are converted at a time
_WORKING = {"WEBP": 12, "AVIF": 6, "HEIF": 4, "TIFF": 4}
"""Bytes a pixel that a decoder holds beside the pixels themselves."""
# `warnings.catch_warnings` changes process-wide state: two reader threads must not interleave.
_OPEN_LOCK = threading.Lock()

Source: TypeAlias = (
    "str | os.PathLike[str] | bytes | BinaryIO | Image.Image | np.ndarray[Any, Any] | Tensor"
)


def read_image(source: Source, *, max_pixels: int | None = None) -> Image.Image:
    """Read one image as an upright 8-bit RGB image without metadata; the source is not changed.

    `source` is a path, encoded bytes, a binary file object (read from its start), a Pillow image,
    an array [H, W, 3] or a tensor [3, H, W]: uint8, or float in 0..1, which is rounded to 8 bit.

    JPEG, PNG, GIF, BMP, PPM, WebP and TIFF are always read; AVIF where Pillow was built with it,
    HEIC with the extra `heic`, JPEG XL with a plugin for Pillow.

    The EXIF orientation is applied (a broken EXIF block counts as none). Transparency is
    composited on white. 16-bit greyscale (modes I and I;16) is taken as 0..65535 and float
    greyscale (mode F) as 0..1; values outside that range are an error, never clipped. Of a file
    with several frames the first is read; of a Pillow image the frame it stands at.

    An image of more than `max_pixels` (by default `pixel_limit()`; a WebP four sevenths of that)
    is refused before it is decoded. Large images are decoded a few at a time, however many threads
    read: see `veca._util.room`. Above twice `PIL.Image.MAX_IMAGE_PIXELS` Pillow's own limit has to
    be raised as well, by the caller; where $VECA_MAX_PIXELS sets the limit, both are raised.

    Raises:
        ImageError: it cannot be read; the message names the source, the fault and the remedy.
    """
    return read_named(source, name_of(source), checked_limit(max_pixels))


def pixel_limit(default: int = MAX_PIXELS) -> int:
    """The most pixels of an image where no limit is given: $VECA_MAX_PIXELS, or the default."""
    text = os.environ.get(MAX_PIXELS_VARIABLE)
    if text is None:
        return default
    return positive(int(text) if text.isascii() and text.isdigit() else text, MAX_PIXELS_VARIABLE)


def checked_limit(max_pixels: int | None) -> int:
    """The limit that a caller asked for, or `pixel_limit()`."""
    return pixel_limit() if max_pixels is None else positive(max_pixels, "max_pixels")


def name_of(source: object, index: int | None = None) -> str:
    """What messages call a source: its path if it has one, else its kind (and place in a batch)."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source) or "''"
    path = getattr(source, "filename", None) or getattr(source, "name", None)
    if isinstance(path, (str, Path)):
        return str(path)
    place = "" if index is None else f" at index {index}"
    return f"<{type(source).__name__}{place}>"


def read_named(
    source: Source, name: str, max_pixels: int, *, keep_source: bool = True
) -> Image.Image:
    """`read_image`, with what messages are to call the source.

    Args:
        keep_source: leave a Pillow image as it is; without, it may be used up.
    """
    if isinstance(source, (str, os.PathLike)):
        check_name(source)
    try:
        with contextlib.ExitStack() as stack:
            copy = False
            if isinstance(source, Image.Image):
                image, copy = source, keep_source
                _check_depth(image)
            elif isinstance(source, (np.ndarray, Tensor)):
                image = _from_array(source)
            else:
                image = _open(_stream(source, stack))
                if image.format == "PNG":
                    # Not the source: Pillow has read it whole if it is a stream.
                    check_chunks(image.fp)  # type: ignore[attr-defined]
            most = (
                max_pixels * 4 // 7 if image.format == "WEBP" else max_pixels
            )  # takes more memory
            check_area(image.width, image.height, most)
            with room_for(_decoded_bytes(image)):
                return _to_rgb(_upright(image, copy))
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error.__cause__
    except Image.DecompressionBombError as error:
        # Pillow's limit struck first; it cannot be lifted for one file, only for the process.
        raise ImageError(
            f"{name}: too large to decode safely ({str(error).rstrip('.')}); scale the file down, "
            f"or, if you trust it, raise PIL.Image.MAX_IMAGE_PIXELS and max_pixels "
            f"(--max-pixels raises both)"
        ) from error
    except Exception as error:  # Pillow's decoders raise almost any type on a damaged file
        raise ImageError(
            f"{name}: cannot be decoded ({str(error) or type(error).__name__}), it may be damaged "
            f"or incomplete; replace it"
        ) from error


def _stream(source: object, stack: contextlib.ExitStack) -> BinaryIO:
    """Return the source's bytes as a stream; `stack` closes what is opened here."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return io.BytesIO(source)
    if isinstance(source, (str, os.PathLike)):
        if os.fspath(source) == "":  # Path("") would be the current folder
            raise ImageError("an empty path names no file; check the path")
        path = Path(source)
        if path.is_dir():  # not left to open(): Windows calls this "permission denied"
            raise ImageError(
                "is a folder, expected an image file; veca.images.find_images lists those in it"
            )
        try:
            return stack.enter_context(open_file(path))
        except FileNotFoundError as error:
            raise ImageError("no such file; check the path") from error
        except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
            reason = getattr(error, "strerror", None) or error
            raise ImageError(f"cannot be opened ({reason}); check path and permissions") from error
    if isinstance(source, io.TextIOBase):
        raise ImageError("the file is open in text mode; open it with mode 'rb'")
    if not callable(getattr(source, "read", None)):
        raise ImageError(
            f"cannot read an image from {type(source).__name__}; pass a path, bytes, a binary file "
            f"object, a Pillow image, an array [H, W, 3] or a tensor [3, H, W]"
        )
    return cast(BinaryIO, source)


def _open(stream: BinaryIO) -> Image.Image:
    """Parse the header; no pixel is decoded yet."""
    stream = _from_its_start(stream)
    header = stream.read(HEADER)
    try:
        with _OPEN_LOCK, warnings.catch_warnings(), _pillows_limit():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(stream, formats=formats_for(header))
    except UnidentifiedImageError as error:
        if not header:
            raise ImageError("is empty (0 bytes); replace the file") from error
        known = (*FORMATS, *(kind.name for kind in KINDS if is_readable(kind)))
        raise ImageError(
            f"not an image in a format read here ({', '.join(known)}), or its header is damaged; "
            f"convert it to PNG or JPEG"
        ) from error


def _from_its_start(stream: BinaryIO) -> BinaryIO:
    """The stream, or its bytes where it cannot go back, such as a pipe."""
    try:
        stream.seek(0)
    except (AttributeError, io.UnsupportedOperation):
        return io.BytesIO(stream.read())
    return stream


@contextlib.contextmanager
def _pillows_limit() -> Iterator[None]:
    """Pillow's own limit at least as high as that of the process; its caller holds the lock."""
    before = Image.MAX_IMAGE_PIXELS
    if before is not None and MAX_PIXELS_VARIABLE in os.environ:
        Image.MAX_IMAGE_PIXELS = max(before, -(-pixel_limit() // 2))
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def check_chunks(stream: BinaryIO) -> None:
    """ValueError for a PNG of which any part, up to the last, is not as its checksum says.

    Pillow looks at most of them, but not at those of the pixels, nor at what follows.
    """
    place = stream.tell()
    stream.seek(len(_PNG))
    kind = b""
    while kind != b"IEND":
        head = stream.read(8)
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        checksum = zlib.crc32(kind)
        while length and (part := stream.read(min(length, 2**20))):
            checksum, length = zlib.crc32(part, checksum), length - len(part)
        recorded = stream.read(4)
        if length or len(recorded) < 4:
            raise ValueError("it ends before its last part")
        if int.from_bytes(recorded, "big") != checksum:
            raise ValueError(f"wrong checksum of its part {kind.decode('ascii', 'replace')}")
    stream.seek(place)


def _decoded_bytes(image: Image.Image) -> int:
    """About what the memory will grow by while an image is decoded and made upright RGB."""
    stored = 1 if image.mode in ("1", "L", "P") else 4
    each = stored + _WORKING.get(image.format or "", 0)
    if image.info.get("progressive"):
        each += 6  # its coefficients, all of them before the first pixel
    each += 4  # turned, or converted; never both at once
    return image.width * image.height * each


def check_area(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"has no pixels ({height} x {width}); expected at least 1 x 1")
    if width * height > max_pixels:
        raise ImageError(
            f"{height} x {width} is {width * height:,} pixels, more than the limit "
            f"max_pixels={max_pixels:,}; scale it down, or raise max_pixels (--max-pixels) if you "
            f"trust the image"
        )


def _check_depth(image: Image.Image) -> None:
    """Refuse integers made in memory that may be of 8 bit: as 16-bit ones they would be black.

    Of a file the format tells the depth.
    """
    if image.mode == "I" and image.format is None and 0 not in image.size:
        values = np.asarray(image)
        high = int(values.max())
        if values.min() >= 0 and 0 < high <= 255:
            raise ImageError(
                f"greyscale of mode I holds values up to {high}, of 8 bit or very dark ones of 16; "
                "say which, with image.convert('L') or image.convert('I;16')"
            )


def _from_array(source: np.ndarray[Any, Any] | Tensor) -> Image.Image:
    """Wrap [H, W, 3] (numpy) or [3, H, W] (tensor), uint8 or float in 0..1, as a Pillow image."""
    is_tensor = isinstance(source, Tensor)
    kind, expected = ("tensor", "[3, H, W]") if is_tensor else ("array", "[H, W, 3]")
    shape = list(source.shape)
    values = source.detach().cpu() if isinstance(source, Tensor) else source
    is_float = (
        values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"
    )
    if not is_float and str(source.dtype) not in ("torch.uint8", "uint8"):
        raise ImageError(
            f"{kind} of dtype {source.dtype}, expected uint8 {expected} with values 0..255, or "
            f"float with values 0..1; convert it to one of these"
        )
    if len(shape) != 3 or shape[0 if is_tensor else 2] != 3:
        fix = "convert it to three RGB channels"
        if len(shape) == 4:
            fix = "pass a batch as a list of images: list(batch)"
        elif len(shape) == 3 and shape[2 if is_tensor else 0] == 3:
            fix = "permute(2, 0, 1) it" if is_tensor else "transpose(1, 2, 0) it"
        raise ImageError(f"{kind} of shape {shape}, expected {expected}; {fix}")
    if 0 in shape:
        raise ImageError(f"{kind} of shape {shape} has no pixels; expected at least 1 x 1")
    if isinstance(values, Tensor):
        # NumPy has no bfloat16.
        values = (values.float() if is_float else values).permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(_to_8_bit(values) if is_float else values))


def _to_8_bit(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Floats in 0..1 as 0..255, to the nearest; a rounding error beyond either end is none."""
    scaled = np.rint(values.astype(np.float32) * 255)
    low, high = values.min().item(), values.max().item()
    if not 0 <= scaled.min() <= scaled.max() <= 255:  # also false for NaN
        fix = "scale it to 0..1"
        if low >= 0:
            fix = "divide it by 255" if high <= 255 else fix
        elif np.isfinite([low, high]).all():
            fix = "scale it to 0..1, or, if it is normalised already, pass it to the model as it is"
        raise ImageError(f"float values {low:g}..{high:g}, expected 0..1; {fix}")
    return scaled.astype(np.uint8)


def _upright(image: Image.Image, copy: bool) -> Image.Image:
    """Return an image, turned as its EXIF orientation says; a copy if need be.

    Not ImageOps.exif_transpose: that fails on a photo with good pixels and a broken EXIF block.
    """
    image.load()  # first, since a PNG may carry its EXIF block after the pixels
    try:
        turn = _TURNS.get(image.getexif().get(0x0112, 1))
    except Exception:  # unreadable EXIF data says nothing about the orientation
        turn = None
    if turn is not None:
        upright = image.transpose(turn)
        if not copy:
            image.close()  # the pixels as they lay, which are no longer needed
        return upright
    return image.copy() if copy else image


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB on white; `image` is already ours to change."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_grey8(image)
    elif image.mode == "La":  # Pillow converts premultiplied grey to LA only
        image = image.convert("LA")
    if image.has_transparency_data:
        image = _in_bands(image, "RGB", _on_white)
    if image.mode != "RGB":
        image = image.convert("RGB")
    if type(image) is not Image.Image:  # the class of a file's format, which knows its file
        image = image._new(image.im)
    # Stale keys (a transparent colour, an orientation) would act again on a second read.
    image.info.clear()
    return image


def _on_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    white.alpha_composite(rgba)
    return white.convert("RGB")


def _in_bands(
    image: Image.Image, mode: str, change: Callable[[Image.Image], Image.Image]
) -> Image.Image:
    """What `change` makes of an image, pixel by pixel; in strips, so that it is not there twice."""
    if image.width * image.height <= _BAND:
        return change(image)
    whole = Image.new(mode, image.size)
    for top, part in _bands(image):
        whole.paste(change(part), (0, top))
    return whole


def _bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """An image in strips of a few megapixels, each with the row it begins at."""
    rows = max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _to_grey8(image: Image.Image) -> Image.Image:
    """Scale 16-bit (0..65535) or float (0..1) greyscale to 8 bit, rounding to nearest.

    Pillow's own convert() clips instead: everything above 255 would turn white.
    """
    limits = [(x.min(), x.max()) for x in (np.asarray(part) for _, part in _bands(image))]
    low, high = np.min(limits).item(), np.max(limits).item()  # NaN if there is any
    top = 1 if image.mode == "F" else 65535
    if not 0 <= low <= high <= top:  # also false for NaN
        raise ImageError(
            f"greyscale of mode {image.mode} holds values {low:g}..{high:g}, expected 0..{top}; "
            f"rescale it to 8 bit before reading it here"
        )
    # A 16-bit PNG may declare one grey as transparent.
    return _in_bands(image, "L", partial(_grey8, transparent=image.info.get("transparency")))


def _grey8(image: Image.Image, *, transparent: object) -> Image.Image:
    values = np.asarray(image)
    if image.mode == "F":
        grey = np.rint(values * 255.0).astype(np.uint8)
    else:
        grey = ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 / 255 == 257
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey)


def positive(value: Any, what: str) -> int:
    """Return a positive integer, or say that it is not one (bool and float never count)."""
    number = whole(value)
    if number is None or number < 1:
        raise ImageError(f"{what} must be a whole number of at least 1, got {value!r}")
    return number
