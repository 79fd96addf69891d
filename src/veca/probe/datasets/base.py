"""What every dataset is: named samples under a root, one split, one task, and how it reports faults.

A dataset lists its files once, when it is opened, and reads pixels only when asked. What is listed
but not on the disk is an error at once, not in the middle of an evaluation.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from PIL import Image

from veca.errors import VecaError, suggest
from veca.images import read_image

TASKS = ("classification", "segmentation", "depth")
IGNORE_INDEX = 255
# Raise it when the meaning of what is read changes, so that no cache keyed by it outlives that.
READER_VERSION = 1

_T = TypeVar("_T")


class DatasetError(VecaError, ValueError):
    """A dataset that is not there, not complete, or not what it says; the message names the file.

    `missing` holds every absent file or folder, relative to the root, where that was the fault.
    """

    def __init__(self, message: str, *, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


@dataclass(frozen=True)
class DatasetInfo:
    """What is known about a dataset before any of its files is seen."""

    name: str
    task: str
    classes: int | None
    """How many there are; None where the data says so, and for depth."""
    splits: Mapping[str, str]
    """The splits that can be opened, and what the dataset itself calls each."""
    report_split: str
    """The split that published scores are measured on. Settings must not be chosen on it."""
    layout: str
    """The files looked for, as a short tree."""
    where: str
    """Where to get it."""
    licence: str
    aliases: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """Images in each split as published; a copy that holds another number gets a note."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Keywords that `open_dataset` takes for this dataset, and what they do."""


@dataclass(frozen=True)
class SplitCheck:
    """What `check` found for one split."""

    count: int = 0
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """What `check` found: `ok`, one `SplitCheck` per split, and as text all that a user needs."""

    info: DatasetInfo
    root: Path
    splits: Mapping[str, SplitCheck]

    @property
    def ok(self) -> bool:
        return not any(split.problems for split in self.splits.values())

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for s in self.splits.values() for name in s.missing))

    def __str__(self) -> str:
        lines = [f"{self.info.name} ({self.info.task}) at {self.root}"]
        for name, split in self.splits.items():
            state = f"{split.count:,} images" if not split.problems else "cannot be used"
            lines.append(f"  {name}: {state}")
            lines += [f"    problem: {text}" for text in split.problems]
            lines += [f"    note: {text}" for text in split.notes]
        if not self.ok:
            lines += ["expected layout:", *(f"  {row}" for row in self.info.layout.splitlines())]
            lines += [f"get it from: {self.info.where}", f"licence: {self.info.licence}"]
        return "\n".join(lines)


