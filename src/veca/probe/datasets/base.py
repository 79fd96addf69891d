"""What every dataset is: named samples under a root, one split, one task, and clear faults.

A dataset lists its files once, when it is opened, and reads pixels only when asked. What is listed
but not on the disk is an error at once, not in the middle of an evaluation.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from veca.errors import DatasetError, VecaError, suggest
from veca.images import read_image
from veca.images.find import left_out
from veca.probe.datasets.tree import Tree, file_size, file_state

TASKS = ("classification", "segmentation", "depth")
"""What a dataset can be for."""
IGNORE_INDEX = 255
"""In a mask: a pixel that is neither trained on nor scored."""
# Raise it when the meaning of what is read changes, so that no cache keyed by it outlives that.
READER_VERSION = 1


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
    optional_splits: tuple[str, ...] = ()
    """Splits that many copies lack; `check` only notes their absence."""


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
            state = f"{split.count:,} images" if split.count else "none"
            if split.problems:
                state = "cannot be used"
            lines.append(f"  {name}: {state}")
            lines += [f"    problem: {text}" for text in split.problems]
            lines += [f"    note: {text}" for text in split.notes]
        if not self.ok:
            lines += ["expected layout:", *(f"  {row}" for row in self.info.layout.splitlines())]
            lines += [f"get it from: {self.info.where}", f"licence: {self.info.licence}"]
        return "\n".join(lines)


class Dataset(ABC):
    """One split of one dataset: `len()` samples, each with an image and what its task asks for.

    Attributes:
        name, task, split: `split` is "train", "val", "test" or a further one of `info.splits`.
        root: the folder that `ids` are relative to; it may lie inside the one that was opened.
        ids: one stable name per sample, the path of its image relative to `root`.
        classes: their names, in the order of the labels; empty for depth.
        groups: samples of one number must not be divided between training and validation, since
            they show the same scene; None where every image stands alone.
        in_time: samples follow each other in time, so that neighbours are alike.
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
    in_time: ClassVar[bool] = False

    def __init__(self, root: str | Path, split: str, **options: Any) -> None:
        info = self.info
        self.name = info.name
        self.task = info.task
        self.split = _find_split(info, split)
        self.own_split = info.splits[self.split]
        for option in options:
            if option not in info.options:
                known = (
                    suggest(option, info.options) if info.options else f"{option!r}; it has none"
                )
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
        self._state: str | None = None
        self._look_over()
        passed_over = left_out(tree.passed_over, len(self.ids))
        if passed_over:
            self._notes.append(passed_over)

    @abstractmethod
    def _load(self, tree: Tree) -> None:
        """Fill in `ids`, `classes` and the labels; only list files and read lists, no pixels."""

    @abstractmethod
    def _hash_label(self, i: int) -> str:
        """What the fingerprint takes of the label of one sample: its value, or its file."""

    @abstractmethod
    def _try(self, i: int) -> None:
        """Decode sample `i` fully; raises what is wrong with it."""

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
            shared = repr((*head, sorted(self._contents.items())))
            digest.update(shared.encode("utf-8", "surrogateescape"))
            for i, name in enumerate(self.ids):
                sample = f"\0{name}\0{self._hash_image(i)}\0{self._hash_label(i)}"
                digest.update(sample.encode("utf-8", "surrogateescape"))  # names of any bytes
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _hash_image(self, i: int) -> str:
        return str(file_size(self.image_path(i)))

    def state_on_disk(self) -> str:
        """A hash (hex) of where the image files are, their sizes and when each was changed.

        What features kept from earlier runs go by: unlike the fingerprint it tells a changed image
        of the same size, and another copy of the dataset.
        """
        if self._state is None:
            digest = hashlib.sha256(os.fsencode(self.root.resolve()))
            for path in dict.fromkeys(self.image_path(i) for i in range(len(self))):
                found = file_state(path)
                digest.update(f"\0{found.st_size}\0{found.st_mtime_ns}".encode())
            self._state = digest.hexdigest()
        return self._state

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
        if splits is None:
            wanted, optional = list(cls.info.splits), cls.info.optional_splits
        else:
            wanted, optional = [splits] if isinstance(splits, str) else list(splits), ()
        found = {}
        for split in wanted:
            try:
                dataset = cls(root, split, **options)
            except VecaError as error:
                missing = error.missing if isinstance(error, DatasetError) else ()
                if split in optional and missing:
                    found[split] = SplitCheck(notes=(f"not there: {', '.join(missing[:3])}",))
                else:
                    found[split] = SplitCheck(problems=(str(error),), missing=missing)
            else:
                problems = dataset.faults() if contents else ()
                found[split] = SplitCheck(len(dataset), dataset.notes, tuple(problems))
        return Check(cls.info, Path(root), found)

    def faults(self, limit: int = 20) -> list[str]:
        """Read every sample; return what is wrong with the first `limit` that cannot be used."""
        faults: list[str] = []
        for i in range(len(self)):
            try:
                self._try(i)
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
