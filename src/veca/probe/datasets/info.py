"""What is known about a dataset before it is read, what a check of it found, and its error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from veca.errors import DatasetError as DatasetError

TASKS = ("classification", "segmentation", "depth")
"""What a dataset can be for."""


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
