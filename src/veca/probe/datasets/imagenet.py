"""ImageNet-1K and the two sets that re-examine its validation labels, ImageNetV2 and ReaL.

A label is always the place of the class's WordNet id among the 1,000 sorted ones, which is what
folder listings, Caffe's lists, ImageNetV2's folder names and real.json all use. The numbers of the
development kit's ground truth file are in another order, and are translated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from veca._util.extras import require
from veca.errors import DatasetError
from veca.probe.datasets.catalogue import shipped
from veca.probe.datasets.classification import ClassificationDataset, class_folders
from veca.probe.datasets.registry import register
from veca.probe.datasets.tree import Tree

CLASSES = 1000
VALIDATION_IMAGES = 50_000
_WNID = re.compile(r"n\d{8}")
_VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})")
_KAGGLE = "ILSVRC/Data/CLS-LOC/"
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_DEVKIT = "ILSVRC2012_devkit_t12/data/"


@register
class ImageNet(ClassificationDataset):
    """ImageNet-1K with its validation images in class folders, or flat with a list of labels."""

    info = shipped("imagenet-1k")

    def _samples(self, tree: Tree) -> tuple[Sequence[str], Iterable[tuple[str, int]]]:
        return imagenet_samples(tree, self.split)


def imagenet_samples(tree: Tree, split: str) -> tuple[list[str], list[tuple[str, int]]]:
    """The sorted WordNet ids, and (id, label) of each image of "train" or "val"."""
    folder = tree.first(split, _KAGGLE + split)
    train = folder.removesuffix(split) + "train"
    if split == "val" and not tree.folders(folder):
        return _flat(tree, folder, _wnids(tree, train) if tree.exists(train) else None)
    classes = _wnids(tree, train if tree.exists(train) else folder)
    return classes, class_folders(tree, folder, classes)


def _wnids(tree: Tree, folder: str) -> list[str]:
    names = tree.folders(folder)
    strange = [name for name in names if not _WNID.fullmatch(name)]
    if strange or len(names) != CLASSES:
        seen = f"such as {strange[0]!r}" if strange else f"{len(names):,} of them"
        raise tree.error(
            folder,
            f"expected {CLASSES:,} class folders named by WordNet id (n01440764), found {seen}; "
            f"open a subset as the plain dataset 'folder'",
        )
    return names


def _flat(
    tree: Tree, folder: str, wnids: list[str] | None
) -> tuple[list[str], list[tuple[str, int]]]:
    """Validation images in one folder, their labels in one of the lists in circulation."""
    images = tree.images(folder)
    if not images:
        raise tree.error(folder, "neither class folders nor images in it")
    source = tree.first(
        "val.txt",
        f"{folder}/val.txt",
        "LOC_val_solution.csv",
        f"{_DEVKIT}{_TRUTH}",
        _TRUTH,
        f"{folder}/{_TRUTH}",
    )
    if source.endswith(_TRUTH):
        classes, labels = _devkit_labels(tree, source, images)
    else:
        classes, labels = _listed_labels(tree, source, wnids)
    if wnids is not None and classes != wnids:
        raise tree.error(source, "its classes are not those of the folders in train")
    samples = []
    for path in images:
        name = PurePosixPath(path).stem
        if name not in labels:
            raise tree.error(source, f"no label for {path}")
        samples.append((path, labels[name]))
    # The other way round: a listed image that is not there would shrink the set unseen.
    have = {PurePosixPath(path).stem for path in images}
    absent = [f"{folder}/{name}.JPEG" for name in labels if name not in have]
    if absent:
        raise tree.missing(absent)
    return classes, samples


def _listed_labels(
    tree: Tree, source: str, wnids: list[str] | None
) -> tuple[list[str], dict[str, int]]:
    """Labels by image name (no suffix) from "NAME LABEL" lines or Kaggle's "NAME,WNID box ..."."""
    words: dict[str, tuple[int, str]] = {}
    for number, line in tree.lines(source):
        parts = line.replace(",", " ").split()
        if parts[0] == "ImageId":
            continue
        if len(parts) < 2:
            raise tree.error(source, f"line {number} is {line[:80]!r}, expected a name and a label")
        words[PurePosixPath(parts[0]).stem] = (number, parts[1])
    by_wnid = [_WNID.fullmatch(word) is not None for _, word in words.values()]
    if not all(by_wnid):
        if any(by_wnid):
            raise tree.error(source, "mixes WordNet ids and numbers; use one or the other")
        labels = {
            name: tree.number(source, number, word, 0, CLASSES - 1, "class")
            for name, (number, word) in words.items()
        }
        return wnids or [str(i) for i in range(CLASSES)], labels
    classes = wnids or sorted({word for _, word in words.values()})
    if len(classes) != CLASSES:
        raise tree.error(source, f"{len(classes):,} classes, expected {CLASSES:,}")
    index = {name: i for i, name in enumerate(classes)}
    for number, word in words.values():
        if word not in index:
            raise tree.error(source, f"line {number} gives {word!r}, which is not in train")
    return classes, {name: index[word] for name, (_, word) in words.items()}


