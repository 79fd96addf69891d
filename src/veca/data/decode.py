"""From encoded bytes to RGB pixels, without decoding more of a JPEG than is needed."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from PIL import Image

from veca.errors import BadImageError, DataError, ImageError, check_choice
from veca.images import SHAPES as SHAPES
from veca.images import pixel_limit
from veca.images.fit import centred_box
from veca.images.read import read_named

if TYPE_CHECKING:
    from veca.data.sources import ImageSource

GAP = 2.0
"""A JPEG is decoded at a reduced size (1/2, 1/4, 1/8) only as long as it stays this much larger
than the size wanted; the rest of the way is resampled. The views differ by a grey level or two."""

_ORIENTATION = 0x0112
_LYING = (5, 6, 7, 8)  # EXIF orientations that swap height and width


class EncodedImage:
    """An image of a set, decoded when asked and no larger than asked.

    Raises:
        BadImageError: it cannot be read, now or in `decode`.
    """

    size: tuple[int, int]
    """(height, width) of the whole upright image, in pixels."""

    def __init__(self, data: bytes, name: str) -> None:
        self.name, self._data = name, data
        self._jpeg = self._open_jpeg()
        if self._jpeg is None:
            self._image = self._whole()
            self.size = (self._image.height, self._image.width)
        else:
            width, height = self._jpeg.size
            self.size = (width, height) if _is_lying(self._jpeg) else (height, width)

    @classmethod
    def of(cls, source: ImageSource, index: int) -> EncodedImage:
        """Read one image of a set."""
        try:
            data = source.read(index)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            reason = "no such file" if missing else (error.strerror or str(error))
            raise BadImageError(source.name(index), reason) from error
        return cls(data, source.name(index))

    def decode(self, scale: float = 1.0) -> Image.Image:
        """The upright RGB image, each side at least `scale` times its full length.

        Only JPEG files come out smaller than they are.
        """
        if self._jpeg is None:
            return self._image
        jpeg, self._jpeg = self._jpeg, None
        if scale < 1:
            width, height = jpeg.size
            jpeg.draft(None, (math.ceil(width * scale), math.ceil(height * scale)))
        self._image = self._read(jpeg)
        return self._image

    def _open_jpeg(self) -> Image.Image | None:
        if self._data[:3] != b"\xff\xd8\xff":
            return None
        try:
            jpeg = Image.open(NamedBytes(self._data, self.name), formats=("JPEG",))
        except Exception:  # the ordinary way below finds the words for it
            return None
        jpeg.filename = self.name  # type: ignore[attr-defined]
        return jpeg

    def _whole(self) -> Image.Image:
        return self._read(NamedBytes(self._data, self.name))

    def _read(self, source: Image.Image | io.BytesIO) -> Image.Image:
        try:
            return read_named(source, self.name, pixel_limit(), keep_source=False)
        except ImageError as error:
            # Only the fault: the remedies in the message are for a single picture.
            reason = str(error).removeprefix(f"{self.name}: ").split(";")[0]
            raise BadImageError(self.name, reason) from error


class NamedBytes(io.BytesIO):
    """Bytes that error messages can call by name."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name


def _is_lying(image: Image.Image) -> bool:
    try:
        return image.getexif().get(_ORIENTATION) in _LYING
    except Exception:  # a broken EXIF block says nothing; `read_image` thinks so too
        return False


def check_shape(mode: str) -> None:
    """Refuse anything but the names in `SHAPES`."""
    check_choice("mode", mode, SHAPES, DataError)


def shaped(encoded: EncodedImage, size: int, mode: str) -> Image.Image:
    """Decode at a stored size (bicubic, antialiased).

    "short" makes the short side `size` pixels and keeps the aspect; it never enlarges. "square"
    cuts the largest centred square and makes it `size` x `size`; "squash" makes the whole image
    `size` x `size`, whatever its aspect.
    """
    check_shape(mode)
    image = encoded.decode(GAP * size / min(encoded.size))
    short = min(image.size)
    if mode == "squash":
        return image.resize((size, size), Image.Resampling.BICUBIC)
    if mode == "square":
        box = centred_box(image.size, (short, short))
        return image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    if min(encoded.size) <= size:
        return image
    # From the full size, so that a reduced decoding does not change the aspect.
    height, width = (max(1, round(side * size / min(encoded.size))) for side in encoded.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)
