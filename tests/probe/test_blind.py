"""A backbone that sees nothing knows places, and nothing of the image."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from probe import sets
from veca.cli.main import main
from veca.probe import BlindBackbone, run_probe
from veca.probe.blind import PLACES


def test_features_are_those_of_the_place_alone():
    blind = BlindBackbone()
    assert blind.grid_for((48, 70), 16) == (3, 4)
    out = blind.features(torch.rand(2, 3, 48, 64), (3, 4))
    again = blind.features(torch.zeros(1, 3, 480, 640), (3, 4))
    assert out.patches.shape == (2, 12, PLACES**2) and out.cls.shape == (2, 1)
    assert torch.equal(out.patches[0], out.patches[1])
    assert torch.equal(out.patches[0], again.patches[0])
    torch.testing.assert_close(out.patches.sum(2), torch.ones(2, 12))
    # As many cells as places: each has one of its own, whatever lies between them is shared.
    own = blind.features(torch.zeros(1, 3, 16, 16), (PLACES, PLACES)).patches[0]
    torch.testing.assert_close(own, torch.eye(PLACES**2))


@pytest.mark.slow
def test_it_learns_the_mean_of_each_place(tmp_path):
    """Depth that is near at the bottom and far at the top, and something that only a look tells."""
    rng = np.random.default_rng(0)
    slope = np.linspace(6.0, 2.0, 64)[:, None] * np.ones((1, 64))
    spread = 0.8
    for split, count in (("train", 40), ("test", 40)):
        for kind in ("rgb", "depth"):
            (tmp_path / kind / split).mkdir(parents=True)
        for i in range(count):
            brighter = i % 2
            photo = rng.integers(0, 100, (64, 64, 3)) + 100 * brighter
            depth = (slope + spread * (2 * brighter - 1)) * 1000
            Image.fromarray(photo.astype(np.uint8)).save(tmp_path / "rgb" / split / f"{i}.png")
            Image.fromarray(depth.astype(np.uint16)).save(tmp_path / "depth" / split / f"{i}.png")
    (tmp_path / "dataset.json").write_text('{"depth_scale": 1000, "max_depth": 10}')
    protocol = sets.protocol("depth.optimizer.iterations=600", "depth.optimizer.lr=1e-2")
    run = run_probe(
        "depth",
        [BlindBackbone()],
        dataset="rgb-depth",
        data=tmp_path,
        protocol=protocol,
        sizes=[64],
        cache=None,
        measure_time=False,
    )
    # What cannot be known is left, and little more.
    assert run.score(run.rows[0]) == pytest.approx(spread, abs=0.05)


def test_a_row_of_the_table(tmp_path, capsys):
    data = sets.images_masks(tmp_path / "data")
    out = tmp_path / "out"
    words = ["probe", "segmentation", "--data", str(data), "--dataset", "images-masks"]
    words += ["--baseline", "blind", "--size", "32", "--out", str(out), "--no-cache", "--no-time"]
    words += ["--set", "segmentation.optimizer.iterations=5"]
    words += ["--set", "segmentation.optimizer.warmup=1"]
    assert main(words) == 0
    record = json.loads((out / "results.json").read_text())
    assert [row["name"] for row in record["rows"]] == ["blind"]
    assert "--baseline blind" in Path(out / "results.md").read_text()
    assert "blind" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["knn", "linear", "logreg"])
def test_classification_without_a_look_is_a_guess(tmp_path, task):
    data = sets.class_folders(tmp_path / "data")
    run = run_probe(
        task,
        [BlindBackbone()],
        dataset="folder",
        data=data,
        protocol=sets.protocol(),
        sizes=[32],
        cache=None,
        measure_time=False,
    )
    classes = len(list((data / "train").iterdir()))
    assert run.score(run.rows[0]) == pytest.approx(1 / classes)
