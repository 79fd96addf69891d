"""The runner of `benchmarks/`: every name runs its module, results are flat files. No times."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

import veca
from benchmarks import elastic, registry
from benchmarks.__main__ import main
from benchmarks.common import write_csv
from benchmarks.rows import RESULTS, read, read_csv
from veca.quickstart import bundled_photos

ROOT = Path(__file__).parents[1]
PHOTOS = bundled_photos()[0].parent


def test_the_list_names_every_module_that_runs(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = {line.split()[0]: "GPU" in line.split() for line in lines if line.startswith("  ")}
    assert told == {name: one.gpu for name, one in registry.BENCHMARKS.items()}
    modules = {p.stem for p in (ROOT / "benchmarks").glob("*.py") if "def run(" in p.read_text()}
    assert modules - {"registry"} == set(told)


def test_the_list_needs_nothing_heavy():
    code = "import sys, benchmarks.__main__ as b; b.main(['--list']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", registry.BENCHMARKS)
def test_each_tells_its_options_and_its_command(name, capsys):
    if name == "plot":
        pytest.importorskip("matplotlib", reason="plots need the extra viz")
    if name == "export_speed":
        pytest.importorskip("onnxruntime", reason="files run with the extra export")
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"python -m benchmarks {name}" in capsys.readouterr().out
    assert f"python -m benchmarks {name}" in registry.module_of(name).__doc__


@pytest.mark.parametrize("words", [[], ["nothing"], ["--nothing"]])
def test_what_is_not_there_is_refused(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2


def test_rows_are_written_with_the_machine_and_others_are_kept(tmp_path):
    where = {"folder": tmp_path, "device": "cpu"}
    write_csv("x", [{"weights": "a", "ms": 1.0}, {"weights": "b", "ms": 2.0}], **where)
    path = write_csv("x", [{"weights": "b", "ms": 3.123456}], **where, key="weights")
    rows = read_csv(path)
    assert [(row["weights"], row["ms"]) for row in rows] == [("a", "1"), ("b", "3.1235")]
    assert {"cpu", "torch", "veca", "date"} <= set(rows[0])
    assert rows[1]["veca"] == veca.__version__


def test_a_small_race_on_this_cpu(tmp_path, capsys):
    words = ["--sizes", "32", "--cores", "8", "--repeats", "1", "--seconds", "0"]
    assert main(["cpu", "--preset", "tiny", *words, "--out", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / "cpu.csv")
    assert [(row["model"], row["cores"]) for row in rows] == [("dense", ""), ("veca", "8")]
    # Measured before rows said more: no column of the results has gone.
    assert set(read("cpu")[0]) <= set(rows[0])


@pytest.mark.slow
def test_merging_beside_fewer_cores_and_smaller_images(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "SIZES", (128, 1024))
    words = ["elastic", "--photos", str(PHOTOS), "--weights", "tiny"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*words, "--agreement", "--limit", "2", "--out", str(first)]) == 0
    agreed = {row["point"]: row for row in read_csv(first / "elastic.csv")}
    assert float(agreed[elastic.PLAIN]["cls"]) == pytest.approx(1, abs=1e-5)
    assert float(agreed[elastic.PLAIN]["patches"]) == pytest.approx(1, abs=1e-5)
    for point in ("keep", "cores", "size", "cores and size"):
        assert float(agreed[point]["cls"]) < 0.9999 > float(agreed[point]["patches"])
    assert {row["ahead"] for row in agreed.values()} == {""}  # not before times are there

    assert main([*words, "--times", "--timed", "1", "--out", str(second)]) == 0
    files = [str(folder / "elastic.csv") for folder in (second, first)]
    assert main(["elastic", "--join", *files, "--out", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / "elastic.csv")
    assert len(rows) == len(elastic.points(128))
    assert all(row["cls"] and float(row["time"]) > 0 for row in rows)
    assert {row["ahead"] for row in rows if row["point"] == "keep"} <= {"yes", "no"}
    assert list(rows[0]) == list(read("elastic")[0])


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_kept_results_are_flat_and_name_no_ones_machine(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/home/|/work|/tmp|/root", text)
    header, *lines = csv.reader(text.splitlines())
    assert lines and {len(line) for line in lines} == {len(header)}
