"""Models by name, and what of their origin goes with them when they are saved again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import veca
from conftest import SMALLEST
from veca.errors import ConfigError, WeightsError
from veca.weights import find, load, names, read_provenance, save


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights called "mine", found by name, that have all a distilled student has."""
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    about = {"teacher": {"name": "t"}, "steps": 7, "data": {"source": "d", "images": 3}}
    model = veca.create_model(SMALLEST)
    folder = save(model, tmp_path / "cache" / "mine", provenance=about, dtype=torch.float16)
    (folder / "targets.safetensors").write_bytes(b"scales")
    return folder


# -------------------------------------------------------------------------------------- by name


def test_list_models(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = veca.list_models()
    assert {*veca.PRESETS, "mine"} == set(every) and every == sorted(every)
    assert veca.list_models("*small*") == veca.list_models("small") == ["veca_small_patch16"]
    assert veca.list_models(["mi*", "*base*"]) == ["mine", "veca_base_patch16"]
    assert "mine" in veca.list_models(pretrained=True)
    assert "veca_large_patch16" not in veca.list_models(pretrained=True)
    monkeypatch.setitem(names.NAMED, "veca_large_patch16", "owner/name")
    assert veca.list_models("*large*", pretrained=True) == ["veca_large_patch16"]


def test_fresh_by_default_and_stored_on_request(own: Path) -> None:
    fresh = veca.create_model("tiny", depth=2)
    assert fresh.training and fresh.config.depth == 2 and fresh.name is None
    for stored in (
        veca.create_model("mine", pretrained=True),
        veca.create_model("mine", True),
        veca.create_model(str(own), pretrained=True, depth=SMALLEST.depth),
    ):
        assert torch.equal(stored.norm.weight, load("mine").norm.weight)
        assert stored.name == "mine" and not stored.training
    with pytest.raises(WeightsError, match="nowhere"):
        veca.create_model("nowhere", pretrained=True)


def test_changes_that_contradict_the_weights_are_refused(own: Path) -> None:
    with pytest.raises(ConfigError, match=r"depth=3.*pretrained") as caught:
        veca.create_model("mine", pretrained=True, depth=9)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="image_mean"):
        veca.create_model("mine", pretrained=True, image_mean=(0.5, 0.5, 0.5))
    with pytest.raises(ConfigError, match="'depth'"):
        veca.create_model("mine", pretrained=True, dept=2)
    with pytest.raises(ConfigError, match="name of weights"):
        veca.create_model(SMALLEST, pretrained=True)


def test_what_concerns_training_alone_may_change(own: Path) -> None:
    model = veca.create_model("mine", pretrained=True, dropout=0.25, rope_shift=None)
    assert model.config == load("mine").config.replace(dropout=0.25, rope_shift=None)
    assert model.blocks[0].attn.dropout == 0.25
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(images).patches, load("mine")(images).patches)
    assert (model.name, model.provenance["steps"]) == ("mine", 7)


# ---------------------------------------------------------------------------- saved once more


def test_the_shipped_weights_keep_all_that_is_known_of_them(tmp_path: Path) -> None:
    before = read_provenance("tiny")
    folder = save(load("tiny"), tmp_path / "again")
    after = read_provenance(folder)
    own = {"tensors_sha256", "file_sha256", "code_version"}  # of the new file
    assert len(before) == len(after) == 27 and before.keys() == after.keys()
    assert {k: v for k, v in after.items() if k not in own} == {
        k: v for k, v in before.items() if k not in own
    }
    name = "targets.safetensors"
    assert (folder / name).read_bytes() == (find("tiny") / name).read_bytes()
    assert torch.equal(load(folder).norm.weight, load("tiny").norm.weight)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("again", [None, torch.float16])
def test_the_same_numbers_in_another_dtype_are_the_same_weights(
    tmp_path: Path, stored: torch.dtype, again: torch.dtype | None
) -> None:
    model = veca.create_model(SMALLEST)
    save(model, tmp_path / "a", provenance={"steps": 7}, dtype=stored)
    save(load(tmp_path / "a"), tmp_path / "b", dtype=again)
    assert read_provenance(tmp_path / "b")["steps"] == 7
    assert read_provenance(save(load(tmp_path / "b"), tmp_path / "c.safetensors"))["steps"] == 7


def test_changed_weights_derive_from_what_they_were(own: Path, tmp_path: Path) -> None:
    model = load("mine")
    nn.init.ones_(model.norm.bias)
    about = read_provenance(save(model, tmp_path / "tuned"))
    assert about["derived_from"]["steps"] == 7 and "steps" not in about
    assert (tmp_path / "tuned" / "targets.safetensors").read_bytes() == b"scales"
    # What a caller says wins.
    about = read_provenance(save(model, tmp_path / "told", provenance={"steps": 9}))
    assert about["steps"] == 9 and "derived_from" not in about


def test_a_damaged_copy_of_the_provenance_keeps_nobody_from_loading(own: Path) -> None:
    (own / "provenance.json").write_text("{")
    assert load("mine").provenance["steps"] == 7


def test_transformers_keeps_it_too(own: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("veca.integrations.transformers")
    around = transformers.VecaModel.from_veca(load("mine"))
    around.save_pretrained(tmp_path / "one")
    transformers.VecaModel.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    for folder in ("one", "two"):
        assert read_provenance(tmp_path / folder)["steps"] == 7
        assert (tmp_path / folder / "targets.safetensors").read_bytes() == b"scales"


def test_heads_are_refused_by_their_name_in_timm() -> None:
    assert veca.create_model("tiny", num_classes=0).num_features == 192
    for pretrained in (False, True):
        with pytest.raises(ConfigError, match="head"):
            veca.create_model("tiny", pretrained, num_classes=10)
