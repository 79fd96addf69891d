"""Read images, fit them to the patch grid, and turn them into normalised tensors.

Only Pillow, numpy and torch are used. Sizes are always (height, width) in pixels. Colour profiles
(ICC) are not applied: CMYK and LAB are converted with Pillow's built-in formulas.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import math
import os
import re
import stat
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from veca.errors import ImageError, suggest, whole

__all__ = [
    "EXTENSIONS",
    "FITS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "MAX_PIXELS",
    "Preprocessed",
    "denormalize",
    "find_images",
    "normalize",
    "preprocess",
    "read_image",
    "target_size",
    "to_tensor",
]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""With `IMAGENET_MEAN`: of pixels in 0..1, by channel (R, G, B)."""
MAX_PIXELS = 178_956_970
"""The count at which Pillow itself refuses to open a file, with its default settings."""
_SUFFIXES = "jpg jpeg jpe jfif png apng webp bmp tif tiff gif ppm pgm pbm pnm"
EXTENSIONS = frozenset(f".{suffix}" for suffix in _SUFFIXES.split())
"""Suffixes of files in a folder that count as images, in lower case."""
FITS = ("resize", "pad", "crop", "error")
"""How an image comes onto the patch grid; see `target_size`."""

# A closed list, so that a file cannot choose a rarer decoder (EPS, for one, starts Ghostscript).
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF")
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
# `warnings.catch_warnings` changes process-wide state: two reader threads must not interleave.
_OPEN_LOCK = threading.Lock()

Source: TypeAlias = (
    "str | os.PathLike[str] | bytes | BinaryIO | Image.Image | np.ndarray[Any, Any] | Tensor"
)
Size: TypeAlias = "int | tuple[int, int] | None"
Box: TypeAlias = "tuple[int, int, int, int]"


# ---------------------------------------------------------------------------------------- reading