class Tree:
    """The files under a root: looked up in bulk, with faults that name what is missing.

    Every text read with `lines` is remembered by its hash, for the dataset's fingerprint.
    """

    def __init__(self, root: Path, info: DatasetInfo) -> None:
        self.root = root
        self.info = info
        self.contents: dict[str, str] = {}
        self._names: dict[Path, frozenset[str]] = {}
        if not root.is_dir():
            fault = "is a file" if root.exists() else "no such folder"
            raise DatasetError(
                f"{root}: {fault}; expected the root folder of {info.name}, to be had from "
                f"{info.where}",
                missing=["."],
            )

    def descend(self, markers: Sequence[str], nested: Sequence[str]) -> None:
        """Move the root into the subfolder of `nested` that holds more of `markers`, if any does.

        Archives unpack into a folder of their own, and users point at it or at its parent.
        """
        bases = [self.root, *(self.root / name for name in nested)]
        # max() returns the first of equals: the root itself.
        self.root = max(bases, key=lambda base: sum((base / name).exists() for name in markers))

    def exists(self, name: str) -> bool:
        """Whether a file or folder is there; each folder is listed once, however many are asked."""
        path = self.root / name
        if path.parent not in self._names:
            try:
                self._names[path.parent] = frozenset(os.listdir(path.parent))  # noqa: PTH208
            except OSError:
                self._names[path.parent] = frozenset()
        return path.name in self._names[path.parent]

    def first(self, *names: str) -> str:
        """The first of several possible files or folders that exists."""
        for name in names:
            if self.exists(name):
                return name
        raise self.missing([" or ".join(names)])

    def require(self, names: Iterable[str]) -> None:
        """Raise unless every one of these files and folders exists."""
        absent = [name for name in dict.fromkeys(names) if not self.exists(name)]
        if absent:
            raise self.missing(absent)

    def missing(self, names: Sequence[str]) -> DatasetError:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
        return DatasetError(
            f"{self.root}: {self.info.name} is not complete, missing {shown}; get it from "
            f"{self.info.where}, or run veca.probe.datasets.check_dataset to see the layout "
            f"expected",
            missing=names,
        )

    def error(self, name: str, fault: str) -> DatasetError:
        """A fault in one file."""
        return DatasetError(f"{self.root / name}: {fault}")

    def lines(self, name: str) -> list[tuple[int, str]]:
        """The lines of a text file that hold anything, stripped, each with its number from 1."""
        self.require([name])
        try:
            data = (self.root / name).read_bytes()
            text = data.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise self.error(name, f"cannot be read as text ({error}); replace it") from error
        self.contents[name] = hashlib.sha256(data).hexdigest()
        rows = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        if not rows:
            raise self.error(name, "is empty; replace it")
        return rows

    def table(self, name: str, columns: int, comment: str = "#") -> list[tuple[int, list[str]]]:
        """The rows of a text file, split at blanks into at least `columns` words."""
        rows = []
        for number, line in self.lines(name):
            if comment and line.startswith(comment):
                continue
            words = line.split()
            if len(words) < columns:
                raise self.error(
                    name, f"line {number} is {line[:80]!r}, expected at least {columns} columns"
                )
            rows.append((number, words))
        if not rows:
            raise self.error(name, "holds no entries; replace it")
        return rows

    def number(self, name: str, line: int, word: str, low: int, high: int, what: str) -> int:
        """Parse a whole number that a text file gives, and check its range."""
        value = int(word) if word.lstrip("-").isdecimal() else None
        if value is None or not low <= value <= high:
            raise self.error(
                name, f"line {line} gives {what} {word!r}, expected a number from {low} to {high}"
            )
        return value

    def folders(self, name: str) -> list[str]:
        """Names of the visible subfolders, sorted."""
        with os.scandir(self.root / name) as entries:
            found = [e.name for e in entries if not e.name.startswith(".") and e.is_dir()]
        return sorted(found)

    def files(self, name: str, suffixes: Iterable[str], *, recursive: bool = False) -> list[str]:
        """Visible files with one of these (lower-case) suffixes, relative to the root, sorted."""
        wanted = tuple(suffixes)
        base = self.root / name
        found: list[str] = []
        # Links to folders are followed: large sets are often assembled from them.
        for parent, folders, names in os.walk(base, followlinks=True):
            folders[:] = [f for f in folders if recursive and not f.startswith(".")]
            inner = Path(parent).relative_to(self.root).as_posix()
            found += [
                f"{inner}/{file}"
                for file in names
                if not file.startswith(".") and file.lower().endswith(wanted)
            ]
        return sorted(found)


