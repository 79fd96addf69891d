"""The command line as a user meets it: help, one line for every error, exit codes."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from PIL import Image

import veca
from veca import create_model, save
from veca.cli.main import main
from veca.config import VecaConfig


@pytest.fixture
def weights(tmp_path):
    model = create_model(VecaConfig(depth=2, width=32, heads=2, num_cores=16))
    return str(save(model, tmp_path / "weights"))


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.jpg"
    Image.new("RGB", (70, 50), "orange").save(path)
    return str(path)


def test_help_lists_every_command():
    done = subprocess.run(
        [sys.executable, "-m", "veca", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("quickstart", "info", "features", "bench", "import"):
        assert command in done.stdout


def test_no_arguments_show_the_help(capsys):
    assert main([]) == 0
    assert "quickstart" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"veca {veca.__version__}, torch {version('torch')}\n"


def test_info_overview(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "veca_small_patch16" in out and "21.6 M" in out and "Attention on" in out


def test_info_reproduces_the_published_figures(capsys):
    assert main(["info", "base", "--size", "512,1024", "--cores", "8,64"]) == 0
    out = capsys.readouterr().out
    for figure in ("12.9%", "1.6%", "0.684", "0.299"):
        assert figure in out


def test_info_of_saved_weights(capsys, weights):
    assert main(["info", weights, "--size", "64", "--cores", "4"]) == 0
    assert "cores" in capsys.readouterr().out


def test_info_of_a_name_is_of_the_weights_at_hand(capsys, tmp_path, monkeypatch):
    assert main(["info", "tiny", "--size", "64", "--cores", "8"]) == 0
    assert "weights veca_tiny_patch16: 5.8 M parameters" in capsys.readouterr().out
    assert main(["info", "base", "--size", "64", "--cores", "8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "preset veca_base_patch16, without an output projection: 85.7 M" in said
    # What lies here wins over a name, as for veca.load.
    monkeypatch.chdir(tmp_path)
    veca.save(veca.create_model("tiny", depth=2), "tiny")
    assert main(["info", "tiny", "--size", "64", "--cores", "8"]) == 0
    assert "weights tiny: 1." in capsys.readouterr().out
    assert main(["info", "x" * 5000]) == 2


def test_quickstart_on_a_photo(capsys, weights, photo, tmp_path, monkeypatch):
    from veca import bench

    init = bench.BenchPlan.__init__
    monkeypatch.setattr(
        bench.BenchPlan,
        "__init__",
        lambda self, **kwargs: init(self, **{**kwargs, "repeats": 1, "seconds": 0.0}),
    )
    out = tmp_path / "out"
    args = ["quickstart", photo, "--weights", weights, "--size", "60", "--out", str(out)]
    assert main([*args, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert (out / "index.html").is_file() and "dense ViT" in said
    # The nearest size on the patch grid; a long path of the weights may break the line.
    assert "64 x 64 px" in " ".join(said.split())


_THERE = ("damaged.jpg", "empty", "file", "photo.jpg", "weights")


def _bad_calls(photo, weights, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = str(tmp_path / "damaged.jpg")
    Path(damaged).write_bytes(b"no image")
    out = str(tmp_path / "out")
    features = ["features", photo, "--weights", weights, "--out"]
    return [
        (["inf"], "mean 'info'"),
        (["zzz"], "'zzz'"),
        (["info", "smal"], "mean 'small'"),
        (["info", "tiny", "--cores", "65"], "cores"),
        (["info", "tiny", "--cores", "0"], "cores"),
        (["info", "tiny", "--cores", "-1"], "cores"),
        (["info", "tiny", "--cores", "2.5"], "cores"),
        (["info", "tiny", "--size", "15"], "patch size"),
        (["info", "--device", "gpu"], "'gpu'"),
        (["info", "./nowhere"], "nowhere"),
        (["quickstart", "missing.jpg", "--out", out], "missing.jpg"),
        (["quickstart", photo, "--weights", "nothing-here", "--out", out], "nothing-here"),
        (["quickstart", photo, "--weights", weights, "--out", str(blocked)], "file"),
        (["quickstart", photo, "--weights", weights, "--size", "8", "--out", out], "size=8"),
        (["quickstart", damaged, "--weights", weights, "--out", out], "damaged.jpg"),
        ([*features, out, "--cores", "17"], "cores"),
        ([*features, str(blocked / "x")], "file"),
        (["features", str(empty), "--weights", weights, "--out", out], "empty"),
        (["features", "nope/*.jpg", "--weights", weights, "--out", out], "nope"),
        (["bench", "smal", "--out", out], "mean 'small'"),
        (["bench", "tiny", "--sizes", "100", "--out", out], "[100]"),
        (["distill", "--teacher", "filters", "--data", "photos:8", "--out", out], "--config"),
        (["import", "missing.pt", "--out", out], "missing.pt"),
    ]


THREADED = {
    "features": ["photo.jpg", "--out", "out"],
    "embed": ["photos", "--out", "out"],
    "viz": ["features", "photo.jpg", "--out", "out"],
    "probe": ["knn", "--data", "pets", "--dataset", "folder", "--out", "out"],
    "export": ["tiny", "--out", "out"],
    "bench": ["tiny", "--out", "out"],
    "demo": [],
}


@pytest.mark.parametrize("command", THREADED)
@pytest.mark.parametrize("threads", ["0", "-2"])
def test_a_number_of_threads_is_at_least_one(command, threads, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([command, *THREADED[command], "--threads", threads]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--threads" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_bad_input_is_one_line_and_exit_code_2(capsys, photo, weights, tmp_path):
    for args, noun in _bad_calls(photo, weights, tmp_path):
        assert main(args) == 2, args
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and captured.err.startswith("veca: "), captured.err
        assert noun in captured.err, (args, captured.err)
        assert "Traceback" not in captured.err
    assert {p.name for p in tmp_path.iterdir()} == set(_THERE)
