"""Every attack by its name: the module that makes it, and what it is in a line."""

from __future__ import annotations

from typing import NamedTuple


class Attack(NamedTuple):
    summary: str
    count: int
    """Cases of a usual run: of each target, or kills in all."""
    minutes: float
    """Of a usual run on two cores, about."""


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
