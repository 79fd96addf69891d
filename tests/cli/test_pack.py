"""`veca pack`: the options reach the library, and the summary is true."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from veca.cli.pack import pack
from veca.data import DataError, open_source

APP = typer.Typer()
APP.command()(pack)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "photos").mkdir()
    for i in range(6):
        pixels = np.random.default_rng(i).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{i}.png")
    return tmp_path / "photos"


def run(*args: object) -> str:
    result = CliRunner().invoke(APP, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_packing_a_folder(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--out", out, "--size", 16, "--mode", "square", "--format", "webp", "--per-shard", 4)
    said = run(photos, *options, "--quality", 60, "--workers", 1)
    assert "6 images in 2 shards" in said and "there already" not in said
    source = open_source(out)
    assert len(source) == 6 and source.name(5).endswith("00000005_5.webp")
    said = run(photos, *options, "--quality", 60, "--workers", 0)
    assert "6 were there already" in said


def test_failures_and_several_sources(photos: Path, tmp_path: Path) -> None:
    (photos / "3.png").write_bytes(b"broken")
    said = run(photos, photos / "0.png", "--out", tmp_path / "out", "--size", "native")
    assert "6 images in 1 shard," in said and "1 image could not be read" in said
    assert "3.png" in (tmp_path / "out" / "failures.txt").read_text()


def test_files_that_are_no_images_are_counted(photos: Path, tmp_path: Path) -> None:
    (photos / "a.nef").touch()
    (photos / "more").mkdir()
    (photos / "more" / "b.txt").touch()
    for source in ((photos,), (photos, photos / "0.png")):
        said = run(*source, "--out", tmp_path / str(len(source)), "--workers", 0)
        assert said.startswith("warning: ") and "2 of 8 files (25%)" in said
        assert "1 .nef, 1 .txt " in said
    said = run(tmp_path / "1", "--out", tmp_path / "again", "--workers", 0)
    assert "passed over" not in said  # what lies beside shards is theirs


def test_bad_options_are_package_errors(photos: Path, tmp_path: Path) -> None:
    for options, noun in (
        (("--size", "huge"), "--size"),
        (("--mode", "round"), "'round'"),
        (("--shard-size", "x"), "'x'"),
    ):
        with pytest.raises(DataError, match=noun):
            run(photos, "--out", tmp_path / "out", "--workers", 0, *options)
    with pytest.raises(DataError, match="nowhere"):
        run(tmp_path / "nowhere", "--out", tmp_path / "out")
