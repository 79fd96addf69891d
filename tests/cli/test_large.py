"""`veca large`, `veca read`, `veca viz large`: from a file to features, regions and a page."""

from __future__ import annotations

import inspect
import json

import numpy as np
import pytest
import torch
from PIL import Image

from veca import large, save
from veca.cli.large import large as command
from veca.cli.main import main

pytest.importorskip("zarr", reason="needs the extra large")


@pytest.fixture
def weights(tiny, tmp_path):
    return str(save(tiny, tmp_path / "weights.safetensors"))


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (150, 212, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def run(*words):
    return main([str(word) for word in words])


def test_from_a_picture_to_regions(tiny, weights, photo, tmp_path, capsys):
    out, common = tmp_path / "f.zarr", ("--weights", weights, "--device", "cpu")
    asked = ("large", photo, "--out", out, "--context", "image", *common)
    assert run(*asked, "--cores", 5) == 0
    said = capsys.readouterr().out
    assert "212 x 150 pixels" in said and "14 x 10 patches" in said and "140 patches" in said
    store = large.FeatureStore(out)
    assert store.features.shape == (10, 14, tiny.config.width)
    assert run("read", out, "--region", "16,32,48,32", "--out", tmp_path / "a.npy", *common) == 0
    assert "from the store" in capsys.readouterr().out
    words = ("read", out, "--region", "16,32,48,32", "--out", tmp_path / "b.npy", "--compute")
    assert run(*words, *common) == 0
    assert "core memory" in capsys.readouterr().out
    a, b = (np.load(tmp_path / f"{name}.npy") for name in "ab")
    assert a.shape == (2, 3, tiny.config.width)
    assert np.abs(a.astype(float) - b).max() < 2e-3
    assert run(*asked, "--cores", 5) == 0  # again
    assert "already" in capsys.readouterr().out
    assert run(*asked, "--cores", 4) == 2
    assert "other cores" in capsys.readouterr().err
    assert run(*asked, "--cores", 4, "--overwrite") == 0


def test_the_default_context_is_that_of_the_measurement():
    default = inspect.signature(command).parameters["context"].default
    assert default == large.sweep.COMMON_CONTEXT == large.LargeJob.context


def test_the_memory_alone(tiny, weights, photo, tmp_path, capsys):
    out, common = tmp_path / "m.zarr", ("--weights", weights, "--device", "cpu")
    assert run("large", photo, "--out", out, "--no-features", *common) == 2
    assert "core memory" in capsys.readouterr().err and not out.exists()
    assert run("large", photo, "--out", out, "--no-features", "--context", "image", *common) == 0
    assert run("read", out, "--region", "0,0,20,20", "--out", tmp_path / "r.npy", *common) == 0
    assert "core memory" in capsys.readouterr().out
    photo.rename(tmp_path / "moved.png")
    words = ("read", out, "--region", "0,0,20,20", "--out", tmp_path / "r.npy", *common)
    assert run(*words) == 2 and "photo.png" in capsys.readouterr().err
    assert run(*words, "--picture", tmp_path / "moved.png") == 0


def test_several_pictures(weights, photo, tmp_path, capsys):
    Image.open(photo).crop((0, 0, 100, 90)).save(tmp_path / "part.png")
    (tmp_path / "bad.png").write_text("no picture")
    words = ("--out", tmp_path / "many", "--weights", weights, "--device", "cpu")
    pictures = [photo, tmp_path / "part.png"]
    assert run("large", *pictures, tmp_path / "bad.png", *words) == 2
    found = capsys.readouterr()
    assert "bad.png" in found.out and "2 of 3" in found.out and "failed" in found.err
    assert large.FeatureStore(tmp_path / "many" / "part.zarr").grid == (6, 7)
    assert run("large", *pictures, *words) == 0  # what is there stays
    assert run("large", photo, photo, *words) == 2 and "rename" in capsys.readouterr().err


@pytest.mark.slow
def test_several_pictures_on_a_cluster(tiny, weights, photo, tmp_path, capsys):
    pytest.importorskip("ray", reason="needs the extra ray")
    Image.open(photo).crop((0, 0, 100, 90)).save(tmp_path / "part.png")
    (tmp_path / "bad.png").write_text("no picture")
    pictures = (photo, tmp_path / "part.png", tmp_path / "bad.png")
    words = ("--out", tmp_path / "many", "--weights", weights, "--engine", "ray", "--device", "cpu")
    assert run("large", *pictures, *words) == 2
    assert "bad.png" in capsys.readouterr().out
    found = large.FeatureStore(tmp_path / "many" / "photo.zarr").features[:]
    wanted = large.features(tiny, photo, width="native", context="tile").features
    assert np.abs(found - wanted).max() < 2e-3


def test_what_a_worker_of_a_cluster_does(weights, photo, tmp_path, capsys, monkeypatch):
    """Without the cluster, which takes long to start."""
    import sys
    import types

    def spread(worker, given, tasks, **options):
        assert options["device"] == "cpu"
        one = worker({**given, "device": "cpu", "cpus": torch.get_num_threads()})
        return (one(task) for task in tasks)

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(get=lambda work: work))
    monkeypatch.setattr("veca.large.collection.spread", spread)
    (tmp_path / "bad.png").write_text("no picture")
    words = ("--out", tmp_path / "many", "--weights", weights, "--device", "cpu")
    words = (*words, "--precision", "bf16")
    assert run("large", photo, tmp_path / "bad.png", *words, "--engine", "ray") == 2
    assert "1 of 2 pictures" in capsys.readouterr().out
    store = tmp_path / "many" / "photo.zarr"
    assert run("large", photo, "--out", tmp_path / "alone.zarr", *words[2:]) == 0
    alone = large.FeatureStore(tmp_path / "alone.zarr")
    assert alone.facts["precision"] == "bf16"
    assert large.FeatureStore(store).facts["precision"] == "bf16"
    assert np.array_equal(large.FeatureStore(store).features[:], alone.features[:])


