"""`veca viz` as a user meets it."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from conftest import SMALLEST, stirred
from veca import create_model, save
from veca.cli.viz import parse_point, viz
from veca.errors import InputError


@pytest.fixture
def veca_viz(tmp_path, photo):
    app = typer.Typer()
    app.command()(viz)
    weights = str(save(stirred(create_model(SMALLEST)), tmp_path / "weights"))
    file = tmp_path / "p.png"
    photo.save(file)

    def run(figure, *args, out="out"):
        call = [figure, str(file), "--weights", weights, "--size", "32", "--device", "cpu"]
        return CliRunner().invoke(app, [*call, "--out", str(tmp_path / out), *args])

    return run


@pytest.mark.slow
def test_a_report_is_a_page(veca_viz, tmp_path):
    result = veca_viz("report", "--sizes", "32", "--cores", "2,8")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "index.html").is_file()
    assert "attention gets narrower from 2 to 8 cores: " in result.output
    assert "These weights show" in result.output


@pytest.mark.slow
def test_every_figure_is_a_file(veca_viz, tmp_path):
    calls = {
        "features": ["--cores", "2,8", "--layers", "1,3", "--overlay", "0.5"],
        "sizes": ["--sizes", "32,64"],
        "agreement": ["--cores", "2"],
        "attention": ["--kind", "softmax", "--layers", "1,3"],
        "cores": ["--core", "1,3"],
        "paths": ["--cores", "8"],
        "states": ["--layers", "1,2"],
        "similarity": ["--at", "3,5", "--at", "50%,50%"],
        "numbers": ["--cores", "2,8"],
        "merged": ["--keep", "0.4"],
    }
    from veca.viz import FIGURES

    assert set(calls) == set(FIGURES)
    for figure, args in calls.items():
        result = veca_viz(figure, *args, "--format", "svg", out=figure)
        assert result.exit_code == 0, (figure, result.output, result.exception)
        files = sorted(path.name for path in (tmp_path / figure).iterdir())
        assert any(name.endswith(".svg") and figure in name for name in files), files
    assert (tmp_path / "numbers" / "numbers.csv").is_file()


def test_one_figure_can_be_a_named_file(veca_viz, tmp_path):
    assert veca_viz("paths", out="my.html").exit_code == 0
    assert (tmp_path / "my.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("args", "noun"),
    [
        (["pahts"], "'pahts'"),
        (["paths", "--format", "bmp"], "'bmp'"),
        (["paths", "--cores", "9"], "cores"),
        (["states", "--layers", "4"], "layers"),
        (["features", "--colours", "tsne"], "'tsne'"),
        (["attention", "--kind", "norn"], "'norn'"),
        (["similarity", "--at", "1"], "'1'"),
        (["similarity", "--at", "5000,1"], "5000"),
        (["report", "--format", "png"], "folder"),
        (["features", "--keep", "0"], "keep"),
        (["merged", "--keep", "1.5"], "keep"),
        (["agreement", "--keep", "half"], "keep"),
        (["attention", "--keep", "nan"], "keep"),
        (["features", "--keep", "0.5", "--agreement", "0.98"], "agreement"),
    ],
)
def test_bad_input_is_told_and_leaves_nothing(veca_viz, tmp_path, args, noun):
    result = veca_viz(*args)
    assert isinstance(result.exception, InputError) and noun in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["f.jpg", "F.JPEG", "f.pdf"])
def test_a_picture_that_cannot_be_written_is_no_folder(veca_viz, tmp_path, name):
    for args in (["features"], ["features", "--format", "png"]):
        result = veca_viz(*args, out=name)
        assert isinstance(result.exception, InputError)
        assert ".svg" in str(result.exception)
    assert "report" in str(veca_viz("report", out=name).exception)
    assert not (tmp_path / name).exists()


def test_a_folder_may_have_any_name(veca_viz, tmp_path):
    (tmp_path / "old.jpg").mkdir()
    for name in ("old.jpg", "v1.5"):
        assert veca_viz("paths", out=name).exit_code == 0
        assert [path.suffix for path in (tmp_path / name).iterdir()] == [".png"]


def test_points_in_pixels_and_percent(photo):
    assert parse_point("0,63", photo) == pytest.approx((0.5 / 96, 63.5 / 64))
    assert parse_point(" 25% , 100% ", photo) == (0.25, 1.0)
