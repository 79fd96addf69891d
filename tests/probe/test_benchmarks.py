"""The benchmarks that run probes, on a handful of generated images."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import veca
from benchmarks.__main__ import main
from probe import sets
from veca.probe import read_run
from veca.teachers import save_dense_vit

SETTINGS = [
    "timing.repeats=0", "knn.k=[1,3]", "knn.report_k=3", "knn.view.size=32",
    "linear.view.size=32", "linear.iterations=5", "linear.learning_rates=[0.01,0.1]",
    "segmentation.view.size=32", "segmentation.optimizer.iterations=3",
    "segmentation.optimizer.batch=4", "depth.view.size=32", "depth.optimizer.iterations=3",
    "depth.optimizer.batch=4",
]  # fmt: skip


def pets(root: Path) -> Path:
    """Three images of each of 37 breeds to train on, one to test on; trimaps of 1, 2 and 3."""
    random = np.random.default_rng(0)
    lists: dict[str, list[str]] = {"trainval": [], "test": []}
    for breed in range(37):
        for i in range(4):
            name = f"breed_{breed:02d}_{i}"
            lists["test" if i == 3 else "trainval"].append(f"{name} {breed + 1} 1 1")
            sets.photo(
                root / "images" / f"{name}.jpg",
                random.integers(0, 256, (34, 40, 3), dtype=np.uint8),
            )
            trimap = random.integers(1, 4, (34, 40), dtype=np.uint8)
            sets.photo(root / "annotations" / "trimaps" / f"{name}.png", trimap)
    for split, lines in lists.items():
        (root / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return root


def camvid(root: Path) -> Path:
    random = np.random.default_rng(1)
    for split, count in (("train", 5), ("test", 3)):
        for i in range(count):
            pixels = random.integers(0, 256, (36, 48, 3), dtype=np.uint8)
            sets.photo(root / split / f"{i}.png", pixels)
            labels = random.integers(0, 12, (36, 48), dtype=np.uint8)
            sets.photo(root / f"{split}annot" / f"{i}.png", labels)
    return root


def scau(root: Path) -> Path:
    random = np.random.default_rng(2)
    for i in range(10):
        pixels = random.integers(0, 256, (32, 48, 3), dtype=np.uint8)
        sets.photo(root / "rgb" / f"{9 * i:04d}.jpg", pixels)
        depth = random.integers(0, 12_000, (32, 48)).astype(np.uint16)
        sets.photo(root / "depth" / f"{9 * i:04d}.png", depth)
    return root


def nyu(root: Path) -> Path:
    random = np.random.default_rng(3)
    for split, count in (("train", 6), ("test", 4)):
        lines = []
        for i in range(count):
            scene = f"{split}_room_{i // 2}"
            names = f"{scene}/rgb_{i}.jpg", f"{scene}/sync_depth_{i}.png"
            pixels = random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
            sets.photo(root / names[0], pixels)
            depth = random.integers(700, 9_900, (48, 64)).astype(np.uint16)
            sets.photo(root / names[1], depth)
            lines.append(" ".join([*names, "518.8579"]))
        (root / f"nyu_{split}.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.slow
def test_shares_of_tokens_and_precisions_at_a_size(tmp_path):
    veca.save(sets.model(), tmp_path / "one")
    words = [
        "--camvid", camvid(tmp_path / "camvid"), "--weights", f"a={tmp_path / 'one'}",
        "--teacher", "", "--cores", "4,8", "--keep", "0.4,1", "--size", "64",
        "--precision", "fp32,bf16", "--device", "cpu", "--no-cache", "--no-time",
        "--out", tmp_path / "out",
        *(word for setting in SETTINGS for word in ("--set", setting)),
    ]  # fmt: skip
    assert main(["probes", *map(str, words)]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "summary.csv").open()))
    assert [(r["cores"], r["keep"], r["precision"], r["px"]) for r in rows] == [
        (cores, keep, precision, "64")
        for cores in "48" for keep in ("0.4", "1") for precision in ("fp32", "bf16")
    ]  # fmt: skip
    found = read_run(tmp_path / "out" / "camvid")
    assert all(row.retention_full is not None for row in found.rows)
    assert f"{found.score(found.rows[0]):.6g}" == rows[0]["camvid miou"]


@pytest.mark.slow
def test_every_probe_in_one_go(tmp_path, capsys):
    veca.save(sets.model(), tmp_path / "one")
    veca.save(sets.model(seed=1), tmp_path / "two")
    torch.manual_seed(0)
    save_dense_vit(veca.DenseVit(sets.CONFIG).eval(), tmp_path / "control")
    words = [
        "--pets", pets(tmp_path / "pets"), "--camvid", camvid(tmp_path / "camvid"),
        "--scau", scau(tmp_path / "scau"), "--nyu", nyu(tmp_path / "nyu"),
        "--teacher", tmp_path / "two", "--baseline", "blind",
        "--weights", f"a={tmp_path / 'one'}", "--weights", f"b={tmp_path / 'two'}",
        "--weights", f"dense={tmp_path / 'control'}", "--cores", "4,8", "--device", "cpu",
        "--threads", 1, "--cache", tmp_path / "cache", "--out", tmp_path / "out",
        *(word for setting in SETTINGS for word in ("--set", setting)),
    ]  # fmt: skip
    words = [str(word) for word in words]
    assert main(["probes", *words]) == 0
    out = tmp_path / "out"
    names = ["pets-knn", "pets-linear", "pets-trimaps", "camvid", "scau-depth", "nyuv2-depth"]
    for name in names:
        run = read_run(out / name)
        labels = [row.label for row in run.rows]
        assert labels == ["veca:two", "blind", "a C=4", "a C=8", "b C=4", "b C=8", "dense"]
        # "b" at its full budget has the teacher's own weights.
        assert run.score(run.rows[5]) == pytest.approx(run.score(run.rows[0]), abs=0.03)
        assert run.command.startswith(f"veca probe {run.task} ")
        for file in (out / name).glob("results.*"):
            assert str(tmp_path) not in file.read_text()
    assert (out / "report.html").read_text().count("<h2") == 7
    rows = list(csv.DictReader((out / "summary.csv").open()))
    assert len(rows) == 7 and rows[1]["backbone"] == "a" and rows[1]["cores"] == "4"
    assert rows[1]["px"] == "32" and "keep" not in rows[1]
    knn = read_run(out / "pets-knn").rows[2].metrics["top1"]
    assert float(rows[1]["pets-knn top1"]) == pytest.approx(knn, rel=1e-4)
    assert "scau-depth, RMSE m" in capsys.readouterr().out
    # All of it as one flat file, a row a network, budget and probe.
    assert main(["collect", str(out), "--out", str(tmp_path / "flat.csv")]) == 0
    flat = list(csv.DictReader((tmp_path / "flat.csv").open()))
    assert [row["record"] for row in flat] == [name for name in sorted(names) for _ in range(7)]
    for row in flat:
        own = csv.DictReader((out / row["record"] / "results.csv").open())
        (line,) = (r for r in own if (r["backbone"], r["cores"]) == (row["backbone"], row["cores"]))
        told = {key: value for key, value in row.items() if value and key in line}
        assert told == {key: value for key, value in line.items() if value}
    networks = {row["backbone"]: row["weights_sha256"] for row in flat}
    assert networks["b"] == networks["veca:two"] != networks["a"] and not networks["blind"]
    # Once more, for one of them: from the cache, and over the old results.
    assert main(["probes", *words, "--only", "pets-knn"]) == 0
    assert read_run(out / "pets-knn").cache["decoded"] == 0


def test_a_probe_that_fails_does_not_stop_the_others(tmp_path, capsys):
    veca.save(sets.model(), tmp_path / "one")
    root = camvid(tmp_path / "camvid")
    Image.fromarray(np.zeros((5, 5), dtype=np.uint8)).save(root / "testannot" / "0.png")
    words = [
        "--camvid", root, "--scau", scau(tmp_path / "scau"), "--teacher", "", "--cores", 8,
        "--weights", tmp_path / "one", "--device", "cpu", "--no-cache", "--out", tmp_path / "out",
        *(word for setting in SETTINGS for word in ("--set", setting)),
    ]  # fmt: skip
    assert main(["probes", *(str(word) for word in words)]) == 1
    error = capsys.readouterr().err
    assert "5 x 5 pixels" in error and "failed: camvid" in error
    assert read_run(tmp_path / "out" / "scau-depth").rows
    assert not (tmp_path / "out" / "camvid" / "results.json").exists()
    assert main(["probes", "--teacher", "x"]) == 2


@pytest.mark.slow
def test_the_sweep_is_timed_and_comes_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(veca.__file__).parents[1]))
    veca.save(sets.model(), tmp_path / "one")
    words = [
        "probe_sweep", "--pets", pets(tmp_path / "pets"), "--weights", tmp_path / "one",
        "--cores", "4,8", "--threads", 1, "--out", tmp_path,
        *(word for setting in SETTINGS for word in ("--set", setting)),
    ]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    first, again = csv.DictReader((tmp_path / "probe-sweep.csv").open())
    assert first["decoded"] == first["images"] == "148" and again["decoded"] == "0"
    assert again["same_scores"] == "True" and first["budgets"] == "2"
    assert float(first["wall_s"]) > 0 and float(first["cpu_s"]) > 0
    assert float(again["cpu_times_faster"]) > 0
