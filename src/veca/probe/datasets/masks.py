"""Segmentation datasets: masks with the labels of the benchmark, 255 where nothing is scored.

Each class says which stored value becomes which label. A value outside that table is an error that
names the file: it is never scored as something else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from veca.errors import DatasetError
from veca.probe.datasets.base import IGNORE_INDEX
from veca.probe.datasets.catalogue import shipped
from veca.probe.datasets.classification import pets_list
from veca.probe.datasets.pairs import (
    DenseDataset,
    Pair,
    bad_setting,
    pair_up,
    paired_folders,
    read_settings,
    read_values,
)
from veca.probe.datasets.registry import register
from veca.probe.datasets.tree import Tree


def load_table(name: str) -> dict[str, Any]:
    """One of the tables of class names and ids that come with the package."""
    source = resources.files("veca.probe.datasets") / "tables" / f"{name}.json"
    return json.loads(source.read_text(encoding="utf-8"))


class SegmentationDataset(DenseDataset):
    """A dataset whose samples have a class for every pixel."""

    def _load(self, tree: Tree) -> None:
        super()._load(tree)
        classes, values = self._labels(tree)
        self.classes = tuple(classes)
        self._values = dict(values)
        # -1: not a label of this dataset.
        self._lookup = np.full(256, -1, dtype=np.int16)
        for stored, label in self._values.items():
            self._lookup[stored] = label

    def _labels(self, tree: Tree) -> tuple[Sequence[str], Mapping[int, int]]:
        """The names of the classes, and the label (or 255) that each stored value stands for."""
        raise NotImplementedError

    def mask(self, i: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        self._frame(i)  # image and mask agree in size
        path = self.label_path(i)
        values, _ = read_values(path)
        if values.dtype.kind == "f":
            raise DatasetError(f"{path}: a mask of {values.dtype}, expected whole numbers")
        wrong = (values < 0) | (values > 255)
        if not wrong.any():
            labels = self._lookup[values]
            wrong = labels < 0
            if not wrong.any():
                return labels.astype(np.uint8)
        rows, columns = np.nonzero(wrong)
        raise DatasetError(
            f"{path}: value {values[rows[0], columns[0]]} at row {rows[0]}, column {columns[0]} "
            f"({len(rows):,} such pixels) is no label of {self.name}, which stores "
            f"{_ranges(self._values)}; replace the file"
        )

    def _try(self, i: int) -> None:
        self.image(i)
        self.mask(i)


def _ranges(values: Mapping[int, int]) -> str:
    """ "0..20 and 255", for messages."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = [str(low) if low == high else f"{low}..{high}" for low, high in runs]
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _listed(tree: Tree, source: str, images: str, masks: str, suffix: str = ".jpg") -> list[Pair]:
    """Pairs named by a list with one name per line."""
    tree.require([source, images, masks])
    names = [words[0] for _, words in tree.table(source, 1)]
    pairs = [(f"{images}/{name}{suffix}", f"{masks}/{name}.png") for name in names]
    tree.require(path for pair in pairs for path in pair)
    return pairs


def _identity(count: int) -> dict[int, int]:
    """Stored values are labels, 255 is ignored."""
    return {**{i: i for i in range(count)}, 255: IGNORE_INDEX}


