"""Classification datasets: one label per image, from lists or from folder names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from veca.errors import DatasetError
from veca.probe.datasets.base import Dataset
from veca.probe.datasets.catalogue import shipped
from veca.probe.datasets.registry import register
from veca.probe.datasets.tree import Tree


class ClassificationDataset(Dataset):
    """A dataset whose samples have one class each; `targets` holds them all, int64 [len]."""

    targets: np.ndarray[Any, np.dtype[np.int64]]

    def _load(self, tree: Tree) -> None:
        classes, samples = self._samples(tree)
        self._set_classes(tree, classes)
        samples = list(samples)
        self.ids = tuple(name for name, _ in samples)
        self.targets = np.array([label for _, label in samples], dtype=np.int64)
        self.targets.flags.writeable = False
        self._check_classes()

    def _samples(self, tree: Tree) -> tuple[Sequence[str], Iterable[tuple[str, int]]]:
        """The names of the classes, and (id, label) of every sample of the split."""
        raise NotImplementedError

    def _set_classes(self, tree: Tree, classes: Sequence[str]) -> None:
        self.classes = tuple(classes)
        expected = self.info.classes
        if expected is not None and len(self.classes) != expected:
            raise DatasetError(
                f"{tree.root}: {len(self.classes):,} classes, where {self.name} has {expected:,}; "
                f"complete it, or open a subset as the plain dataset 'folder'"
            )

    def _check_classes(self) -> None:
        """No class of a training split may be empty: it could never be predicted."""
        counts = np.bincount(self.targets, minlength=self.num_classes)
        empty = [name for name, count in zip(self.classes, counts, strict=True) if count == 0]
        if not empty or not self.ids:
            return
        shown = ", ".join(empty[:3]) + (f" and {len(empty) - 3:,} more" if len(empty) > 3 else "")
        fault = f"no image of {len(empty):,} of {self.num_classes:,} classes ({shown})"
        if self.split == "train" and not self.options.get("allow_empty_classes", False):
            raise DatasetError(
                f"{self.root}: the train split of {self.name} has {fault}; add some, or allow "
                "it: --option allow_empty_classes=true, in Python allow_empty_classes=True"
            )
        self._notes.append(fault)

    def label(self, i: int) -> int:
        return int(self.targets[i])

    def labels(self, i: int) -> list[int]:
        return [self.label(i)]

    def _hash_label(self, i: int) -> str:
        return ",".join(map(str, self.labels(i)))

    def _try(self, i: int) -> None:
        self.image(i)


def class_folders(tree: Tree, folder: str, classes: Sequence[str]) -> list[tuple[str, int]]:
    """(id, label) of every image under `folder`/CLASS/, where the class folders may be nested."""
    loose = tree.images(folder)
    if loose:
        raise tree.error(loose[0], "an image outside the class folders; move it into one")
    index = {name: i for i, name in enumerate(classes)}
    samples = []
    for name in tree.folders(folder):
        if name not in index:
            raise tree.error(
                f"{folder}/{name}",
                f"no such class among the {len(classes):,} known ({', '.join(classes[:3])}, ...); "
                f"class folders of every split must be those of the training split",
            )
        found = tree.images(f"{folder}/{name}", recursive=True)
        samples += [(path, index[name]) for path in found]
    return samples


@register
class ClassFolders(ClassificationDataset):
    """A plain set: SPLIT/CLASS/image, as torchvision's ImageFolder reads it.

    The classes are the sorted folder names of the training split, or, where there is none, of the
    split itself; so a label means the same in every split.
    """

    info = shipped("folder")

    def _samples(self, tree: Tree) -> tuple[Sequence[str], Iterable[tuple[str, int]]]:
        tree.require([self.split])
        classes = tree.folders("train" if tree.exists("train") else self.split)
        if not classes:
            raise tree.error("train", "no class folders in it; expected train/CLASS/*.jpg")
        return classes, class_folders(tree, self.split, classes)


@register
class Food101(ClassificationDataset):
    info = shipped("food101")
    markers = ("images", "meta")
    nested = ("food-101",)

    def _samples(self, tree: Tree) -> tuple[Sequence[str], Iterable[tuple[str, int]]]:
        source = f"meta/{self.split}.txt"
        tree.require(["images", "meta/classes.txt", source])
        classes = [line for _, line in tree.lines("meta/classes.txt")]
        index = {name: i for i, name in enumerate(classes)}
        samples = []
        for number, line in tree.lines(source):
            name = line.partition("/")[0]
            if name not in index:
                raise tree.error(source, f"line {number} names class {name!r}, not in classes.txt")
            samples.append((f"images/{line}.jpg", index[name]))
        tree.require(path for path, _ in samples)
        return classes, samples


@register
class Sun397(ClassificationDataset):
    """SUN397 with one of its ten official partitions (50 + 50 images per class)."""

    info = shipped("sun397")
    markers = ("a", "ClassName.txt")
    nested = ("SUN397",)

    def _samples(self, tree: Tree) -> tuple[Sequence[str], Iterable[tuple[str, int]]]:
        partition = self.options.get("partition", 1)
        if partition not in range(1, 11):
            raise DatasetError(f"sun397 has partitions 1..10, got partition={partition!r}")
        kind = "Training" if self.split == "train" else "Testing"
        file = f"{kind}_{partition:02d}.txt"
        beside = ("", "Partitions/", "../", "../Partitions/")
        names = tree.first(*(f"{folder}ClassName.txt" for folder in beside))
        source = tree.first(*(f"{folder}{file}" for folder in beside))
        classes = [line.strip("/") for _, line in tree.lines(names)]
        index = {name: i for i, name in enumerate(classes)}
        samples = []
        for number, line in tree.lines(source):
            path = line.strip("/")
            name = path.rpartition("/")[0]
            if name not in index:
                raise tree.error(source, f"line {number} names class {name!r}, not in {names}")
            samples.append((path, index[name]))
        tree.require(path for path, _ in samples)
        return classes, samples


def pets_list(tree: Tree, split: str) -> list[tuple[str, int]]:
    """(image name, class 0..36) of each entry of annotations/{trainval,test}.txt."""
    source = f"annotations/{split}.txt"
    return [
        (words[0], tree.number(source, number, words[1], 1, 37, "class") - 1)
        for number, words in tree.table(source, 2)
    ]


@register
class OxfordPets(ClassificationDataset):
    """Oxford-IIIT Pet, 37 breeds. Class names are those in the file names."""

    info = shipped("oxford-pets")
    markers = ("images", "annotations")
    nested = ("oxford-iiit-pet", "oxford-pets")

    def _samples(self, tree: Tree) -> tuple[Sequence[str], Iterable[tuple[str, int]]]:
        source = f"annotations/{self.own_split}.txt"
        tree.require(["images", source])
        names: dict[int, str] = {}
        samples = []
        for image, label in pets_list(tree, self.own_split):
            breed = image.rpartition("_")[0]
            if names.setdefault(label, breed) != breed:
                raise tree.error(
                    source, f"class {label + 1} is {names[label]!r}, but {image!r} has it too"
                )
            samples.append((f"images/{image}.jpg", label))
        tree.require(path for path, _ in samples)
        return [names.get(i, f"class {i + 1}") for i in range(37)], samples


@register
class Cub200(ClassificationDataset):
    info = shipped("cub-200")
    markers = ("images.txt", "images")
    nested = ("CUB_200_2011",)

    def _samples(self, tree: Tree) -> tuple[Sequence[str], Iterable[tuple[str, int]]]:
        lists = ("classes.txt", "images.txt", "image_class_labels.txt", "train_test_split.txt")
        tree.require(["images", *lists])
        classes, images, labels, parts = (self._column(tree, name) for name in lists)
        if list(classes) != [str(i) for i in range(1, len(classes) + 1)]:
            raise tree.error(lists[0], "expected the classes in order, numbered from 1")
        wanted = "1" if self.split == "train" else "0"
        samples = []
        for key, (_, path) in images.items():
            for table, name in ((labels, lists[2]), (parts, lists[3])):
                if key not in table:
                    raise tree.error(name, f"no line for image {key} ({path})")
            line, part = parts[key]
            if part not in ("0", "1"):
                raise tree.error(lists[3], f"line {line} gives {part!r}, expected 0 or 1")
            line, word = labels[key]
            label = tree.number(lists[2], line, word, 1, len(classes), "class") - 1
            if part == wanted:
                samples.append((f"images/{path}", label))
        tree.require(path for path, _ in samples)
        return [name for _, name in classes.values()], samples

    @staticmethod
    def _column(tree: Tree, name: str) -> dict[str, tuple[int, str]]:
        """Second column by the first, with the number of the line."""
        return {words[0]: (number, words[1]) for number, words in tree.table(name, 2)}


@register
class Places365(ClassificationDataset):
    """Places365-Standard: the official lists, or the "easy format" with one folder per class.

    Labels of the lists are the official ones; those of the easy format follow the sorted folder
    names. With several sizes of the images on the disk, the small one (256 px) is read.
    """

    info = shipped("places365")
    markers = ("categories_places365.txt", "train", "val")
    nested = ("places365_standard",)

    def _samples(self, tree: Tree) -> tuple[Sequence[str], Iterable[tuple[str, int]]]:
        train = self.split == "train"
        source = "places365_train_standard.txt" if train else "places365_val.txt"
        if not tree.exists(source) and tree.exists(self.split):
            classes = tree.folders("train" if tree.exists("train") else self.split)
            return classes, class_folders(tree, self.split, classes)
        tree.require(["categories_places365.txt", source])
        if train:
            folder = tree.first(
                "data_256", "data_256_standard", "data_large", "data_large_standard"
            )
        else:
            folder = tree.first("val_256", "val_large")
        names: dict[int, str] = {}
        for number, words in tree.table("categories_places365.txt", 2):
            label = tree.number("categories_places365.txt", number, words[1], 0, 364, "class")
            names[label] = words[0].strip("/").partition("/")[2]  # "/a/airfield"
        samples = [
            (
                f"{folder}/{words[0].strip('/')}",
                tree.number(source, number, words[1], 0, 364, "class"),
            )
            for number, words in tree.table(source, 2)
        ]
        tree.require(path for path, _ in samples)
        return [names[label] for label in sorted(names)], samples
