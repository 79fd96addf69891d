"""The images a probe learns from and is scored on: splits, subsets, held-out images, labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veca.errors import InputError, ProbeError, check_choice, suggest
from veca.probe.cache import MemoryCache, memory_to_use
from veca.probe.datasets import Check, Dataset, check_dataset, find_dataset, open_dataset
from veca.probe.metrics import as_labels
from veca.probe.protocol import Subset, toml_value
from veca.probe.schedule import generator

DATASET_TASK = {
    "knn": "classification",
    "linear": "classification",
    "logreg": "classification",
    "segmentation": "segmentation",
    "depth": "depth",
}

_HELD_LABEL_BYTES = 256 * 2**20


@dataclass
class ProbeData:
    """Two splits, and which of their images are used."""

    train: Dataset
    test: Dataset
    train_indices: list[int]
    test_indices: list[int]
    notes: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """What the record of a run says of the data, as JSON types; no paths."""
        parts = {}
        for part, dataset, used in (
            ("train", self.train, self.train_indices),
            ("test", self.test, self.test_indices),
        ):
            parts[part] = {
                "dataset": dataset.name,
                "split": dataset.own_split,
                "images": len(dataset),
                "used": len(used),
                "fingerprint": dataset.fingerprint(),
                **({"options": dataset.options} if dataset.options else {}),
            }
        return {"name": self.test.name, "classes": self.test.num_classes, **parts}


def open_data(
    task: str,
    dataset: str,
    data: str | Path,
    *,
    train_dataset: str | None = None,
    train_data: str | Path | None = None,
    train_split: str = "train",
    test_split: str | None = None,
    options: Mapping[str, Any] | None = None,
    subset: Subset,
    seed: int,
) -> ProbeData:
    """Open what a task needs.

    Args:
        dataset, data: its name and folder; see `veca.probe.datasets`.
        train_dataset, train_data: where to learn from, if elsewhere: ImageNetV2 and ReaL have no
            training images of their own and take those of imagenet-1k.
        test_split: by default the one that published scores are measured on.
        options: what `open_dataset` takes for either of the two, such as `partition` of SUN397.
    """
    kind = DATASET_TASK[task]
    test_info = find_dataset(dataset, kind).info
    train_name = train_dataset or dataset
    train_info = find_dataset(train_name, kind).info
    if train_split == "train" and "train" not in train_info.splits:
        raise ProbeError(
            f"{train_info.name} has no images to train on; name another set for that with "
            "--train-dataset (and --train-data), such as imagenet-1k."
        )
    given = dict(options or {})
    for name in given:
        known = {**test_info.options, **train_info.options}
        if name not in known:
            hint = suggest(name, known) if known else f"{name!r}; it has none"
            raise ProbeError(f"{test_info.name} has no option {hint}")
    test = open_dataset(
        dataset,
        data,
        test_split or test_info.report_split,
        task=kind,
        **{name: value for name, value in given.items() if name in test_info.options},
    )
    train = open_dataset(
        train_name,
        train_data or data,
        train_split,
        task=kind,
        **{name: value for name, value in given.items() if name in train_info.options},
    )
    if train.name == test.name and train.split == test.split:
        raise ProbeError(f"the {test.split} split cannot be trained on and scored at once.")
    if train.num_classes != test.num_classes:
        raise ProbeError(
            f"{train.name} has {train.num_classes} classes and {test.name} {test.num_classes}; "
            "a probe trained on one cannot be scored on the other."
        )
    by_class = kind == "classification"
    found = ProbeData(
        train,
        test,
        _pick(train, subset.train, by_class, seed),
        _pick(test, subset.test, by_class, seed),
    )
    for part, used in ((train, found.train_indices), (test, found.test_indices)):
        found.notes += [f"{part.name} {part.own_split}: {note}" for note in part.notes]
        if len(used) < len(part):
            found.notes.append(
                f"{part.name} {part.own_split}: {len(used):,} of {len(part):,} images, by the "
                "protocol's subset"
            )
    if by_class:
        _check_classes(found)
    return found


def parse_options(lines: Iterable[str]) -> dict[str, Any]:
    """["partition=2"] -> {"partition": 2}, the `options` of `open_data`; values as in TOML."""
    found = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if not equals:
            raise InputError(f"--option reads NAME=VALUE, such as partition=2; got {line!r}.")
        found[name.strip()] = toml_value(value.strip(), line)
    return found


def check_data(
    tasks: Iterable[str], dataset: str, data: str | Path, options: Mapping[str, Any] | None = None
) -> Iterator[Check]:
    """Read every image and label that tasks would need; one check for each kind of label."""
    tasks = list(tasks)
    for task in tasks:
        check_choice("task", task, DATASET_TASK)
    for kind in dict.fromkeys(DATASET_TASK[task] for task in tasks):
        yield check_dataset(dataset, data, task=kind, contents=True, **(options or {}))


def _pick(dataset: Dataset, limit: int, by_class: bool, seed: int) -> list[int]:
    """All images, or `limit` of them (of each class), drawn with the seed, in the set's order."""
    everything = list(range(len(dataset)))
    if not limit:
        return everything
    groups: dict[int, list[int]] = {}
    for i in everything:
        label = (dataset.labels(i) or [-1])[0] if by_class else 0
        groups.setdefault(label, []).append(i)
    chosen: list[int] = []
    for label, members in groups.items():
        order = generator(seed, "subset", label + 1).permutation(len(members))[:limit]
        chosen += [members[place] for place in order]
    return sorted(chosen)


