"""Every attack by its name: the module that makes it, and what it is in a line."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Attack:
    summary: str
    count: int
    """Cases of a usual run: of each target, or kills in all."""
    minutes: float
    """Of a usual run on two cores, about."""


class Report(NamedTuple):
    """What an attack found."""

    rows: list[dict[str, Any]]
    """Its table."""
    failed: list[str]
    finished: bool = True
    """False: it was stopped, and goes on when it is asked for again."""


@dataclass(frozen=True)
class Options:
    """What every attack is told."""

    seed: int
    count: int
    only: tuple[str, ...]
    """Targets; none: all."""
    state: Path
    """Where to keep what is done."""
    until: float | None
    """A moment of `time.monotonic` at which to stop."""

    @property
    def is_over(self) -> bool:
        return self.until is not None and time.monotonic() > self.until


ATTACKS = {
    "images": Attack("damaged images, four ways: read, features, pack, demo", 65, 8),
    "files": Attack("damaged files of every other format that is read", 100, 6),
    "kills": Attack("SIGKILLs at random moments of every command that can go on", 100, 4),
    "hostile": Attack("full disks, deleted folders, two writers, changed sources", 1, 1),
    "requests": Attack("requests to the demo that no page of ours sends", 300, 1),
    "network": Attack("commands with local weights where there is no network", 1, 1),
    "fuzz": Attack("coverage-guided fuzzing of readers (needs atheris); seconds a reader", 20, 2),
}


def listing() -> str:
    """Names, and a line about each."""
    width = max(map(len, ATTACKS))
    return "\n".join(
        f"  {name:<{width}}  {one.summary}; about {one.minutes:g} min"
        for name, one in ATTACKS.items()
    )