def read_image(source: Source, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read one image as an upright 8-bit RGB image without metadata; the source is not changed.

    `source` is a path, encoded bytes, a binary file object (read from its start), a Pillow image,
    a uint8 numpy array [H, W, 3] or a uint8 tensor [3, H, W].

    The EXIF orientation is applied (a broken EXIF block counts as none). Transparency is
    composited on white. 16-bit greyscale (modes I and I;16) is taken as 0..65535 and float
    greyscale (mode F) as 0..1; values outside that range are an error, never clipped. Of a file
    with several frames the first is read; of a Pillow image the frame it stands at.

    An image of more than `max_pixels` is refused before it is decoded. Above twice
    `PIL.Image.MAX_IMAGE_PIXELS` Pillow's own limit has to be raised as well, by the caller.

    Raises:
        ImageError: it cannot be read; the message names the source, the fault and the remedy.
    """
    return _read(source, _name(source), _whole(max_pixels, "max_pixels"))


def _name(source: object, index: int | None = None) -> str:
    """What messages call a source: its path if it has one, else its kind (and place in a batch)."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source) or "''"
    path = getattr(source, "filename", None) or getattr(source, "name", None)
    if isinstance(path, (str, Path)):
        return str(path)
    place = "" if index is None else f" at index {index}"
    return f"<{type(source).__name__}{place}>"


def _read(source: Source, name: str, max_pixels: int) -> Image.Image:
    try:
        with contextlib.ExitStack() as stack:
            if isinstance(source, Image.Image):
                image = source
                _check_depth(image)
            elif isinstance(source, (np.ndarray, Tensor)):
                image = _from_array(source)
            else:
                image = _open(_stream(source, stack))
            _check_area(image.width, image.height, max_pixels)
            return _to_rgb(_upright(image))
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error.__cause__
    except Image.DecompressionBombError as error:
        # Pillow's limit struck first; it cannot be lifted for one file, only for the process.
        raise ImageError(
            f"{name}: too large to decode safely ({str(error).rstrip('.')}); scale the file down, "
            f"or, if you trust it, raise PIL.Image.MAX_IMAGE_PIXELS and max_pixels"
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
            f"object, a Pillow image, a uint8 array [H, W, 3] or a uint8 tensor [3, H, W]"
        )
    return cast(BinaryIO, source)


def open_file(path: Path) -> BinaryIO:
    """Open a file to be read. A pipe or a device, which might wait for ever, is an OSError."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        reason = "a pipe, a device or a socket, where a file was expected"
        raise OSError(errno.EINVAL, reason, str(path))
    return path.open("rb")


def _open(stream: BinaryIO) -> Image.Image:
    """Parse the header; no pixel is decoded yet."""
    try:
        with _OPEN_LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(stream, formats=_FORMATS)
    except UnidentifiedImageError as error:
        with contextlib.suppress(OSError):  # a pipe cannot be looked at twice
            stream.seek(0)
            if not stream.read(1):
                raise ImageError("is empty (0 bytes); replace the file") from error
        raise ImageError(
            f"not an image in a format read here ({', '.join(_FORMATS)}), or its header is "
            f"damaged; convert it to PNG or JPEG"
        ) from error


def _check_area(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"has no pixels ({height} x {width}); expected at least 1 x 1")
    if width * height > max_pixels:
        raise ImageError(
            f"{height} x {width} is {width * height:,} pixels, more than the limit "
            f"max_pixels={max_pixels:,}; scale it down, or raise max_pixels if you trust the image"
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
    """Wrap uint8 [H, W, 3] (numpy) or [3, H, W] (tensor) as a Pillow image."""
    is_tensor = isinstance(source, Tensor)
    kind, expected = ("tensor", "[3, H, W]") if is_tensor else ("array", "[H, W, 3]")
    shape = list(source.shape)
    if str(source.dtype) not in ("torch.uint8", "uint8"):
        raise ImageError(
            f"{kind} of dtype {source.dtype}, expected uint8 {expected} with values 0..255; "
            f"scale it and convert it to uint8"
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
    if isinstance(source, Tensor):
        source = source.detach().cpu().permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(source))


def _upright(image: Image.Image) -> Image.Image:
    """Return a copy, turned as its EXIF orientation says.

    Not ImageOps.exif_transpose: that fails on a photo with good pixels and a broken EXIF block.
    """
    image.load()  # first, since a PNG may carry its EXIF block after the pixels
    try:
        turn = _TURNS.get(image.getexif().get(0x0112, 1))
    except Exception:  # unreadable EXIF data says nothing about the orientation
        turn = None
    return image.copy() if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB on white; `image` is already ours to change."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_grey8(image)
    elif image.mode == "La":  # Pillow converts premultiplied grey to LA only
        image = image.convert("LA")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.new("RGBA", rgba.size, "white")
        image.alpha_composite(rgba)
    if image.mode != "RGB":
        image = image.convert("RGB")
    # Stale keys (a transparent colour, an orientation) would act again on a second read.
    image.info.clear()
    return image


def _to_grey8(image: Image.Image) -> Image.Image:
    """Scale 16-bit (0..65535) or float (0..1) greyscale to 8 bit, rounding to nearest.

    Pillow's own convert() clips instead: everything above 255 would turn white.
    """
    values = np.asarray(image)
    low, high = values.min().item(), values.max().item()
    top = 1 if image.mode == "F" else 65535
    if not 0 <= low <= high <= top:  # also false for NaN
        raise ImageError(
            f"greyscale of mode {image.mode} holds values {low:g}..{high:g}, expected 0..{top}; "
            f"rescale it to 8 bit before reading it here"
        )
    if image.mode == "F":
        grey = np.rint(values * 255.0).astype(np.uint8)
    else:
        grey = ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 / 255 == 257
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):  # a 16-bit PNG may declare one grey as transparent
        grey[values == transparent] = 255
    return Image.fromarray(grey)


# ---------------------------------------------------------------------------------------- tensors


def to_tensor(image: Image.Image) -> Tensor:
    """Return an RGB image (as `read_image` gives it) as float32 [3, H, W] in 0..1."""
    if not isinstance(image, Image.Image) or image.mode != "RGB" or 0 in image.size:
        raise ImageError(f"to_tensor takes an RGB image with pixels, got {image!r}; use read_image")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255).contiguous()


def normalize(
    pixels: Tensor,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Tensor:
    """Return `(pixels - mean) / std` per channel, for float pixels [..., 3, H, W] in 0..1."""
    mean_, std_ = _channel_stats(pixels, mean, std)
    return (pixels - mean_) / std_


def denormalize(
    pixels: Tensor,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Tensor:
    """Undo `normalize`: return `pixels * std + mean`, unclipped, for float [..., 3, H, W]."""
    mean_, std_ = _channel_stats(pixels, mean, std)
    return pixels * std_ + mean_


def _channel_stats(
    pixels: Tensor, mean: Sequence[float], std: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return mean and std as [3, 1, 1], of the dtype and on the device of `pixels`."""
    if not pixels.is_floating_point():
        raise ImageError(
            f"pixels of dtype {pixels.dtype}, expected a float tensor in 0..1; divide by 255 first"
        )
    if pixels.ndim < 3 or pixels.shape[-3] != 3:
        raise ImageError(f"pixels of shape {list(pixels.shape)}, expected [..., 3, height, width]")
    try:
        mean_ = torch.tensor([float(v) for v in mean]).to(pixels).view(3, 1, 1)
        std_ = torch.tensor([float(v) for v in std]).to(pixels).view(3, 1, 1)
    except (TypeError, ValueError, RuntimeError):
        mean_ = std_ = torch.full((3, 1, 1), math.nan)
    if not (mean_.isfinite().all() and std_.isfinite().all() and std_.min() > 0):
        raise ImageError(
            f"mean={mean!r} and std={std!r}: expected three finite numbers each, std above 0"
        )
    return mean_, std_


# ---------------------------------------------------------------------------------------- fitting


def target_size(
    height: int, width: int, size: Size, fit: str, patch_size: int = 16
) -> tuple[int, int]:
    """Return the (height, width) in pixels that a `height` x `width` image is fitted to.

    `size` first scales the image: None keeps it; a whole number becomes the short side, the long
    side keeping the aspect ratio (to the nearest pixel); (height, width) is taken as is, without
    regard to the aspect ratio. `fit` then brings both sides onto the patch grid: "resize" to the
    nearest multiple of `patch_size` (half way goes up; at least one patch), "pad" up, "crop" down,
    and "error" raises unless they are multiples already.
    """
    patch = _whole(patch_size, "patch_size")
    _check_choice("fit", fit, FITS)
    scaled = _scaled_size(_whole(height, "height"), _whole(width, "width"), size, patch)
    if fit == "resize":
        grid = [max(1, (2 * side + patch) // (2 * patch)) for side in scaled]
    elif fit == "pad":
        grid = [-(-side // patch) for side in scaled]
    else:
        grid = [side // patch for side in scaled]
    if fit == "crop" and 0 in grid:
        raise ImageError(
            f"{scaled[0]} x {scaled[1]} pixels cannot be cropped to whole patches of {patch} x "
            f"{patch}; use fit='resize' or fit='pad', or a larger size"
        )
    final = (grid[0] * patch, grid[1] * patch)
    if fit == "error" and final != scaled:
        raise ImageError(
            f"{scaled[0]} x {scaled[1]} pixels is not a whole number of patches of {patch} x "
            f"{patch}; use fit='resize', 'pad' or 'crop', or size=(h, w) in multiples of {patch}"
        )
    return final


def _scaled_size(height: int, width: int, size: Size, patch: int) -> tuple[int, int]:
    """The size before the grid is looked at. Integers only: a float ratio could be one off."""
    size = check_size(size, patch)
    if size is None:
        return height, width
    if isinstance(size, tuple):
        return size
    short = min(height, width)
    return (2 * height * size + short) // (2 * short), (2 * width * size + short) // (2 * short)


def check_size(size: Any, patch: int) -> Size:
    """`size` in plain numbers, if it is one that `target_size` takes."""
    if size is None:
        return None
    pair = isinstance(size, (tuple, list))
    if pair and len(size) != 2:
        raise ImageError(f"size={size!r} has {len(size)} entries, expected (height, width)")
    sides = [
        _whole(side, "size (short side or (height, width))") for side in (size if pair else (size,))
    ]
    if min(sides) < patch:
        raise ImageError(f"size={size!r} is below one patch; expected at least {patch} pixels")
    return (sides[0], sides[1]) if pair else sides[0]


def _whole(value: Any, what: str) -> int:
    """Return a positive integer, or say that it is not one (bool and float never count)."""
    number = whole(value)
    if number is None or number < 1:
        raise ImageError(f"{what} must be a whole number of at least 1, got {value!r}")
    return number


def _check_choice(what: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ImageError(f"unknown {what} {suggest(str(value), known)}")


# ------------------------------------------------------------------------------------- preprocess


@dataclass(frozen=True, eq=False)
class Preprocessed:
    """A batch ready for the model, and what was done to get it."""

    pixels: Tensor
    """[B, 3, H, W] float32, normalised."""
    grid: tuple[int, int]
    """Patches (down, across): (H / patch_size, W / patch_size)."""
    names: list[str]
    """One per image: its path, or what kind of object it was and its place in the input."""
    original_sizes: list[tuple[int, int]]
    """(height, width) of each upright image as it was read."""
    valid: tuple[int, int]
    """(height, width) of the top-left area of `pixels` that holds image; the rest is padding."""
    crop_box: list[Box]
    """(left, top, right, bottom) of each image after scaling: what was kept of it. The whole image
    unless fit="crop"."""
    skipped: list[tuple[str, str]]
    """(name, message) of each image left out by on_error="skip"."""

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Preprocessed:
        """Return the same batch with `pixels` on `device` and of `dtype`."""
        return replace(self, pixels=self.pixels.to(device=device, dtype=dtype))


def preprocess(
    images: Source | Iterable[Source],
    size: Size = None,
    *,
    fit: str = "resize",
    patch_size: int = 16,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    max_pixels: int = MAX_PIXELS,
    on_error: str = "raise",
) -> Preprocessed:
    """Read one image or several, fit them to the patch grid and normalise them into one batch.

    `size` and `fit` mean what they mean in `target_size`. Images are resampled at most once
    (bicubic, antialiased). "pad" adds the mean colour (0 once normalised) at the right and the
    bottom, see `valid`; "crop" cuts less than one patch from each dimension, half on either side,
    see `crop_box`. `max_pixels` holds before decoding and for the fitted image.

    With on_error="skip" images that cannot be read are left out and listed in `skipped`; images
    that can be read but not fitted still raise.

    Raises:
        ImageError: an image cannot be read or fitted, none could be read, or they do not come out
            at one size.
    """
    _check_choice("fit", fit, FITS)
    _check_choice("on_error", on_error, ("raise", "skip"))
    patch, limit = _whole(patch_size, "patch_size"), _whole(max_pixels, "max_pixels")
    check_size(size, patch)

    batch: list[Tensor] = []
    names: list[str] = []
    originals: list[tuple[int, int]] = []
    valids: list[tuple[int, int]] = []
    boxes: list[Box] = []
    skipped: list[tuple[str, str]] = []
    for name, source in _named(images):
        try:
            image = _read(source, name, limit)
        except ImageError as error:
            if on_error == "raise":
                raise
            skipped.append((name, str(error)))
            continue
        try:
            pixels, box = _scale_and_crop(image, size, fit, patch, limit)
        except ImageError as error:
            raise ImageError(f"{name}: {error}") from None
        names.append(name)
        originals.append((image.height, image.width))
        boxes.append(box)
        valids.append((pixels.shape[1], pixels.shape[2]))
        # Padding follows normalisation, where the mean colour is exactly zero.
        padding = (0, -pixels.shape[2] % patch, 0, -pixels.shape[1] % patch)
        batch.append(torch.nn.functional.pad(normalize(pixels, mean, std), padding))
        # `valid` is one pair for the batch, so padded images have to agree in it as well. Checked
        # here and not at the end: a folder of mixed photos should not be read to the last first.
        if valids[-1] != valids[0]:
            (a, b), (c, d) = valids[0], valids[-1]
            raise ImageError(
                f"images of one batch must have one size, but {names[0]} comes out at {a} x {b} "
                f"pixels and {name} at {c} x {d}{' (before padding)' if fit == 'pad' else ''}; "
                f"pass size=(h, w), or process them one at a time"
            )

    if not batch and not skipped:
        raise ImageError("no images given; expected at least one")
    if not batch:
        raise ImageError(f"none of {len(skipped)} images can be read; the first: {skipped[0][1]}")
    grid = (batch[0].shape[1] // patch, batch[0].shape[2] // patch)
    return Preprocessed(torch.stack(batch), grid, names, originals, valids[0], boxes, skipped)


def _named(images: Source | Iterable[Source]) -> Iterator[tuple[str, Source]]:
    """Yield (name, source) of one source or of each in an iterable."""
    single = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image, np.ndarray, Tensor)
    # A file object is iterable too, by line.
    if isinstance(images, single) or hasattr(images, "read") or not isinstance(images, Iterable):
        yield _name(images), cast(Source, images)
        return
    for index, source in enumerate(images):
        yield _name(source, index), source


def _scale_and_crop(
    image: Image.Image, size: Size, fit: str, patch: int, max_pixels: int
) -> tuple[Tensor, Box]:
    """Return the pixels to show, [3, h, w] in 0..1 and not yet padded, and the box they are."""
    final = target_size(image.height, image.width, size, fit, patch)
    # A sliver of 1 x 100,000 pixels with its short side scaled to 224 would be 5 Gpixel.
    _check_area(final[1], final[0], max_pixels)
    scaled = final if fit == "resize" else _scaled_size(image.height, image.width, size, patch)
    if scaled != (image.height, image.width):
        image = image.resize((scaled[1], scaled[0]), Image.Resampling.BICUBIC)
    height, width = min(final[0], scaled[0]), min(final[1], scaled[1])
    top, left = (scaled[0] - height) // 2, (scaled[1] - width) // 2
    box = (left, top, left + width, top + height)
    return to_tensor(image)[:, top : top + height, left : left + width], box


# ---------------------------------------------------------------------------------------- finding


def find_images(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    recursive: bool = True,
    passed_over: Counter[str] | None = None,
) -> list[Path]:
    """List image files, each once, in the order of `sources` and in natural order within each.

    A source is a file (kept whatever its extension), a folder (its files with a suffix in
    `EXTENSIONS`; with `recursive` those of its subfolders too, symbolic links to folders not
    followed) or a glob pattern such as "photos/**/*.jpg" (its matches with such a suffix). Hidden
    files and folders are passed over. Natural order puts img2.png before img10.png. A
    broken link is listed, and reading it says so. `passed_over`, if given, counts the other files
    of folders and patterns by their suffix, in lower case.

    Raises:
        ImageError: a source does not exist or yields no image.
    """
    listed = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not listed:
        raise ImageError("no files, folders or patterns given; expected at least one")
    # absolute(), not resolve(): links with different names are different images to the user.
    others = Counter[str]() if passed_over is None else passed_over
    expanded = (path for source in listed for path in _expand(source, recursive, others))
    return list({path.absolute(): path for path in expanded}.values())


def _expand(
    source: str | os.PathLike[str], recursive: bool, passed_over: Counter[str]
) -> list[Path]:
    name, path = os.fspath(source), Path(source)
    if name and path.is_dir():  # Path("") would be the current folder
        paths = _walk(path, recursive)
        fault = "no image in this folder" + (" or its subfolders" if recursive else "")
    elif name and os.path.lexists(path):  # before patterns: a file may be called "scan[1].png"
        return [path]
    elif any(wildcard in name for wildcard in "*?["):
        # Path.glob takes no absolute patterns and follows other rules for hidden files.
        matches = map(Path, glob.iglob(name, recursive=True))  # noqa: PTH207
        paths = [path for path in matches if not path.is_dir()]
        fault = "no image matches this pattern"
    else:
        raise ImageError(f"{name or repr(name)}: no such file or folder; check the path")
    # A broken link stays in: reading it reports it, leaving it out here would hide it.
    images = [path for path in paths if path.suffix.lower() in EXTENSIONS]
    if not images:
        raise ImageError(f"{name}: {fault}; extensions looked for: {' '.join(sorted(EXTENSIONS))}")
    suffixes = (path.suffix.lower() for path in paths)
    passed_over.update(suffix for suffix in suffixes if suffix not in EXTENSIONS)
    return sorted(images, key=_natural_key)


def _walk(folder: Path, recursive: bool) -> list[Path]:
    def refuse(error: OSError) -> None:  # os.walk would pass over an unreadable folder in silence
        raise ImageError(
            f"{error.filename}: the folder cannot be listed ({error.strerror}); check permissions"
        ) from error

    paths: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if recursive and not name.startswith(".")]
        paths += [Path(parent, name) for name in files if not name.startswith(".")]
    return paths


def _natural_key(path: Path) -> tuple[list[list[str | int]], str]:
    """Compare runs of digits as numbers, folder by folder; the plain path breaks ties."""
    parts: list[list[str | int]] = [
        # split() alternates text and digits, starting with text.
        [int(run) if i % 2 else run for i, run in enumerate(re.split("([0-9]+)", part.casefold()))]
        for part in path.parts
    ]
    return parts, str(path)
