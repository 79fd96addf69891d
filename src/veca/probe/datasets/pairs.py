"""What segmentation and depth datasets share: an image and a label file of the same size.

Also the reading of single-channel label files, with the values that the file stores.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from veca._util.files import check_regular, open_file
from veca.errors import DatasetError, suggest
from veca.images import pixel_limit, read_image
from veca.images.formats import HEADER, formats_for
from veca.images.read import check_chunks
from veca.probe.datasets.base import Dataset, DatasetInfo
from veca.probe.datasets.tree import Tree, file_size

_LABEL_FORMATS = ("PNG", "TIFF", "BMP")  # formats that keep every value as it is
_ORIENTATION = 0x0112
# What turns an upright image back to how it is stored, by EXIF orientation.
_UNDO = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}

Size = tuple[int, int]
Pair = tuple[str, str]


class DenseDataset(Dataset):
    """A dataset whose samples are pairs of files, an image and a label for each of its pixels."""

    # The public sets label the pixels as stored, whatever the EXIF block says of the orientation,
    # and reference code reads them so. Of somebody's own photos that cannot be known.
    labels_stored_pixels: ClassVar[bool] = True

    _label_names: tuple[str, ...] = ()

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        """Image and label file of every sample, relative to the root."""
        raise NotImplementedError

    def _load(self, tree: Tree) -> None:
        pairs = self._pairs(tree)
        self.ids = tuple(image for image, _ in pairs)
        self._label_names = tuple(label for _, label in pairs)

    def label_path(self, i: int) -> Path:
        """The file that holds the mask or the depth of a sample."""
        return self.root / self._label_names[i]

    def size(self, i: int) -> Size:
        """(height, width) of image and label, from their headers alone; they have to agree."""
        return self._frame(i)[0]

    def image(self, i: int) -> Image.Image:
        """Read one image as 8-bit RGB, with its pixels where the labels are; whole, not cropped."""
        _, turned = self._frame(i)
        image = read_image(self.image_path(i))
        return image.transpose(_UNDO[turned]) if turned else image

    def _frame(self, i: int) -> tuple[Size, int]:
        """The common size, and the EXIF orientation that has to be undone (0: none)."""
        image, label = self.image_path(i), self.label_path(i)
        stored, orientation = image_header(image)
        upright = (stored[1], stored[0]) if orientation >= 5 else stored
        size = label_size(label)
        if size not in (stored, upright):
            raise DatasetError(
                f"{label}: {size[0]} x {size[1]} pixels, but its image {image} has {stored[0]} x "
                f"{stored[1]}; both need the same size, replace one of them"
            )
        if not orientation:
            return size, 0
        if stored == upright and not self.labels_stored_pixels:
            raise DatasetError(
                f"{image}: its EXIF block turns it (orientation {orientation}), and the size does "
                f"not tell which way {label} was drawn; save the image upright, without EXIF"
            )
        return size, orientation if size == stored else 0

    def _hash_label(self, i: int) -> str:
        return f"{self._label_names[i]}\0{file_size(self.label_path(i))}"


def image_header(path: Path) -> tuple[Size, int]:
    """(height, width) as stored, and the EXIF orientation if it turns the image, else 0."""
    try:
        with open_file(path) as file:
            image = Image.open(file, formats=formats_for(file.read(HEADER)))
            size = (image.height, image.width)
            try:
                orientation = image.getexif().get(_ORIENTATION, 1)
            except Exception:  # a broken EXIF block says nothing, as in `read_image`
                orientation = 1
    except Exception as error:  # Pillow raises almost any type on a damaged file
        raise _unreadable(path, error) from error
    return size, orientation if orientation in _UNDO else 0


def label_size(path: Path) -> Size:
    """(height, width) of a label file, from its header."""
    if path.suffix.lower() == ".npy":
        shape = _load_npy(path, "r").shape
        if len(shape) != 2:
            raise DatasetError(f"{path}: array of shape {list(shape)}, expected [H, W]")
        return int(shape[0]), int(shape[1])
    try:
        with open_file(path) as file, Image.open(file, formats=_LABEL_FORMATS) as image:
            return image.height, image.width
    except Exception as error:
        raise _unreadable(path, error) from error


def read_values(path: Path) -> tuple[np.ndarray[Any, Any], int]:
    """The values that a single-channel file stores, [H, W], and how many bits it has for each.

    Palette images give the indices, not the colours. A .npy file is read without pickles.
    """
    if path.suffix.lower() == ".npy":
        label_size(path)
        values = _load_npy(path, None)
        if values.dtype.kind not in "fiu":
            raise DatasetError(f"{path}: array of dtype {values.dtype}, expected numbers")
        return values, 8 * values.dtype.itemsize
    try:
        with open_file(path) as file, Image.open(file, formats=_LABEL_FORMATS) as image:
            if image.format == "PNG":
                check_chunks(file)
            if image.width * image.height > pixel_limit():
                raise DatasetError(
                    f"{path}: {image.height} x {image.width} pixels, more than {pixel_limit():,}; "
                    f"scale it down, or raise the limit (--max-pixels) if you trust it"
                )
            mode, kind = image.mode, image.format
            values = np.asarray(image)
    except DatasetError:
        raise
    except Exception as error:
        raise _unreadable(path, error) from error
    if mode not in ("1", "L", "P", "F") and not mode.startswith("I"):
        raise DatasetError(
            f"{path}: a colour image (mode {mode}), expected one channel with one number per "
            f"pixel; save the label numbers, not their colours"
        )
    if mode == "1":
        return values.astype(np.uint8), 1
    bits = 8 * values.dtype.itemsize
    if mode == "L" and kind == "PNG":
        bits = _png_bits(path)
        # Pillow spreads the values of greyscale with 2 or 4 bits over 0..255; labels are counts.
        values = values // {2: 85, 4: 17}.get(bits, 1)
    elif mode == "I" and kind == "PNG":
        bits = 16
    return values, bits


def _png_bits(path: Path) -> int:
    with path.open("rb") as file:
        return file.read(25)[24]  # signature 8, length 4, "IHDR" 4, width 4, height 4, depth


def _load_npy(path: Path, mode: Any) -> np.ndarray[Any, Any]:
    try:
        check_regular(path)
        return np.load(path, mmap_mode=mode, allow_pickle=False)
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DatasetError:
    if isinstance(error, FileNotFoundError):
        return DatasetError(f"{path}: no such file; restore it", missing=[os.fspath(path)])
    reason = str(error) or type(error).__name__
    return DatasetError(f"{path}: cannot be read ({reason}), it may be damaged; replace it")


def pair_up(
    tree: Tree,
    images: str,
    labels: str,
    *,
    label_suffixes: Sequence[str] = (".png",),
    image_end: str = "",
    label_end: str = "",
    image_suffixes: Sequence[str] | None = None,
    passed_over: Sequence[str] = (),
) -> list[Pair]:
    """Pair the files of two folders (and their subfolders) by name; each needs its partner.

    The name is the path within the folder without suffix, less `image_end` or `label_end`. Label
    files whose name ends like one of `passed_over` are derived from others and left alone.
    """

    def named(paths: Iterable[str], folder: str, end: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in paths:
            stem = str(PurePosixPath(path).with_suffix("").relative_to(folder))
            if not stem.endswith(end) or stem.endswith(tuple(passed_over)):
                continue
            stem = stem.removesuffix(end)
            if stem in found:
                raise tree.error(path, f"has the same name as {found[stem]}; remove one of them")
            found[stem] = path
        return found

    tree.require([images, labels])
    if image_suffixes is None:
        pictures = tree.images(images, recursive=True)
    else:
        pictures = tree.files(images, image_suffixes, recursive=True)
    first = named(pictures, images, image_end)
    second = named(tree.files(labels, label_suffixes, recursive=True), labels, label_end)
    absent = [f"{labels}/{name}{label_end}{label_suffixes[0]}" for name in first.keys() - second]
    absent += [f"{images}/{name}{image_end}.*" for name in second.keys() - first]
    if absent:
        raise tree.missing(sorted(absent))
    return [(first[name], second[name]) for name in sorted(first)]


def paired_folders(tree: Tree, images: str, labels: str, split: str) -> Pair:
    """The two folders of a split, as images/train + labels/train or train/images + train/labels."""
    if tree.exists(split) and not tree.exists(images):
        return f"{split}/{images}", f"{split}/{labels}"
    return f"{images}/{split}", f"{labels}/{split}"


def bad_setting(tree: Tree, key: str, value: Any, expected: str) -> DatasetError:
    """A fault in dataset.json or in the keyword of the same name."""
    if value is None:
        return tree.error(
            "dataset.json", f"{key!r} is not given; write {expected} there, or pass {key}=..."
        )
    return tree.error("dataset.json", f"{key!r} (or {key}=) is {value!r}, expected {expected}")


def read_settings(tree: Tree, info: DatasetInfo, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a plain set: dataset.json if there is one, then the keywords."""
    settings: dict[str, Any] = {}
    if tree.exists("dataset.json"):
        settings = tree.json("dataset.json")
        if not isinstance(settings, dict):
            raise tree.error(
                "dataset.json", f"expected an object with the keys {list(info.options)}"
            )
        for key in settings:
            if key not in info.options:
                raise tree.error("dataset.json", f"unknown key {suggest(key, info.options)}")
    return {**settings, **options}