@register
class ImagesMasks(SegmentationDataset):
    """A plain set: images and single-channel masks of the same name, and dataset.json.

    dataset.json holds {"classes": ["road", "sky", ...]} and may hold "ignore", the stored values
    that are not scored (default [255]), and "reduce_zero_label": true where 0 means unlabelled and
    the classes start at 1. Keywords of the same names take precedence over the file.
    """

    info = shipped("images-masks")
    labels_stored_pixels = False

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        images, masks = paired_folders(tree, "images", "masks", self.split)
        return pair_up(tree, images, masks, label_suffixes=(".png", ".tif", ".tiff", ".bmp"))

    def _labels(self, tree: Tree) -> tuple[Sequence[str], Mapping[int, int]]:
        settings = read_settings(tree, self.info, self.options)
        classes: Any = settings.get("classes")
        if not _is_list(classes, str) or not 1 <= len(classes) <= 255:
            raise bad_setting(tree, "classes", classes, "a list of 1 to 255 names")
        ignore = settings.get("ignore", [IGNORE_INDEX])
        if not _is_list(ignore, int) or any(not 0 <= value <= 255 for value in ignore):
            raise bad_setting(tree, "ignore", ignore, "a list of numbers 0..255")
        shift = settings.get("reduce_zero_label", False)
        if not isinstance(shift, bool):
            raise bad_setting(tree, "reduce_zero_label", shift, "true or false")
        values = {i + shift: i for i in range(len(classes)) if i + shift <= 255}
        values.update(dict.fromkeys([*ignore, *([0] if shift else [])], IGNORE_INDEX))
        hidden = [name for i, name in enumerate(classes) if values.get(i + shift) != i]
        if hidden:
            raise bad_setting(
                tree, "ignore", ignore, f"no value that stands for a class, here {hidden[0]!r}"
            )
        return list(classes), values


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, (list, tuple)) and all(type(item) is kind for item in value)


@register
class Voc2012(SegmentationDataset):
    """PASCAL VOC 2012: 20 classes and background, which counts as a class; borders are ignored.

    "trainaug" is the enlarged training list of the SBD annotations, with the masks of
    SegmentationClassAug, where these have been made; "train" is always the official list.
    """

    info = shipped("voc2012")
    markers = ("JPEGImages", "SegmentationClass")
    nested = ("VOCdevkit/VOC2012", "VOC2012")

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        masks = "SegmentationClassAug" if self.split == "trainaug" else "SegmentationClass"
        return _listed(tree, f"ImageSets/Segmentation/{self.split}.txt", "JPEGImages", masks)

    def _labels(self, tree: Tree) -> tuple[Sequence[str], Mapping[int, int]]:
        return load_table("voc2012")["classes"], _identity(21)


@register
class PascalContext60(SegmentationDataset):
    """PASCAL Context with its 59 most frequent classes and background, which counts as a class.

    Read from the label images that are commonly made of the annotations, with values 0..59 (0 is
    background, the classes follow in alphabetical order); the .mat files with the 459 raw classes
    are not read.
    """

    info = shipped("pascal-context-60")
    markers = ("JPEGImages", "SegmentationClassContext")
    nested = ("VOCdevkit/VOC2010", "VOC2010")

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        source = f"ImageSets/SegmentationContext/{self.split}.txt"
        return _listed(tree, source, "JPEGImages", "SegmentationClassContext")

    def _labels(self, tree: Tree) -> tuple[Sequence[str], Mapping[int, int]]:
        return load_table("pascal_context_60")["classes"], _identity(60)


@register
class Ade20k(SegmentationDataset):
    """ADE20K scene parsing. Stored 1..150 become 0..149; 0, unlabelled, is ignored."""

    info = shipped("ade20k-150")
    markers = ("images", "annotations")
    nested = ("ADEChallengeData2016", "ade/ADEChallengeData2016")

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        return pair_up(tree, f"images/{self.own_split}", f"annotations/{self.own_split}")

    def _labels(self, tree: Tree) -> tuple[Sequence[str], Mapping[int, int]]:
        values = {0: IGNORE_INDEX, **{i + 1: i for i in range(150)}}
        return load_table("ade20k_150")["classes"], values


class _Coco(SegmentationDataset):
    """COCO 2017 images with the pixel maps of COCO-Stuff (category id - 1; 255: unlabelled)."""

    markers = ("images", "stuffthingmaps", "train2017", "val2017", "annotations")
    nested = ("coco", "coco_stuff164k", "cocostuff")

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        year = self.own_split
        images = tree.first(f"images/{year}", year)
        maps = tree.first(f"stuffthingmaps/{year}", f"annotations/{year}")
        # Other tools write their own renumbered copies beside the maps.
        derived = ("_labelTrainIds", "_instanceTrainIds")
        return pair_up(tree, images, maps, image_suffixes=(".jpg",), passed_over=derived)