def _check_classes(data: ProbeData) -> None:
    """A class without a training image can never be predicted: said, since it costs accuracy."""
    seen = {data.train.label(i) for i in data.train_indices}
    empty = [name for label, name in enumerate(data.train.classes) if label not in seen]
    if empty:
        data.notes.append(
            f"{len(empty)} of {data.train.num_classes} classes have no training image and are "
            f"never predicted, such as {empty[0]}"
        )


def train_labels(data: ProbeData) -> Tensor:
    """int64 [training images used]."""
    values = [data.train.label(i) for i in data.train_indices]
    names = [data.train.ids[i] for i in data.train_indices]
    return as_labels(values, data.train.num_classes, names)


def test_labels(data: ProbeData) -> list[list[int]]:
    """Every label that counts as right, by image."""
    right = [list(data.test.labels(i)) for i in data.test_indices]
    for labels, i in zip(right, data.test_indices, strict=True):
        as_labels(labels, data.test.num_classes, [data.test.ids[i]] * len(labels))
    return right


def hold_out(data: ProbeData, labels: Tensor, share: float, seed: int) -> Tensor:
    """bool [training images used]: those that settings are chosen on, never trained on before.

    Drawn class by class; whole groups where the dataset says that images belong together.
    """
    held = torch.zeros(len(labels), dtype=torch.bool)
    if share <= 0:
        return held
    groups = data.train.groups
    if groups is not None:
        mine = np.array([groups[i] for i in data.train_indices])
        for group in generator(seed, "split").permutation(np.unique(mine)):
            if held.double().mean() >= share:
                break
            held |= torch.from_numpy(mine == group)
    else:
        for label in labels.unique().tolist():
            members = torch.nonzero(labels == label).flatten()
            count = max(1, round(share * len(members))) if len(members) > 1 else 0
            order = generator(seed, "split", label + 1).permutation(len(members))[:count]
            held[members[torch.from_numpy(order)]] = True
    if not held.any() or held.all():
        raise ProbeError(
            f"{len(labels)} training images are too few to hold some out for choosing settings; "
            "give more images, or a protocol with one setting."
        )
    return held


def labels_of(
    read: Callable[[int], Tensor], device: torch.device | None = None
) -> MemoryCache[int, Tensor]:
    """Masks or depth by place, read from the disk once as far as memory allows, on a device."""
    place = device or torch.device("cpu")
    return MemoryCache(lambda i: read(i).to(place), memory_to_use(place, _HELD_LABEL_BYTES))


def read_mask(dataset: Dataset, i: int, size: Sequence[int]) -> Tensor:
    """uint8 [H, W], checked against the size of the image whose features are used."""
    mask = dataset.mask(i)
    if mask.shape != tuple(size):
        raise ProbeError(
            f"{dataset.ids[i]}: a mask of {mask.shape[0]} x {mask.shape[1]} pixels for an image of "
            f"{size[0]} x {size[1]}; both need the same size."
        )
    known = mask[mask != dataset.ignore_index]
    if known.size and known.max() >= dataset.num_classes:
        raise ProbeError(
            f"{dataset.ids[i]}: label {known.max()} is outside the classes "
            f"0..{dataset.num_classes - 1}."
        )
    return torch.from_numpy(np.array(mask))
