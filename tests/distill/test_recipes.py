"""Recipes are a base and what they change; what is run has not changed since 0.1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from veca.distill import DistillConfig, load_config
from veca.distill.config import READER

RECIPES = Path(__file__).parents[2] / "configs"
PUBLISHED = json.loads((Path(__file__).parent / "recipes-0.1.json").read_text())
"""The tables of 0.1's files, each of which was whole."""
BASES = sorted((RECIPES / "base").glob("*.toml"))


def test_recipes_of_0_1_are_there() -> None:
    assert sorted(PUBLISHED) == sorted(path.stem for path in RECIPES.glob("*.toml"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_those_of_0_1(name: str) -> None:
    path = RECIPES / f"{name}.toml"
    assert READER.read(path).table == PUBLISHED[name]
    assert load_config(path) == DistillConfig.from_dict(PUBLISHED[name])


@pytest.mark.parametrize("base", BASES, ids=lambda path: path.stem)
def test_a_base_says_who_builds_on_it(base: Path) -> None:
    head = base.read_text().split("\n\n")[0]
    line = f'extends = "base/{base.name}"'
    users = [path.name for path in RECIPES.glob("*.toml") if line in path.read_text()]
    assert len(users) > 1
    assert all(name in head for name in users)