@register
class CocoObject(_Coco):
    """COCO's 80 things and background, 81 classes, from the COCO-Stuff maps.

    Things become 1..80 in the order of their category ids. Everything else is background, 0: stuff
    and unlabelled pixels (255) too, so that no pixel is ignored.
    """

    info = shipped("coco-object")

    def _labels(self, tree: Tree) -> tuple[Sequence[str], Mapping[int, int]]:
        things = load_table("coco")["things"]
        values = dict.fromkeys([*range(182), 255], 0)
        values.update({number - 1: i for i, (number, _) in enumerate(things, 1)})
        return ["background", *(name for _, name in things)], values


@register
class CocoStuff(_Coco):
    """COCO-Stuff with 171 classes: 80 things, then 91 kinds of stuff, in the order of their ids.

    The 11 category ids that COCO never used are left out, and are an error in a map.
    """

    info = shipped("coco-stuff")

    def _labels(self, tree: Tree) -> tuple[Sequence[str], Mapping[int, int]]:
        table = load_table("coco")
        used = [*table["things"], *table["stuff"]]
        values = {number - 1: i for i, (number, _) in enumerate(used)}
        return [name for _, name in used], {**values, 255: IGNORE_INDEX}


@register
class Cityscapes(SegmentationDataset):
    """Cityscapes, fine annotations, the 19 classes of the benchmark.

    *_labelIds.png (34 ids, 15 of them ignored) is read where it exists, else *_labelTrainIds.png.
    """

    info = shipped("cityscapes")
    markers = ("leftImg8bit", "gtFine")
    nested = ("cityscapes",)

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        images, masks = f"leftImg8bit/{self.split}", f"gtFine/{self.split}"
        tree.require([images, masks])
        self._raw_ids = bool(tree.files(masks, ("_labelids.png",), recursive=True))
        return pair_up(
            tree,
            images,
            masks,
            image_suffixes=(".png", ".jpg"),
            image_end="_leftImg8bit",
            label_end="_gtFine_labelIds" if self._raw_ids else "_gtFine_labelTrainIds",
        )

    def _labels(self, tree: Tree) -> tuple[Sequence[str], Mapping[int, int]]:
        table = load_table("cityscapes")["labels"]
        classes = [name for name, _, label in table if label != IGNORE_INDEX]
        if not self._raw_ids:
            return classes, _identity(19)
        # 255 is -1 (license plates, never drawn) in eight bits.
        return classes, {**{number: label for _, number, label in table}, 255: IGNORE_INDEX}


@register
class CamVid(SegmentationDataset):
    """CamVid in the version of SegNet: 11 classes, stored 11 is unlabelled and ignored.

    Frames of a few drives, in the order of their names, which is that of time.
    """

    info = shipped("camvid")
    markers = ("train", "trainannot")
    nested = ("CamVid", "camvid")
    in_time = True

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        return pair_up(tree, self.split, f"{self.split}annot")

    def _labels(self, tree: Tree) -> tuple[Sequence[str], Mapping[int, int]]:
        values = {**{i: i for i in range(11)}, 11: IGNORE_INDEX}
        return load_table("camvid")["classes"], values


@register
class PetsTrimaps(SegmentationDataset):
    """The trimaps of Oxford-IIIT Pet: pet, background and border, all three scored.

    Stored 1, 2, 3 become 0, 1, 2. No pixel is ignored.
    """

    info = shipped("pets-trimaps")
    markers = ("images", "annotations")
    nested = ("oxford-iiit-pet", "oxford-pets")

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        tree.require(["images", "annotations/trimaps", f"annotations/{self.own_split}.txt"])
        pairs = [
            (f"images/{name}.jpg", f"annotations/trimaps/{name}.png")
            for name, _ in pets_list(tree, self.own_split)
        ]
        tree.require(path for pair in pairs for path in pair)
        return pairs

    def _labels(self, tree: Tree) -> tuple[Sequence[str], Mapping[int, int]]:
        return ("pet", "background", "border"), {1: 0, 2: 1, 3: 2}