@pytest.mark.parametrize(
    ("words", "noun"),
    [
        (["--level", "3"], "no level 3"),
        (["--mpp", "0.5"], "does not say its resolution"),
        (["--region", "200,0,30,30"], "outside"),
        (["--region", "200"], "region"),
        (["--mask", "nodata"], "data"),
        (["--mask", "MASK"], "size"),
        (["--mask", "EMPTY"], "no patch"),
        (["--memory", "50kB"], "needs"),
        (["--context", "sea"], "image"),
        (["--keep", "0.5", "--context", "image"], "keep"),
        (["--keep", "auto"], "share"),
        (["--range", "9"], "LOW,HIGH"),
        (["--pool", "4"], ".h5"),
        (["--out", "features.zip"], ".zarr"),
    ],
)
def test_bad_input_is_a_line(weights, photo, tmp_path, capsys, words, noun):
    Image.fromarray(np.ones((9, 150), np.uint8)).save(tmp_path / "mask.png")
    Image.fromarray(np.zeros((150, 212), np.uint8)).save(tmp_path / "empty.png")
    places = {"MASK": tmp_path / "mask.png", "EMPTY": tmp_path / "empty.png"}
    before = sorted(path.name for path in tmp_path.iterdir())
    given = [places.get(word, word) for word in words]
    out = [] if "--out" in words else ["--out", tmp_path / "f.zarr"]
    assert run("large", photo, *out, "--weights", weights, "--device", "cpu", *given) == 2
    error = capsys.readouterr().err
    assert noun in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_page(weights, photo, tmp_path, capsys):
    out, page = tmp_path / "f.zarr", tmp_path / "page"
    mask = np.zeros((150, 212), np.uint8)
    mask[:, 64:] = 1
    Image.fromarray(mask).save(tmp_path / "mask.png")
    words = ("--mask", tmp_path / "mask.png", "--weights", weights, "--device", "cpu")
    assert run("large", photo, "--out", out, *words) == 0
    viewer = tmp_path / "openseadragon"
    assert run("viz", "large", out, "--out", page, "--openseadragon", viewer) == 2
    (viewer / "build" / "openseadragon").mkdir(parents=True)
    (viewer / "build" / "openseadragon" / "openseadragon.min.js").write_text("// it")
    (viewer / "LICENSE.txt").write_text("free")
    assert run("viz", "large", out, "--out", page, "--openseadragon", viewer) == 0
    assert (page / "openseadragon.min.js").read_text() == "// it"
    with Image.open(page / "overview.png") as overview:
        assert overview.size == (2 * 212 + 16, 150)
    text = (page / "index.html").read_text()
    data = json.loads(text.split("const data = ")[1].split(";\n")[0])
    assert data["size"] == [212, 150] and data["features"]["width"] == 14
    finest = sorted((page / "picture_files" / "8").iterdir())
    assert [path.name for path in finest] == ["0_0.jpg"]
    with Image.open(page / "features_files" / "4" / "0_0.png") as tile:
        assert tile.size == (14, 10)
        alpha = np.asarray(tile)[..., 3]
    assert not alpha[:, :4].any() and (alpha[:, 4:] == 255).all()
    assert "http-equiv" in text and '<script src="openseadragon.min.js">' in text
