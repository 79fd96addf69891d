"""The recipes that come with the package: settings of runs, with what each needs and gives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from veca.errors import DistillError, suggest

FOLDER = Path(__file__).parent / "recipes"
_FORMER = "configs"
"""Where recipes lay in a clone of 0.1: paths that name it find them still."""
_LABEL = re.compile(r"\b(Hardware|Cost|Expected): ")


@dataclass(frozen=True)
class Recipe:
    """A recipe as its first lines describe it."""

    name: str
    """What `--config` and `extends` take."""
    path: Path
    about: str
    command: str
    hardware: str
    cost: str
    expected: str


def recipe_names() -> list[str]:
    """The names of the recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def list_recipes() -> list[Recipe]:
    """All recipes, those that run on the smallest machine first."""
    recipes = [_described(name) for name in recipe_names()]
    return sorted(recipes, key=lambda one: ("CPU" not in one.hardware, one.name))


def find_recipe(text: str) -> Path | None:
    """The file of a recipe by its name; None for the path of a file, be it there or not.

    Raises:
        DistillError: no recipe has this name, and it is no path.
    """
    path = Path(text)
    if path.expanduser().is_file():
        return None
    known = {one.relative_to(FOLDER).as_posix(): one for one in FOLDER.rglob("*.toml")}
    former = path.name if path.parent.name == _FORMER else ""
    found = known.get(f"{text}.toml") or known.get(text) or known.get(former)
    if found is None and path.name == text and not path.suffix:
        raise DistillError(f"unknown recipe {suggest(text, recipe_names())} A file ends in .toml.")
    return found


def recipe_text(name: str) -> str:
    """A recipe as a file of its own: what it extends is found from anywhere."""
    if name not in recipe_names():
        raise DistillError(f"unknown recipe {suggest(name, recipe_names())}")
    return (FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def _described(name: str) -> Recipe:
    path = FOLDER / f"{name}.toml"
    head = path.read_text(encoding="utf-8").partition("\n\n")[0]
    lines = [line.lstrip("#").rstrip() for line in head.splitlines()]
    command = " ".join(line.strip().rstrip("\\ ") for line in lines if line.startswith("   "))
    words = " ".join(" ".join(line for line in lines if not line.startswith("   ")).split())
    about, *labelled = _LABEL.split(words)
    facts = dict(zip(labelled[::2], (text.strip() for text in labelled[1::2]), strict=True))
    return Recipe(
        name, path, about.strip(), command, facts["Hardware"], facts["Cost"], facts["Expected"]
    )