def _devkit_labels(
    tree: Tree, source: str, images: Sequence[str]
) -> tuple[list[str], dict[str, int]]:
    """Labels from the development kit, whose numbers are not in the order of WordNet ids."""
    rows = tree.lines(source)
    if len(rows) != VALIDATION_IMAGES:
        raise tree.error(source, f"{len(rows):,} lines, expected {VALIDATION_IMAGES:,}")
    wnid_of = _devkit_wnids(tree, source)
    classes = sorted(wnid_of.values())
    index = {name: i for i, name in enumerate(classes)}
    labels = {}
    for path in images:
        line, word = rows[validation_number(tree, path) - 1]
        number = tree.number(source, line, word, 1, CLASSES, "class")
        labels[PurePosixPath(path).stem] = index[wnid_of[number]]
    return classes, labels


def _devkit_wnids(tree: Tree, source: str) -> dict[int, str]:
    """WordNet id by the development kit's number, from map_clsloc.txt or meta.mat beside it."""
    parent = PurePosixPath(source).parent
    text, meta = f"{parent}/map_clsloc.txt", f"{parent}/meta.mat"
    found = tree.first(text, meta)
    if found == text:
        wnids = {
            tree.number(text, number, words[1], 1, CLASSES, "class"): words[0]
            for number, words in tree.table(text, 2)
        }
    else:
        unless = "unless the validation images are in folders by WordNet id,"
        matlab = require("scipy.io", f"{tree.root / meta}, {unless}")
        try:
            synsets = matlab.loadmat(tree.root / meta, squeeze_me=True)["synsets"]
            wnids = {
                int(row["ILSVRC2012_ID"]): str(row["WNID"])
                for row in synsets
                if int(row["num_children"]) == 0  # the others are groups of classes
            }
        except Exception as error:  # scipy raises almost any type on a damaged file
            raise tree.error(meta, f"cannot be read ({error}); replace it") from error
    complete = set(wnids) == set(range(1, CLASSES + 1)) and len(set(wnids.values())) == CLASSES
    if not complete or not all(map(_WNID.fullmatch, wnids.values())):
        raise tree.error(found, f"expected the WordNet ids of classes 1 to {CLASSES}")
    return wnids


def validation_number(tree: Tree, path: str) -> int:
    """1..50000 from a name such as ILSVRC2012_val_00000001.JPEG."""
    match = _VALIDATION.match(PurePosixPath(path).name)
    number = int(match.group(1)) if match else 0
    if not 1 <= number <= VALIDATION_IMAGES:
        raise tree.error(
            path,
            f"its name does not tell which validation image it is; expected "
            f"ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_{VALIDATION_IMAGES:08d}.JPEG",
        )
    return number


@register
class ImageNetReal(ClassificationDataset):
    """ImageNet's validation images with the reassessed labels: several can be right, or none.

    `labels(i)` lists what counts as right; images where it is empty are not scored, and
    `unscored` counts them. There is no single `label(i)`; `targets` holds the original labels.
    """

    info = shipped("imagenet-real")

    def _samples(self, tree: Tree) -> tuple[Sequence[str], Iterable[tuple[str, int]]]:
        source = tree.first("real.json", "val/real.json", _KAGGLE + "val/real.json")
        classes, samples = imagenet_samples(tree, "val")
        table = tree.json(source)
        if not isinstance(table, list) or len(table) != VALIDATION_IMAGES:
            raise tree.error(source, f"expected a list of {VALIDATION_IMAGES:,} lists of labels")
        self._labels = [
            self._valid(tree, source, table[validation_number(tree, path) - 1], path)
            for path, _ in samples
        ]
        self.unscored = sum(not labels for labels in self._labels)
        if self.unscored:
            self._notes.append(f"{self.unscored:,} images have no label and are not scored")
        return classes, samples

    @staticmethod
    def _valid(tree: Tree, source: str, labels: Any, path: str) -> tuple[int, ...]:
        known = range(CLASSES)
        # A bool is an int to Python, not to us.
        if not isinstance(labels, list) or any(
            type(x) is not int or x not in known for x in labels
        ):
            raise tree.error(
                source, f"the labels of {path} are {labels!r}, expected a list of numbers 0..999"
            )
        return tuple(labels)

    def _check_classes(self) -> None:
        counts = np.zeros(CLASSES, dtype=np.int64)
        for labels in self._labels:
            counts[list(labels)] += 1
        if (counts == 0).any():
            self._notes.append(f"no image of {int((counts == 0).sum()):,} of {CLASSES:,} classes")

    def label(self, i: int) -> int:
        raise DatasetError(
            "imagenet-real has no single label per image; use labels(i), and leave out images "
            "where it is empty"
        )

    def labels(self, i: int) -> list[int]:
        return list(self._labels[i])


@register
class ImageNetV2(ClassificationDataset):
    """ImageNetV2, a second test set for ImageNet-1K. Its folders are named by label, "0" to "999".

    Read as numbers, since sorted as text "10" comes before "2".
    """

    info = shipped("imagenet-v2")
    markers = ("0", "999")
    nested = (
        "imagenetv2-matched-frequency-format-val",
        "imagenetv2-matched-frequency",
        "ImageNetV2-matched-frequency",
    )

    def _samples(self, tree: Tree) -> tuple[Sequence[str], Iterable[tuple[str, int]]]:
        classes = [str(i) for i in range(CLASSES)]
        tree.require(classes)
        samples = []
        for label, name in enumerate(classes):
            found = tree.images(name)
            if not found:
                raise tree.error(name, "no image of this class; complete the dataset")
            samples += [(path, label) for path in found]
        return classes, samples
