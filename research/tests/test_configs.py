"""The recipes of the training's history can still be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from veca.distill import load_config

RECIPES = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


def test_there_are_recipes():
    assert len(RECIPES) == 15


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid_and_says_what_to_expect(path):
    load_config(path)
    head = path.read_text().split("\n\nseed")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for word in (f"research/configs/{path.name}", "Hardware:", "Cost:", "Expected:"):
        assert word in head
