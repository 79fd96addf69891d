"""`veca export`: weights in, files and reports out, one line a file."""

from __future__ import annotations

import json

import pytest
import torch
import typer

import veca
from conftest import SMALLEST, stirred
from veca.cli.export import _name, export
from veca.errors import InputError, OutputError, WeightsError
from veca.export import load_exported


@pytest.fixture
def run(tmp_path):
    torch.manual_seed(0)
    model = stirred(veca.create_model(SMALLEST.replace(depth=1)))
    veca.save(model, tmp_path / "my weights")
    app = typer.Typer()
    app.command()(export)

    def call(*args, weights=tmp_path / "my weights", out=tmp_path / "out"):
        return app([str(a) for a in (weights, "--out", out, *args)], standalone_mode=False)

    return call


@pytest.mark.slow
def test_files_reports_and_lines(run, tmp_path, capsys):
    run("--to", "torch-export", "--cores", "2,any,2", "--check-sizes", "32x48, 64x32")
    out = tmp_path / "out"
    names = ["my-weights_anycores.pt2", "my-weights_cores2.pt2"]
    assert sorted(p.name for p in out.glob("*.pt2")) == names
    report = json.loads((out / "my-weights_cores2.pt2.json").read_text())
    sizes = {(c["height"], c["width"]) for c in report["verification"]["checks"]}
    assert sizes == {(32, 48), (64, 32)}
    printed = " ".join(capsys.readouterr().out.split())
    assert "my-weights_cores2.pt2: 0." in printed
    assert "in 4 checks (in my-weights_cores2.pt2.json)" in printed

    model, images = veca.load(tmp_path / "my weights"), torch.randn(1, 3, 48, 32)
    with torch.no_grad():
        wanted = model(images, cores=3).patches
    found = load_exported(out / names[0])(images, cores=3).patches
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_bad_options_are_named(run, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra export")
    with pytest.raises(InputError, match="--size"):
        run("--size", "512")
    with pytest.raises(InputError, match="--cores"):
        run("--cores", "8,many")
    with pytest.raises(InputError, match="50 x 64"):
        run("--to", "torch-export", "--size", "50x64")
    for wrong in ("0", "1.5", "half", "nan", "auto"):
        with pytest.raises(InputError, match="keep"):
            run("--to", "torch-export", "--keep", wrong)
    with pytest.raises(InputError, match=r"'int9'.*'int8'"):
        run("--precision", "fp32,int9")
    with pytest.raises(InputError, match="--gate"):
        run("--precision", "int8", "--gate", "high")
    with pytest.raises(InputError, match="--ort"):
        run("--ort", tmp_path)
    with pytest.raises(InputError, match="page"):
        run("--to", "web", "--size", "64x64")
    with pytest.raises(WeightsError, match="nothing"):
        run(weights=tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="File exists"):
        run("--to", "torch-export", out=tmp_path / "file")


def test_a_page_is_not_written_over_something(run, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra export")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        run("--to", "web")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_an_option_of_0_1(run, capsys):
    with pytest.raises(InputError, match="cores"):
        run("--to", "torch-export", "--dtype", "float16", "--cores", "9")
    assert "--precision" in capsys.readouterr().err


def test_names_of_files_from_names_of_weights():
    assert _name("veca_tiny_patch16") == "veca_tiny_patch16"
    assert _name("some/where/my weights/") == "my-weights"
    assert _name("owner/name@v1.0") == "name"
    assert _name("x/y.safetensors") == "y"
    assert _name("..") == "veca"
