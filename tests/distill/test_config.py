"""Settings: read from TOML, written as TOML, changed by overrides, refused when wrong."""

from __future__ import annotations

import pytest

from distill.small import settings
from veca.distill import DistillConfig, DistillError, load_config
from veca.distill.schedule import Phase


def test_toml_there_and_back(tmp_path) -> None:
    config = settings(
        schedule={
            "steps": 5,
            "size": 0,
            "phases": [{"until": 2, "draw": {"32": 1}}, {"draw": {"48": 1}}],
        },
        ema=0.5,
    )
    (tmp_path / "c.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "c.toml") == config
    assert config.schedule.phases == (Phase({32: 1.0}, until=2), Phase({48: 1.0}))


def test_defaults_are_the_papers_first_stage() -> None:
    config = DistillConfig.from_dict({"schedule": {"steps": 1, "size": 256}})
    assert config.optimizer.name == "normuon"
    assert (config.optimizer.lr, config.optimizer.lr_min) == (4e-4, 5e-5)
    assert (config.optimizer.weight_decay, config.optimizer.mu, config.optimizer.beta2) == (
        0.015,
        0.95,
        0.95,
    )
    assert (config.loss.dense, config.loss.mse) == (1.0, 1.0)
    assert config.data.augment.kind == "paper"


def test_overrides(tmp_path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(settings().to_toml())
    config = load_config(
        path,
        overrides=[
            "optimizer.lr=1e-3",
            "teachers.0.weight = 2",
            "nested.budgets=[2, 8]",
            "student.config.depth=3",
            "device=cpu",
        ],
        data="some/folder",
        teacher="dinov2-vits14",
    )
    assert config.optimizer.lr == 1e-3
    assert config.teachers[0].weight == 2.0
    assert config.teachers[0].name == "dinov2-vits14"
    assert config.nested.budgets == (2, 8)
    assert config.student.config["depth"] == 3
    assert config.data.source == "some/folder"


def test_a_teacher_can_be_named_without_a_file() -> None:
    config = load_config(overrides=["schedule.steps=1", "schedule.size=32"], teacher="filters")
    assert [t.name for t in config.teachers] == ["filters"]


@pytest.mark.parametrize(
    ("changes", "noun"),
    [
        ({"optimizer": {"lrr": 1.0}}, "'lr'"),
        ({"sed": 1}, "'seed'"),
        ({"data": {"augment": {"king": "rrc"}}}, "'kind'"),
        ({"teachers": [{"weight": 1.0}]}, "'name'"),
        ({"optimizer": {"lr": "fast"}}, r"optimizer\.lr .*'fast'"),
        ({"optimizer": {"lr": True}}, r"optimizer\.lr .*True"),
        ({"schedule": {"batch": 0}}, r"schedule\.batch .*\b0\b"),
        ({"schedule": {"batch": 2.5}}, r"schedule\.batch .*2\.5"),
        ({"schedule": {"epochs": 3}}, "steps or epochs"),
        ({"schedule": {"steps": 0}}, "--config"),
        ({"schedule": {"size": 0}}, "phases"),
        ({"schedule": {"batch_by_size": {"big": 3}}}, "batch_by_size"),
        ({"optimizer": {"name": "muno"}}, "'muon'"),
        ({"precision": "fp8"}, "'fp8'"),
        ({"parallel": "ddpp"}, "'ddp'"),
        ({"ema": 1.0}, r"^ema\b"),
        ({"optimizer": {"lr_min": 1.0}}, r"optimizer\.lr_min"),
        ({"validation": {"every": 5}}, r"validation\.every"),
        ({"nested": {"budgets": 8}}, r"nested\.budgets"),
        ({"student": {"compile": 1}}, r"student\.compile"),
        ({"siblings": {"b": {"graphs": True, "gradient_checkpointing": True}}}, r"siblings\.b"),
        ({"data": {"augment": {"area": [0.5, 2.0]}}}, r"augment\.area"),
    ],
)
def test_what_is_wrong_is_said(changes: dict, noun: str) -> None:
    with pytest.raises(DistillError, match=noun):
        settings(**changes)


@pytest.mark.parametrize(
    ("assignment", "noun"),
    [
        ("optimizer.lr", "section.name=value"),
        ("optimizer.lr.fast=1", "table"),
        ("teachers.7.weight=1", r"teachers\.7"),
    ],
)
def test_overrides_that_say_nothing(tmp_path, assignment: str, noun: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(settings().to_toml())
    with pytest.raises(DistillError, match=noun):
        load_config(path, overrides=[assignment])


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(DistillError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(DistillError, match=r"bad\.toml"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "unknown.toml").write_text("seeed = 1")
    with pytest.raises(DistillError, match=r"unknown\.toml.*'seed'"):
        load_config(tmp_path / "unknown.toml")
