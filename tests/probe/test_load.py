"""Backbones, budgets and dataset options by what a user writes; data looked over before a run."""

from __future__ import annotations

import pytest
import torch

import veca
from probe import sets
from veca.cli.common import parse_keeps
from veca.errors import InputError
from veca.probe import (
    check_data,
    load_backbones,
    parse_budgets,
    parse_options,
    parse_precisions,
    probe_budgets,
)
from veca.probe.load import name_and_path
from veca.teachers import save_dense_vit


def test_backbones_by_name(tmp_path):
    veca.save(sets.model(), tmp_path / "mine")
    save_dense_vit(veca.DenseVit(sets.CONFIG), tmp_path / "control")
    found = load_backbones(
        [str(tmp_path / "mine"), f"dense={tmp_path / 'control'}"],
        teacher=str(tmp_path / "mine"),
        baselines=["blind"],
        budgets=[2, 8],
        dtype=torch.float64,
    )
    assert [(one.name, one.cores, one.role) for one in found] == [
        ("veca:mine", None, "teacher"), ("blind", None, "baseline"), ("mine", 2, "student"),
        ("mine", 8, "student"), ("dense", None, "baseline"),
    ]  # fmt: skip
    assert found[2].model is found[3].model
    assert next(found[2].model.parameters()).dtype == torch.float64
    assert [one.cores for one in load_backbones([str(tmp_path / "mine")])] == [8]
    with pytest.raises(InputError, match="--baseline"):
        load_backbones()
    with pytest.raises(InputError, match="--cores"):
        load_backbones(teacher=str(tmp_path / "mine"), budgets=[8])


def test_budgets():
    assert parse_budgets("8, 64") == [8, 64]
    assert parse_budgets("8,16,...,64") == [8, 16, 24, 32, 40, 48, 56, 64]
    assert parse_budgets("1,4,8,...,16") == [1, 4, 8, 12, 16]
    for wrong in ("8,...,64", "8,16,...", "8,16,...,63", "16,8,...,64", "a", ""):
        with pytest.raises(InputError, match="--cores"):
            parse_budgets(wrong)
    assert probe_budgets(64) == [8, 16, 24, 32, 40, 48, 56, 64]
    assert probe_budgets(4) == [4] and probe_budgets(20) == [8, 16, 20]


def test_precisions(tmp_path):
    assert parse_precisions("float32, int8,fp32") == ["fp32", "int8"]
    for wrong in ("", ",", "fp31", "fp32;int8"):
        with pytest.raises(InputError, match="precision"):
            parse_precisions(wrong)
    veca.save(sets.model(), tmp_path / "mine")
    found = load_backbones([str(tmp_path / "mine")], budgets=[2, 8], precision=["fp32", "bf16"])
    assert [(one.precision, one.cores) for one in found] == [
        ("fp32", 2), ("fp32", 8), ("bf16", 2), ("bf16", 8),
    ]  # fmt: skip
    assert [one.model.precision for one in found] == ["fp32", "fp32", "bf16", "bf16"]
    assert found[3].label == "mine C=8 bf16"
    (one, _) = load_backbones([str(tmp_path / "mine")], budgets=[2, 8], precision="bf16")
    assert one.precision is None and one.model.precision == "bf16"


def test_shares_of_tokens(tmp_path):
    assert parse_keeps("0.35, .5,1,auto") == [0.35, 0.5, 1.0, "auto"]
    for wrong in ("0", "1.5", "half", "nan", "0.5,,x", ""):
        with pytest.raises(InputError, match="keep"):
            parse_keeps(wrong)
    veca.save(sets.model(), tmp_path / "mine")
    found = load_backbones([str(tmp_path / "mine")], budgets=[2, 8], keep=[0.5, 1])
    assert [(one.cores, one.keep) for one in found] == [(2, 0.5), (2, 1), (8, 0.5), (8, 1)]
    with pytest.raises(InputError, match="--keep"):
        load_backbones(teacher=str(tmp_path / "mine"), keep=[0.5])
    with pytest.raises(InputError, match="agreement"):
        load_backbones([str(tmp_path / "mine")], keep=[0.5], agreement=0.98)


def test_names_of_weights(tmp_path):
    (tmp_path / "run" / "best").mkdir(parents=True)
    assert name_and_path(str(tmp_path / "run" / "best")) == ("best", str(tmp_path / "run" / "best"))
    assert name_and_path("mine=a/b") == ("mine", "a/b")
    assert name_and_path("veca_small_patch16") == ("veca_small_patch16", "veca_small_patch16")


def test_options_of_a_dataset():
    assert parse_options(["partition=2", "classes = ['a', 'b']", "name=pets"]) == {
        "partition": 2, "classes": ["a", "b"], "name": "pets",
    }  # fmt: skip
    with pytest.raises(InputError, match="NAME=VALUE"):
        parse_options(["partition"])


def test_data_is_looked_over_once_for_each_kind_of_label(tmp_path):
    root = sets.class_folders(tmp_path / "pets")
    (found,) = check_data(["knn", "linear"], "folder", root)
    assert found.ok and found.splits["train"].count == 24
    (root / "test" / "red" / "000.png").write_bytes(b"nothing")
    (found,) = check_data(["logreg"], "folder", root)
    assert not found.ok
    with pytest.raises(InputError, match="'knn'"):
        list(check_data(["kn"], "folder", root))
