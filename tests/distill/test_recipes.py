"""Recipes are a base and what they change; what is run has not changed since 0.1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from veca.cli.main import main
from veca.distill import DistillConfig, DistillError, list_recipes, load_config, recipe
from veca.distill.config import READER

RECIPES = recipe.FOLDER
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


def test_recipes_go_by_a_name_anywhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = load_config(RECIPES / "laptop.toml")
    # The second is where a clone of 0.1 had it.
    for name in ("laptop", "configs/laptop.toml"):
        assert load_config(name) == wanted
    Path("mine.toml").write_text('extends = "laptop"\nseed = 3\n')
    assert load_config("mine.toml") == wanted.replace(seed=3)
    Path("whole.toml").write_text(recipe.recipe_text("paper-base-stage1"))
    assert load_config("whole.toml") == load_config("paper-base-stage1")
    Path("configs").mkdir()
    Path("configs/laptop.toml").write_text('extends = "laptop"\nseed = 4\n')
    assert load_config("configs/laptop.toml").seed == 4  # what lies here comes first


def test_a_name_that_no_recipe_has(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DistillError, match="mean 'laptop'"):
        load_config("lapto")
    with pytest.raises(DistillError, match="veca recipes"):
        load_config("lapto.toml")
    with pytest.raises(DistillError, match="mean 'laptop'"):
        recipe.recipe_text("lapto")


def test_every_recipe_is_listed_with_what_it_needs() -> None:
    listed = {one.name: one for one in list_recipes()}
    assert sorted(listed) == sorted(PUBLISHED) and next(iter(listed)) == "laptop"
    for one in listed.values():
        assert all((one.about, one.hardware, one.cost, one.expected))
        assert f"--config {one.name} " in one.command
    assert listed["laptop"].hardware == "any CPU."


def test_the_commands_list(capsys, monkeypatch) -> None:
    for width in ("70", "200"):
        monkeypatch.setattr("veca.cli.common.console", Console(width=int(width)))
        assert main(["recipes"]) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in PUBLISHED) and "dinov3-vitb16" in shown
        assert main(["datasets"]) == 0
        shown = capsys.readouterr().out
        assert "oxford-pets" in shown and "nyu_train.txt" in shown and "licence" in shown
    assert main(["datasets", "pets", "--task", "classification"]) == 0
    shown = capsys.readouterr().out
    assert "train 3,680" in shown and "annotations/trainval.txt" in shown and "food101" not in shown
    assert main(["recipes", "laptop"]) == 0
    assert capsys.readouterr().out == recipe.recipe_text("laptop")
    assert main(["datasets", "oxford-pet"]) == 2 and main(["recipes", "lapto"]) == 2
