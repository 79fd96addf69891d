"""`veca bench`: prints a table, writes a CSV and a plot, refuses what it cannot do."""

from __future__ import annotations

import csv
import sys

import pytest
import typer

import veca
from veca import VecaConfig
from veca.cli.bench import bench
from veca.errors import ConfigError, InputError, OutputError

QUICK = ["--sizes=32,64", "--threads=1", "--repeats=1", "--seconds=0", "--device=cpu"]


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(bench)
    return lambda *args: app([str(a) for a in args], standalone_mode=False)


@pytest.fixture
def weights(tmp_path):
    config = VecaConfig(depth=1, width=32, heads=2, num_cores=8)
    veca.save(veca.create_model(config), tmp_path / "mine")
    return tmp_path / "mine"


def test_table_csv_and_plot(run, weights, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plot needs the extra viz")
    run(weights, *QUICK, "--cores", "2,8", "--out", tmp_path / "b")
    printed = capsys.readouterr().out
    for text in ("mine, batch 1, cpu, fp32, 1 thread", "dense", "veca, 2 cores", "peak MiB"):
        assert text in printed
    assert "veca, 8 cores: from 32 to 64 px time grows as N^" in printed
    assert "veca, 2 cores against dense: " in printed
    with (tmp_path / "b" / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    at_each_size = [("dense", ""), ("veca", "2"), ("veca", "8")]
    assert [(r["model"], r["cores"]) for r in rows] == 2 * at_each_size
    assert [r["size"] for r in rows] == 3 * ["32"] + 3 * ["64"]
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["bench.csv", "bench.png"]


def test_shares_of_tokens_take_turns_too(run, weights, tmp_path, capsys):
    run(weights, *QUICK, "--cores=8", "--keep", "0.4,1", "--no-dense", "--out", tmp_path / "b")
    assert "veca, 8 cores, keep 0.4" in " ".join(capsys.readouterr().out.split())
    with (tmp_path / "b" / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["size"], r["keep"]) for r in rows] == [
        ("32", "0.4"), ("32", "1"), ("64", "0.4"), ("64", "1"),
    ]  # fmt: skip


def test_precisions_stand_beside_dense_in_the_same(run, weights, tmp_path, capsys):
    run(weights, *QUICK, "--cores=8", "--precision", "float32,int8", "--out", tmp_path / "b")
    printed = capsys.readouterr().out
    assert "cpu, fp32, int8, 1 thread" in printed and "veca, 8 cores, int8 against" in printed
    with (tmp_path / "b" / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    told = [(r["model"], r["precision"]) for r in rows]
    assert told == 2 * [("dense", "fp32"), ("veca", "fp32"), ("dense", "int8"), ("veca", "int8")]
    for dense, ours in zip(rows[::2], rows[1::2], strict=True):
        assert float(ours["speedup"]) == pytest.approx(
            float(dense["ms"]) / float(ours["ms"]), rel=1e-4
        )


def test_the_old_name_of_precision_still_works(run, weights, tmp_path, capsys):
    words = [*QUICK, "--no-dense", "--cores=8", "--out", tmp_path / "b"]
    run(weights, *words, "--dtype", "bfloat16")
    assert "--precision" in capsys.readouterr().err
    with (tmp_path / "b" / "bench.csv").open() as file:
        assert {row["precision"] for row in csv.DictReader(file)} == {"bf16"}


def test_without_matplotlib_the_rest_is_there(run, weights, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(weights, *QUICK, "--no-dense", "--out", tmp_path / "b")
    assert "no plot: the plot needs matplotlib" in capsys.readouterr().out
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["bench.csv"]


@pytest.mark.parametrize(
    ("args", "error", "noun"),
    [
        (("smal",), ConfigError, "'smal'"),
        (("tiny", "--sizes", "big"), InputError, "--sizes"),
        (("tiny", "--sizes", "100"), InputError, r"\[100\]"),
        (("tiny", "--cores", "65"), InputError, "cores"),
        (("tiny", "--dtype", "float8"), InputError, "'float8'"),
        (("tiny", "--precision", "fp32,in8"), InputError, "'in8'.*int8"),
        (("tiny", "--device", "abacus"), InputError, "abacus"),
        (("tiny", "--keep", "0"), InputError, "keep"),
        (("tiny", "--keep", "0.5,1.5"), InputError, "keep"),
        (("tiny", "--keep", "half"), InputError, "keep"),
        (("tiny", "--keep", "nan"), InputError, "keep"),
        (("tiny", "--keep", "auto"), InputError, "keep"),
    ],
)
def test_bad_input(run, tmp_path, args, error, noun):
    with pytest.raises(error, match=noun):
        run(*args, "--out", tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_before_measuring(run, tmp_path):
    (tmp_path / "b").write_text("a file")
    with pytest.raises(OutputError, match="--out"):
        run("tiny", "--out", tmp_path / "b")
