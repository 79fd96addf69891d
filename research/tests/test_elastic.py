"""The search for the best merging rule: its pass is the network's, whatever is asked of it."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image

import veca
from benchmarks.rows import read_csv
from research import elastic
from veca.quickstart import bundled_photos


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.22])
def test_the_packages_own_rule_gives_what_the_model_gives(keep):
    model = veca.load("tiny").eval()
    images = veca.preprocess(bundled_photos()[:2], size=(128, 160)).pixels
    with torch.inference_mode():
        *_, last = model.walk(images, keep=keep)
        out = model.output(last)
    own = elastic.own_rule(model.config)
    cls, patches, left = elastic.run(model, images, own, keep)
    torch.testing.assert_close(cls, out.cls, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(patches, out.patches, rtol=1e-4, atol=1e-4)
    count = last.periphery.multiplicity
    assert left[0] == 80 and left[-1] == (80 if count is None else (count > 0).sum() / 2)


@pytest.mark.parametrize("name", [name for name, rule in elastic.RULES.items() if name[0] == "3"])
def test_every_rule_runs(name):
    model = veca.create_model("tiny", depth=11, width=48).eval()
    images = torch.randn(1, 3, 128, 128)
    whole = elastic.run(model, images, elastic.Rule(), 1)[:2]
    *features, left = elastic.run(model, images, elastic.RULES[name], 0.4)
    agreed = elastic.agreement(features, whole)
    assert torch.isfinite(agreed).all() and (agreed < 1).all()
    work = elastic.work(model.config, left, 64, elastic.RULES[name].returned > 0)
    assert 0.3 < work < 1


def test_photos_are_dealt_out_and_asked(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    voc, davis, out = (tmp_path / name for name in ("voc", "davis", "out"))
    for folder in (voc / "JPEGImages", voc / "ImageSets/Segmentation", davis / "a", davis / "b"):
        folder.mkdir(parents=True)
    for name in ("1", "2", "3"):
        pixels = random.integers(0, 256, (450, 480, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(voc / f"JPEGImages/{name}.jpg")
    for i in range(6):
        Image.fromarray(pixels).save(davis / f"a/{i}.jpg")
        Image.fromarray(pixels).save(davis / f"b/{i}.jpg")
    (voc / "ImageSets/Segmentation/val.txt").write_text("2\n")
    words = ["elastic", "photos", "--voc", voc, "--davis", davis, "--out", out]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    elastic.main()
    files = sorted(out.rglob("*.webp"))
    assert not any(file.stem == "voc-2" for file in files)
    assert {file.parent.name for file in files} == {"choose", "benchmark"}
    assert {Image.open(file).size for file in files if "voc" in file.stem} == {(450, 450)}

    words = ["elastic", "rules", "--photos", out / "choose", "--weights", "tiny", "--device", "cpu"]
    words += ["--limit", 1, "--keeps", 0.5, "--rules", "5", "--out", tmp_path, "--size", 128]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    elastic.main()
    (row,) = read_csv(tmp_path / "elastic_rules.csv")
    assert row["rule"] == "5" and 0.5 < float(row["work"]) < 1 > float(row["cls"])


def test_large_photos_are_cut_to_squares(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    photos = tmp_path / "photos/of all sorts"
    photos.mkdir(parents=True)
    detail = random.integers(0, 256, (9, 64, 64, 3), dtype=np.uint8)
    for i, pixels in enumerate(detail):
        large = Image.fromarray(pixels).resize((1100, 1030), Image.Resampling.NEAREST)
        large.save(photos / f"a {i}.png")
    large.save(photos / "again.png")
    Image.fromarray(detail[0]).save(photos / "small.png")
    Image.new("RGB", (1100, 1100)).save(photos / "nothing in it.png")
    words = ["elastic", "photos", "--whole", tmp_path / "photos", "--out", tmp_path]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    elastic.main()
    found = {name: list((tmp_path / name).iterdir()) for name in ("choose", "benchmark")}
    assert [len(files) for files in found.values()] == [1, 8]
    assert {Image.open(file).size for files in found.values() for file in files} == {(1024, 1024)}
