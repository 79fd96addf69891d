"""The dry run, the command, and the recipes that come with the project."""

from __future__ import annotations

from pathlib import Path

import pytest

import veca
from distill.small import settings
from veca.cli.distill import distill as command
from veca.distill import DistillError, load_config, read_metrics, recipe
from veca.distill.dry_run import dry_run
from veca.errors import InputError

RECIPES = recipe.FOLDER


def test_a_dry_run_says_and_tries_and_writes_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = dry_run(settings(data={"hold_out": 4}, ema=0.9, nested={"per_step": 2}))
    text = "\n".join(found.lines)
    for words in (
        "2 layers, width 32, 8 cores, features of width 60",
        "filters, width 60, stride 16, licence Apache-2.0, standardised",
        "20 to train on",
        "4 of 24 images held out",
        "6 (2 of warm-up), about 24 samples",
        "normuon",
        "cpu",
        "tried one batch of 4 at 32 px with 8 cores",
    ):
        assert words in text
    assert 0 < found.loss < 10
    assert found.memory.total > found.memory.weights > 0
    assert list(tmp_path.iterdir()) == []


def test_a_dense_student_is_told_of_no_budget() -> None:
    text = "\n".join(dry_run(settings(student={"dense": True})).lines)
    assert "full attention" in text and "tried one batch of 4 at 32 px: loss" in text
    assert "cores" not in text and "budgets" not in text


def test_the_estimate_is_of_the_size_of_what_is_measured() -> None:
    # Large enough that activations, not odds and ends, make up the most.
    config = settings(
        student={"config": {"depth": 4, "width": 128, "heads": 2, "num_cores": 16}},
        schedule={"size": 64, "batch": 8},
    )
    found = dry_run(config)
    beside_weights = found.memory.student + found.memory.targets + found.memory.images
    assert 0.4 < beside_weights / found.peak_bytes < 2.5


def test_memory_grows_with_what_needs_it() -> None:
    small = dry_run(settings()).memory
    assert dry_run(settings(ema=0.9)).memory.weights > small.weights
    assert dry_run(settings(schedule={"batch": 8})).memory.student == 2 * small.student
    assert dry_run(settings(optimizer={"accumulate": 2})).memory.student == small.student // 2


def test_the_command_runs_a_recipe_with_changes(tmp_path, capsys) -> None:
    path = tmp_path / "small.toml"
    path.write_text(settings().to_toml())
    command(config=path, data="photos:9", out=tmp_path / "run", set_=["schedule.steps=3"])
    assert len(read_metrics(tmp_path / "run")) == 3
    assert "the student is in" in capsys.readouterr().out
    assert veca.load(tmp_path / "run" / "final").config.num_cores == 8
    with pytest.raises(DistillError, match="--resume"):
        command(config=path, data="photos:9", out=tmp_path / "run")
    command(config=path, data="photos:9", out=tmp_path / "run", resume=True)
    assert len(read_metrics(tmp_path / "run")) == 6


def test_the_command_tries_without_a_place_to_write(tmp_path, capsys) -> None:
    path = tmp_path / "small.toml"
    path.write_text(settings().to_toml())
    command(config=path, dry_run=True)
    assert "tried one batch" in capsys.readouterr().out
    with pytest.raises(InputError, match="--out"):
        command(config=path)


def test_there_are_recipes() -> None:
    names = {path.stem for path in RECIPES.glob("*.toml")}
    assert {
        f"paper-{size}-stage{n}" for size in ("small", "base", "large") for n in (1, 2)
    } <= names
    assert {"coco-pair-stage1", "coco-pair-stage2"} <= names
    assert "laptop" in names


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_is_valid_and_says_what_to_expect(path: Path) -> None:
    load_config(path)
    head = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for word in (f"--config {path.stem} ", "Hardware:", "Cost:", "Expected:"):
        assert word in head


def test_the_papers_recipes_are_the_papers() -> None:
    first = load_config(RECIPES / "paper-base-stage1.toml")
    assert (first.schedule.epochs, first.schedule.warmup_epochs) == (135, 25)
    assert (first.optimizer.lr, first.optimizer.lr_min, first.optimizer.weight_decay) == (
        4e-4,
        5e-5,
        0.015,
    )
    assert first.schedule.size == 256 and first.schedule.batch == 6 * 128
    second = load_config(RECIPES / "paper-base-stage2.toml")
    assert (second.schedule.steps, second.schedule.warmup) == (50_000, 7_000)
    assert (second.optimizer.lr, second.optimizer.lr_min, second.optimizer.weight_decay) == (
        8e-5,
        3e-5,
        0.01,
    )
    a, b = second.schedule.phases
    assert (a.until, dict(a.draw)) == (7_000, {256: 0.35, 384: 0.35, 512: 0.30})
    assert dict(b.draw) == {256: 0.15, 384: 0.25, 512: 0.30, 768: 0.30}


@pytest.mark.slow
def test_the_laptop_recipe_learns_from_its_first_steps(tmp_path) -> None:
    command(
        config=RECIPES / "laptop.toml",
        out=tmp_path,
        set_=["schedule.steps=8", "schedule.warmup=2", "schedule.batch=8", "data.hold_out=8"],
    )
    records = read_metrics(tmp_path)
    assert records[-1]["loss"] < records[0]["loss"]
