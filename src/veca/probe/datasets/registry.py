"""Datasets by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from veca.errors import DatasetError, suggest
from veca.probe.datasets.base import TASKS, Check, Dataset, DatasetInfo

_REGISTRY: dict[str, type[Dataset]] = {}

_D = TypeVar("_D", bound=type[Dataset])


def register(cls: _D) -> _D:
    """Make a dataset class known under `cls.info.name` and its aliases; use as a decorator."""
    if cls.info.name in _REGISTRY:
        raise DatasetError(f"a dataset named {cls.info.name!r} is registered already")
    if cls.info.task not in TASKS:
        raise DatasetError(f"{cls.info.name}: unknown task {suggest(cls.info.task, TASKS)}")
    _REGISTRY[cls.info.name] = cls
    return cls


def list_datasets(task: str | None = None) -> list[DatasetInfo]:
    """What can be opened, by task; of one task, if given."""
    _check_task(task)
    infos = [cls.info for cls in _REGISTRY.values() if task in (None, cls.info.task)]
    return sorted(infos, key=lambda info: TASKS.index(info.task))


def find_dataset(name: str, task: str | None = None) -> type[Dataset]:
    """The class behind a name or an alias; blanks, "-", "_" and capitals make no difference.

    Some names stand for one dataset per task ("oxford-pets": breeds or trimaps); `task` chooses.
    """
    _check_task(task)
    key = _plain(name)
    named = [cls for cls in _REGISTRY.values() if _plain(cls.info.name) == key]
    found = named + [
        cls
        for cls in _REGISTRY.values()
        if cls not in named and key in map(_plain, cls.info.aliases)
    ]
    if not found:
        raise DatasetError(f"unknown dataset {suggest(name, _REGISTRY)}")
    fitting = [cls for cls in found if task in (None, cls.info.task)]
    if not fitting:
        kind = found[0].info
        others = ", ".join(info.name for info in list_datasets(task))
        raise DatasetError(
            f"{kind.name} is a {kind.task} dataset, not for {task}; for {task} there are: {others}"
        )
    if len(fitting) > 1 and fitting[0] not in named:
        choice = ", ".join(f"{cls.info.name} ({cls.info.task})" for cls in fitting)
        raise DatasetError(f"{name!r} can be {choice}; use that name, or pass the task")
    return fitting[0]


def open_dataset(
    name: str, root: str | Path, split: str, *, task: str | None = None, **options: Any
) -> Dataset:
    """Open one split of a dataset in its public layout; every file it lists has to be there.

    Args:
        name: one of `list_datasets()`, or an alias.
        root: the folder that holds it, or the one its archive unpacked into.
        split: "train", "val" or "test" as far as the dataset has them, see `DatasetInfo.splits`.
        task: "classification", "segmentation" or "depth", to be sure, or where a name has several.
        options: those of `DatasetInfo.options`.

    Raises:
        DatasetError: no such dataset or split, files are missing, or a list is not right.
    """
    return find_dataset(name, task)(root, split, **options)


def check_dataset(
    name: str,
    root: str | Path,
    splits: Iterable[str] | None = None,
    *,
    task: str | None = None,
    contents: bool = False,
    **options: Any,
) -> Check:
    """Tell what is missing of a dataset, what was expected and where to get it; print the result.

    With `contents` every image and label is read too. See `Dataset.check`.
    """
    return find_dataset(name, task).check(root, splits, contents=contents, **options)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def _check_task(task: str | None) -> None:
    if task is not None and task not in TASKS:
        raise DatasetError(f"unknown task {suggest(task, TASKS)}")
