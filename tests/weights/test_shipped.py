"""The weights that come with a clone: found by name, whole, small enough, with their origin."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import veca
from veca.distill import load_targets
from veca.errors import WeightsError
from veca.quickstart import bundled_photos
from veca.weights import read_provenance, weights_hash
from veca.weights.names import find

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("veca_tiny_patch16", "veca_small_patch16")


@pytest.fixture(params=NAMES)
def name(request, monkeypatch, tmp_path):
    """A name of shipped weights, where no other weights can be found."""
    monkeypatch.setenv("VECA_CACHE", str(tmp_path))
    return request.param


def test_found_by_both_names_and_whole(name):
    model = veca.load(name)
    short = veca.load(name.removeprefix("veca_").removesuffix("_patch16"))
    assert all(map(torch.equal, model.parameters(), short.parameters()))
    assert model.config.feature_width == 1280
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert load_targets(find(name)).keys() == {"efficientnet-lite2"}


def test_where_they_come_from(name):
    about = read_provenance(name)
    stages, earlier = [about], about["init"]["provenance"]
    while earlier is not None:
        stages.append(earlier)
        earlier = earlier["init"]["provenance"]
    assert len(stages) > 1
    for stage in stages:
        assert stage["teacher"]["name"] == "efficientnet-lite2"
        assert stage["teacher"]["licence"] == "Apache-2.0"
        assert "COCO" in stage["data"]["source"] and stage["data"]["licence"]
        assert stage["complete"] is True and stage["seed"] >= 0
        assert stage["steps"] > 0 and stage["code"].startswith("0.")
    assert about["samples_in_all"] == sum(stage["samples"] for stage in stages)
    text = json.dumps(about)
    for word in ("/home/", "/work", "/tmp", "/root"):
        assert word not in text


def test_the_card_says_what_they_reach(name):
    card = (find(name) / "README.md").read_text(encoding="utf-8")
    assert f"# {name}" in card and "## Results" in card and "Apache-2.0" in card
    assert "| dense control |" in card


def test_documents_say_how_much_they_saw(name):
    seen = f"{read_provenance(name)['samples_in_all'] / 1e6:.1f} M"
    for document in ("README.md", "docs/results.md"):
        assert seen in (ROOT / document).read_text(encoding="utf-8"), document
    assert seen in (find(name) / "README.md").read_text(encoding="utf-8")


def test_what_is_told_of_them_was_measured_with_them(name):
    results = ROOT / "benchmarks" / "results"
    tuned = [json.loads(file.read_text()) for file in (results / "finetune").glob("*.json")]
    found = [one["weights_sha256"] for one in tuned if one["weights"] == name]
    with (results / "probes.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["backbone"] == name]
    groups = ("shipped", "seeds", "intervals", "few")
    kept = [row for row in rows if row["record"].partition("/")[0] in groups]
    by_record = {row["record"]: row["weights_sha256"] for row in kept}
    assert {row["weights_sha256"] for row in kept} == set(by_record.values())
    found += by_record.values()
    assert len(found) >= 14  # five probes, one with two more seeds; six with intervals; few cores
    assert set(found) == {weights_hash(veca.load(name))}


def test_small_enough_to_ship():
    def size(folder):
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    assert size(find("veca_tiny_patch16")) < 12e6
    assert size(ROOT / "weights") < 50e6


def test_trained_and_elastic(name):
    """A photo is more like itself at another budget than like another photo."""
    model = veca.load(name)
    images = torch.cat([veca.preprocess(p, size=(192, 192)).pixels for p in bundled_photos()[:3]])
    with torch.inference_mode():
        few, all_ = (model(images, cores=c).cls for c in (8, 64))
    alike = F.cosine_similarity(few[:, None], all_[None], dim=-1)
    assert alike.diagonal().min() > 0.8
    assert (alike.argmax(dim=1) == torch.arange(3)).all()
    assert (alike - torch.eye(3) * 2).max() < alike.diagonal().min() - 0.2


def test_outside_a_clone_small_is_asked_for_by_path(monkeypatch, tmp_path):
    """An installed package has no weights/ beside it; its message says where there is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site-packages" / "veca").mkdir(parents=True)
    monkeypatch.setattr("veca.weights.names._PACKAGE", tmp_path / "site-packages" / "veca")
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    with pytest.raises(WeightsError, match="repository"):
        veca.load("small")
    with pytest.raises(WeightsError, match="create_model"):
        veca.load("base")
