"""`veca probe` and `veca report`: from folders to tables and a page."""

from __future__ import annotations

import json

import pytest
import torch
import typer

import veca
from probe import sets
from veca.cli.probe import probe
from veca.cli.report import report
from veca.errors import DatasetError, InputError, WeightsError
from veca.probe import ProbeError, as_backbone, repeat_command, run_folder, run_probe
from veca.teachers import save_dense_vit

SMALL = [
    "--device=cpu", "--threads=1", "--set=timing.repeats=1", "--set=timing.seconds=0.0",
    "--set=knn.k=[1,3]", "--set=knn.report_k=3", "--size=32",
]  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    app = typer.Typer()
    app.command("probe")(probe)
    app.command("report")(report)
    return lambda *args: app([str(a) for a in args], standalone_mode=False)


@pytest.fixture
def weights(tmp_path):
    veca.save(sets.model(), tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture
def pets(tmp_path):
    return sets.class_folders(tmp_path / "pets")


def arguments(pets, weights, out, *more):
    return [
        "probe", "knn", "--data", pets, "--dataset", "folder", "--weights", weights,
        "--out", out, *SMALL, *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_from_a_folder_to_tables_and_a_page(run, pets, weights, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plot needs the extra viz")
    out = tmp_path / "runs" / "a"
    run(*arguments(pets, weights, out, "--cores", "2,4,...,8", "--teacher", weights))
    printed = capsys.readouterr().out
    assert "knn on folder, protocol quick+" in printed and "teacher" in printed
    assert {p.name for p in out.iterdir()} == {
        "results.json", "results.csv", "results.md", "plot.png",
    }  # fmt: skip
    record = json.loads((out / "results.json").read_text())
    assert [r["cores"] for r in record["rows"]] == [None, 2, 4, 6, 8]
    assert record["rows"][-1]["retention_teacher"] == 1.0  # the same weights
    assert record["protocol"]["knn"]["k"] == [1, 3]
    assert all(r["ms"] > 0 for r in record["rows"])
    assert record["command"].startswith("veca probe knn --data pets --dataset folder")
    assert str(tmp_path) not in (out / "results.json").read_text()
    assert str(tmp_path) not in (out / "results.md").read_text()
    run("report", tmp_path / "runs")
    assert "1 run, 1 comparison" in capsys.readouterr().out.replace("\n", " ")
    assert (tmp_path / "runs" / "report.html").exists()


@pytest.mark.slow
def test_again_replaces_and_another_is_refused(run, pets, weights, tmp_path):
    out = tmp_path / "out"
    run(*arguments(pets, weights, out, "--cores=8", "--no-time"))
    run(*arguments(pets, weights, out, "--cores=8", "--no-time"))
    record = json.loads((out / "results.json").read_text())
    assert record["cache"]["decoded"] == 0
    with pytest.raises(ProbeError, match="--overwrite"):
        run(*arguments(pets, weights, out, "--cores=4", "--no-time"))
    run(*arguments(pets, weights, out, "--cores=4", "--no-time", "--overwrite", "--no-cache"))
    assert json.loads((out / "results.json").read_text())["cache"]["decoded"] == 39


def test_shares_of_tokens_are_swept(run, pets, weights, tmp_path, capsys):
    out = tmp_path / "out"
    run(*arguments(pets, weights, out, "--cores=2,8", "--keep=0.3,1", "--no-time", "--size=64"))
    record = json.loads((out / "results.json").read_text())
    assert [(r["cores"], r["keep"]) for r in record["rows"]] == [
        (2, 0.3), (2, 1.0), (8, 0.3), (8, 1.0),
    ]  # fmt: skip
    assert record["rows"][2]["flops"] < record["rows"][3]["flops"]
    assert record["rows"][2]["retention_full"] is not None and "--keep 0.3,1" in record["command"]
    assert "keep" in (out / "results.md").read_text() and "keep" in capsys.readouterr().out
    run(*arguments(pets, weights, out, "--cores=8", "--keep=0.3", "--no-time", "--size=64",
                   "--overwrite"))  # fmt: skip
    assert json.loads((out / "results.json").read_text())["cache"]["decoded"] == 0
    for wrong in ("0", "1.5", "half", "nan"):
        with pytest.raises(InputError, match="keep"):
            run(*arguments(pets, weights, out, "--keep", wrong))


def test_precisions_are_compared_with_the_first(run, pets, weights, tmp_path, capsys):
    out = tmp_path / "out"
    run(*arguments(pets, weights, out, "--cores=2,8", "--precision=bf16", "--no-time"))
    alone = json.loads((out / "results.json").read_text())
    words = ("--cores=2,8", "--precision=fp32,bf16", "--no-time")
    run(*arguments(pets, weights, out, *words, "--overwrite"))
    record = json.loads((out / "results.json").read_text())
    assert [(r["precision"], r["cores"]) for r in record["rows"]] == [
        ("fp32", 2), ("fp32", 8), ("bf16", 2), ("bf16", 8),
    ]  # fmt: skip
    full = record["rows"][1]
    assert full["retention_full"] == 1 and full["interval_full"] == [1, 1]
    for row, before in zip(record["rows"][2:], alone["rows"], strict=True):
        kept = row["metrics"]["top1"] / full["metrics"]["top1"]
        assert row["retention_full"] == kept and before["precision"] is None
        assert row["metrics"] == before["metrics"]
    # bfloat16 was in the cache already; float32 was not.
    assert record["cache"]["computed"] == record["cache"]["reused"] > 0
    assert record["protocol"]["extract"]["dtype"] == "float32"
    assert "--precision fp32,bf16" in record["command"]
    assert "bf16" in capsys.readouterr().out and "in fp32" in (out / "results.md").read_text()
    with pytest.raises(InputError, match="bf16"):
        run(*arguments(pets, weights, out, "--precision=fp32,bf17"))


def test_a_dense_control_is_a_row_beside_veca(run, pets, weights, tmp_path):
    torch.manual_seed(0)
    control = veca.DenseVit(sets.CONFIG).eval()
    save_dense_vit(control, tmp_path / "control")
    out = tmp_path / "out"
    run(
        *arguments(pets, weights, out, "--cores=2,8", "--no-time"),
        "--weights", f"dense={tmp_path / 'control'}",
    )  # fmt: skip
    record = json.loads((out / "results.json").read_text())
    assert [(r["name"], r["cores"], r["role"]) for r in record["rows"]] == [
        ("mine", 2, "student"), ("mine", 8, "student"), ("dense", None, "baseline"),
    ]  # fmt: skip
    assert record["backbones"]["dense"]["kind"] == "dense"
    assert record["rows"][2]["interactions"] == 4**2
    assert "--weights dense=control" in record["command"]
    assert str(tmp_path) not in (out / "results.json").read_text()
    alone = run_probe(
        "knn", [as_backbone(control, name="dense")], dataset="folder", data=pets, cache=None,
        protocol=sets.protocol(), measure_time=False,
    )  # fmt: skip
    assert alone.rows[0].metrics == record["rows"][2]["metrics"]


def test_features_before_the_projection(run, pets, tmp_path):
    wide = sets.model(config=sets.CONFIG.replace(output_width=48))
    veca.save(wide, tmp_path / "wide")
    found = {}
    for name, more in (("after", []), ("before", ["--no-projection"])):
        out = tmp_path / name
        run(*arguments(pets, tmp_path / "wide", out, "--cores=8", "--no-time", *more))
        found[name] = json.loads((out / "results.json").read_text())
    assert found["after"]["protocol"]["extract"]["projection"] is True
    assert found["before"]["protocol"]["extract"]["projection"] is False
    assert found["before"]["cache"]["decoded"] == 39  # an entry of its own
    assert "--set extract.projection=false" in found["before"]["command"]
    assert "before the output projection" in (tmp_path / "before" / "results.md").read_text()
    assert "before the output projection" not in (tmp_path / "after" / "results.md").read_text()


def test_only_looking_at_the_data(run, pets, tmp_path, capsys):
    assert run("probe", "knn", "--data", pets, "--dataset", "folder", "--check") in (None, 0)
    assert "train: 24 images" in capsys.readouterr().out
    (pets / "train" / "red" / "000.png").write_bytes(b"nothing")
    assert run("probe", "knn", "--data", pets, "--dataset", "folder", "--check") == 1
    printed = capsys.readouterr().out
    assert "red/000.png" in printed and "get it from: your own images" in printed
    assert run("probe", "segmentation", "--data", pets, "--dataset", "voc", "--check") == 1
    printed = capsys.readouterr().out
    assert "ImageSets/Segmentation/val.txt" in printed and "host.robots.ox.ac.uk" in printed
    with pytest.raises(InputError, match="'knn'"):
        run("probe", "kn", "--data", pets, "--dataset", "folder", "--check")


def test_options_of_the_dataset(run, pets, weights, tmp_path):
    (pets / "train" / "white").mkdir()
    words = arguments(pets, weights, tmp_path / "out", "--cores=8", "--no-time")
    with pytest.raises(DatasetError, match="white"):
        run(*words)
    run(*words, "--option", "allow_empty_classes=true")
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert record["dataset"]["train"]["options"] == {"allow_empty_classes": True}
    assert "--option allow_empty_classes=true" in record["command"]
    assert any("never predicted, such as white" in note for note in record["notes"])
    for wrong, error, noun in (
        ("alow_empty_classes=true", ProbeError, "'allow_empty_classes'"),
        ("x", InputError, "NAME=VALUE"),
    ):
        with pytest.raises(error, match=noun):
            run(*words, "--option", wrong)


@pytest.mark.slow
def test_several_tasks(run, pets, weights, tmp_path):
    words = arguments(pets, weights, tmp_path / "out", "--cores=8", "--no-time")
    words[1] = "knn,logreg"
    run(*words)
    records = [
        json.loads((tmp_path / "out" / f"{task}-folder" / "results.json").read_text())
        for task in ("knn", "logreg")
    ]
    assert [record["task"] for record in records] == ["knn", "logreg"]
    assert [record["cache"]["decoded"] for record in records] == [39, 0]  # features once


def test_mistakes(run, pets, weights, tmp_path):
    out = tmp_path / "out"
    for more, error, noun in (
        (["--cores=99"], InputError, "99"),
        (["--set=knn.kk=1"], ProbeError, r"'knn\.kk'"),
        (["--protocol=dinov3-ade20k", "--set=seed=1"], ProbeError, "dinov3-ade20k"),
        (["--size=x"], InputError, "--size"),
    ):
        words = [w for w in arguments(pets, weights, out) if "knn." not in str(w)]
        with pytest.raises(error, match=noun):
            run(*words, *more)
    with pytest.raises(InputError, match="--baseline"):
        run("probe", "knn", "--data", pets, "--dataset", "folder", *SMALL)
    with pytest.raises(WeightsError, match="no-such"):
        run(*arguments(pets, tmp_path / "no-such", out))
    with pytest.raises(InputError, match="--cores"):
        run(
            "probe", "knn", "--data", pets, "--dataset", "folder", "--teacher", weights,
            "--cores=8", *SMALL,
        )  # fmt: skip
    assert not out.exists()


def test_data_that_is_not_there_leaves_no_folder(run, pets, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    words = ["--data", "nope", "--dataset", "folder", "--weights", weights, *SMALL]
    for more in ([], ["--out", tmp_path / "a" / "b"]):
        with pytest.raises(DatasetError, match="nope"):
            run("probe", "knn,logreg", *words, *more)
    assert sorted(tmp_path.iterdir()) == before


def test_the_command_is_fit_to_publish(tmp_path):
    options = {
        "data": tmp_path / "some pets", "weights": [str(tmp_path / "w"), "x"], "verify": True,
        "size": None,
    }  # fmt: skip
    text = repeat_command("knn", options)
    assert text == "veca probe knn --data 'some pets' --weights w --weights x --verify"


def test_where_results_go(tmp_path):
    assert run_folder("knn", "folder").as_posix() == "runs/probe/knn-folder"
    assert run_folder("knn", "folder", tmp_path) == tmp_path
    assert run_folder("knn", "folder", tmp_path, several=True) == tmp_path / "knn-folder"
    assert run_folder("knn", "folder", several=True).as_posix() == "runs/probe/knn-folder"
