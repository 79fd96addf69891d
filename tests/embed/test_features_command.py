"""`veca features`: files, folders and patterns in, a folder or a file out, one closing line."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch
import typer
from PIL import Image

import veca
from veca import VecaConfig
from veca.cli.features import features
from veca.errors import ImageError, InputError, SourceError, WeightsError
from veca.features import read_features


@pytest.fixture
def run(tmp_path):
    """The command, with weights of a fresh model."""
    config = VecaConfig(depth=2, width=64, heads=2, num_cores=8)
    veca.save(veca.create_model(config), tmp_path / "weights")
    app = typer.Typer()
    app.command()(features)
    common = ["--weights", tmp_path / "weights", "--size", "32", "--device", "cpu"]
    return lambda *args: app([str(a) for a in (*common, *args)], standalone_mode=False)


@pytest.fixture
def photos(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/3.jpg", "b/4.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 32), "teal").save(path)
    return tmp_path / "photos"


def test_folders_files_and_patterns(run, photos, tmp_path, capsys):
    out = tmp_path / "out"
    run(photos / "a", photos / "b" / "*.jpg", "--out", out, "--cores", "4", "--what", "cls")
    names = sorted(p.relative_to(out).as_posix() for p in out.rglob("*.npz"))
    assert names == ["a/1.png.npz", "a/2.png.npz", "b/3.jpg.npz"]
    got = read_features(out / "a" / "1.png.npz")
    assert got["cores"] == 4
    assert "patches" not in got
    closing = capsys.readouterr().out.splitlines()[-1]
    assert closing.startswith("3 images, ")
    assert closing.endswith(f" images/s -> {out}")


def test_a_second_run_goes_on_and_skips_are_named(run, photos, tmp_path, capsys):
    out = tmp_path / "out"
    run(photos / "a", "--root", photos, "--out", out)
    (photos / "b" / "bad.jpg").write_bytes((photos / "b" / "3.jpg").read_bytes()[:-200])
    run(photos, "--root", photos, "--out", out)
    printed = capsys.readouterr().out
    assert f"skipped {photos / 'b' / 'bad.jpg'}: " in printed
    assert "damaged" in printed and "preprocess" not in printed  # no Python here
    closing = printed.splitlines()[-1]
    assert closing.startswith("2 images, 2 there already, 1 skipped (listed in ")
    with pytest.raises(ImageError, match=r"bad\.jpg"):
        run(photos, "--root", photos, "--out", out, "--strict")


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
def test_one_image_that_cannot_be_opened_stops_nothing(run, photos, tmp_path, capsys):
    (photos / "broken.jpg").symlink_to("nowhere")
    (photos / os.fsdecode(b"bad\xff.jpg")).write_bytes(b"no image")
    run(photos, "--out", tmp_path / "out")
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("4 images, 2 skipped (listed in ")
    assert "broken.jpg: " in printed and "bad\\xff.jpg: " in printed


def test_files_that_are_no_images_are_counted(run, photos, tmp_path, capsys):
    run(photos, "--out", tmp_path / "out")
    assert "passed over" not in capsys.readouterr().out
    for name in ("a/x.NEF", "b/y.nef", "b/z.cr2", "README", ".hidden"):
        (photos / name).touch()
    run(photos, "--out", tmp_path / "out")
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith("warning: ") and "4 of 8 files (50%)" in said
    assert said.endswith("2 .nef, 1 without a suffix, 1 .cr2")
    for suffix in "abcdef":
        (photos / f"x.{suffix}").touch()
    run(photos, "--out", tmp_path / "out")
    assert ", 1 .c, 4 others" in capsys.readouterr().out.splitlines()[0]


def test_other_settings_need_overwrite(run, photos, tmp_path):
    out = tmp_path / "out"
    run(photos, "--out", out)
    with pytest.raises(InputError, match="cores: 8"):
        run(photos, "--out", out, "--cores", "2")
    with pytest.raises(InputError, match=r"keep: 1\.0 there, 0\.5 now"):
        run(photos, "--out", out, "--keep", "0.5")
    run(photos, "--out", out, "--cores", "2", "--overwrite")
    assert read_features(out / "b" / "4.png.npz")["cores"] == 2


def test_single_file(run, photos, tmp_path):
    run(photos, "--out", tmp_path / "all.safetensors", "--size", "48x32", "--dtype", "float32")
    got = read_features(tmp_path / "all.safetensors")
    assert got["images"] == ["a/1.png", "a/2.png", "b/3.jpg", "b/4.png"]
    assert got["patches"].shape == (4, 3, 2, 64)


def test_bad_input(run, photos, tmp_path):
    out = ("--out", tmp_path / "out")
    with pytest.raises(SourceError, match=r"none\.png"):
        run(photos / "none.png", *out)
    with pytest.raises(InputError, match="'large'"):
        run(photos, *out, "--size", "large")
    for keep in ("0", "1.5", "half", "nan"):
        with pytest.raises(InputError, match="keep"):
            run(photos, *out, "--keep", keep)
    with pytest.raises(InputError, match="agreement"):
        run(photos, *out, "--keep", "0.5", "--agreement", "0.98")
    with pytest.raises(InputError, match="'cls'"):
        run(photos, *out, "--what", "class")
    with pytest.raises(WeightsError, match="/missing"):
        run(photos, *out, "--weights", tmp_path / "missing")
    (photos / "a" / "bad.png").write_bytes(b"not an image")
    with pytest.raises(ImageError, match=r"bad\.png"):
        run(photos, "--out", tmp_path / "out" / "all.npz", "--strict")
    with pytest.raises(ImageError, match=r"bad\.png"):
        run(photos, "--out", tmp_path / "out", "--strict")
    assert not (tmp_path / "out").exists()


def test_images_are_made_as_the_weights_want_them(photos, tmp_path):
    config = VecaConfig(depth=1, width=32, heads=2, num_cores=4, patch_size=8)
    config = config.replace(image_mean=(0.5, 0.4, 0.3), image_std=(0.2, 0.3, 0.4))
    veca.save(veca.create_model(config), tmp_path / "other")
    app = typer.Typer()
    app.command()(features)
    args = ["--weights", tmp_path / "other", "--size", "24", "--device", "cpu", "--out"]
    app([str(a) for a in (photos / "a", *args, tmp_path / "out")], standalone_mode=False)
    model = veca.load(tmp_path / "other")
    with torch.inference_mode():
        expected = model(model.preprocess(photos / "a" / "1.png", size=24).pixels)
    got = read_features(tmp_path / "out" / "1.png.npz")
    assert tuple(got["grid"]) == expected.grid == (3, 4)
    np.testing.assert_allclose(got["cls"], expected.cls[0], rtol=2e-3, atol=2e-3)