class Dataset(ABC):
    """One split of one dataset: `len()` samples, each with an image and what its task asks for.

    Attributes:
        name, task, split: `split` is "train", "val", "test" or a further one of `info.splits`.
        root: the folder that `ids` are relative to; it may lie inside the one that was opened.
        ids: one stable name per sample, the path of its image relative to `root`.
        classes: their names, in the order of the labels; empty for depth.
        groups: samples of one number must not be divided between training and validation, since
            they show the same scene; None where every image stands alone.
        notes: what a reader of the score should know about this copy of the data.
        skipped: (name, reason) of what the dataset's own lists leave out of the score.
    """

    info: ClassVar[DatasetInfo]
    ignore_index: ClassVar[int] = IGNORE_INDEX
    # Where to look for the set under the folder given, see `Tree.descend`.
    markers: ClassVar[tuple[str, ...]] = ()
    nested: ClassVar[tuple[str, ...]] = ()

    classes: tuple[str, ...] = ()
    groups: tuple[int, ...] | None = None

    def __init__(self, root: str | Path, split: str, **options: Any) -> None:
        info = self.info
        self.name = info.name
        self.task = info.task
        self.split = _find_split(info, split)
        self.own_split = info.splits[self.split]
        for option in options:
            if option not in info.options:
                known = suggest(option, info.options) if info.options else f"{option!r}; it has none"
                raise DatasetError(f"{info.name} has no option {known}")
        self.options: dict[str, Any] = dict(options)
        self.ids: tuple[str, ...] = ()
        self.skipped: tuple[tuple[str, str], ...] = ()
        self._notes: list[str] = []
        tree = Tree(Path(root).expanduser(), info)
        tree.descend(self.markers, self.nested)
        self.root = tree.root
        self._load(tree)
        self._contents = tree.contents
        self._fingerprint: str | None = None
        self._look_over()

    @abstractmethod
    def _load(self, tree: Tree) -> None:
        """Fill in `ids`, `classes` and the labels; only list files and read lists, no pixels."""

    @abstractmethod
    def _hash_label(self, i: int) -> str:
        """What the fingerprint takes of the label of one sample: its value, or its file."""

    @abstractmethod
    def read(self, i: int) -> None:
        """Decode sample `i` fully and throw it away; raises what is wrong with it."""

    def _look_over(self) -> None:
        if not self.ids:
            raise DatasetError(
                f"{self.root}: no image in the {self.split!r} split of {self.name}; expected "
                f"{' '.join(self.info.layout.split())}"
            )
        published = self.info.counts.get(self.split)
        if published is not None and published != len(self.ids):
            self._notes.append(
                f"{len(self.ids):,} images, where the published {self.split} split has "
                f"{published:,}"
            )
        repeated = len(self.ids) - len(set(self.ids))
        if repeated:
            twice = next(name for name, count in Counter(self.ids).items() if count > 1)
            self._notes.append(f"{repeated:,} images are listed more than once, such as {twice}")
        if self.skipped:
            name, reason = self.skipped[0]
            self._notes.append(f"{len(self.skipped):,} left out, such as {name}: {reason}")

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"<{self.name} {self.split}: {len(self):,} samples in {str(self.root)!r}>"

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def image_path(self, i: int) -> Path:
        """The file of an image (of CIFAR: the file of many images that holds it)."""
        return self.root / self.ids[i]

    def image(self, i: int) -> Image.Image:
        """Read one image as 8-bit RGB, upright, whole: crops belong to the protocol."""
        return read_image(self.image_path(i))

    def label(self, i: int) -> int:
        """The class of an image, 0..num_classes-1."""
        raise self._not_a("classification")

    def labels(self, i: int) -> list[int]:
        """Every class that counts as right for an image; empty: the image is not scored."""
        raise self._not_a("classification")

    def mask(self, i: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Class of each pixel, uint8 [H, W] of the image's size: 0..num_classes-1, 255 ignored."""
        raise self._not_a("segmentation")

    def depth(self, i: int, *, allow_empty: bool = False) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Metres at each pixel, float32 [H, W] of the image's size, nan where nothing is known."""
        raise self._not_a("depth")

    def _not_a(self, task: str) -> DatasetError:
        return DatasetError(f"{self.name} is a {self.task} dataset, it has no {task} labels")

    def fingerprint(self) -> str:
        """A hash (hex) that changes with the samples, their file sizes, their labels and classes.

        Pixels are not read: a file replaced by another of exactly the same size goes unnoticed.
        The place of the root and the times of the files do not matter.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256()
            options = sorted((key, repr(value)) for key, value in self.options.items())
            head = (READER_VERSION, self.name, self.split, self.classes, options)
            digest.update(repr((*head, sorted(self._contents.items()))).encode())
            for i, name in enumerate(self.ids):
                digest.update(f"\0{name}\0{self._hash_image(i)}\0{self._hash_label(i)}".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _hash_image(self, i: int) -> str:
        return str(file_size(self.image_path(i)))

    @classmethod
    def check(
        cls,
        root: str | Path,
        splits: Iterable[str] | None = None,
        *,
        contents: bool = False,
        **options: Any,
    ) -> Check:
        """Look at a copy of this dataset and tell what is missing, without raising for it.

        Args:
            root: where it should be.
            splits: which ones; all that are published by default.
            contents: read every image and every label as well, which takes as long as it takes.
            options: those of `open_dataset`.
        """
        wanted = list(cls.info.splits) if splits is None else [splits, *()]
        if splits is not None:
            wanted = [splits] if isinstance(splits, str) else list(splits)
        found = {}
        for split in wanted:
            try:
                dataset = cls(root, split, **options)
            except DatasetError as error:
                found[split] = SplitCheck(problems=(str(error),), missing=error.missing)
            else:
                problems = dataset.faults() if contents else ()
                found[split] = SplitCheck(len(dataset), dataset.notes, tuple(problems))
        return Check(cls.info, Path(root), found)

    def faults(self, limit: int = 20) -> list[str]:
        """Read every sample; return what is wrong with the first `limit` that cannot be used."""
        faults: list[str] = []
        for i in range(len(self)):
            try:
                self.read(i)
            except VecaError as error:
                faults.append(str(error))
                if len(faults) == limit:
                    faults.append(f"stopped after {limit} faults, at sample {i + 1} of {len(self)}")
                    break
        return faults


def _find_split(info: DatasetInfo, split: str) -> str:
    """The split asked for, by our name or by the dataset's own."""
    if split in info.splits:
        return split
    for name, own in info.splits.items():
        if split == own:
            return name
    have = ", ".join(n if n == own else f"{n} ({own})" for n, own in info.splits.items())
    advice = ""
    if split == "val":
        advice = "; to choose settings, hold out a part of train"
    elif split == "test" and info.report_split != "test":
        advice = f"; published scores are measured on {info.report_split}"
    raise DatasetError(f"{info.name} has no labelled {split!r} split, it has: {have}{advice}")


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        reason = error.strerror or error
        raise DatasetError(f"{path}: cannot be looked at ({reason}); restore the file") from error


def unique(items: Mapping[str, _T], name: str) -> _T:
    """Look up a name that a list refers to, with an error that says what is known."""
    if name not in items:
        raise KeyError(name)
    return items[name]
