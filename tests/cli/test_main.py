"""The command line as a user meets it: help, one line for every error, exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from PIL import Image

import veca
from veca import create_model, save
from veca.cli.main import _GROUPS, app, main
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


def test_info_of_a_model_with_few_cores(capsys, tmp_path):
    model = veca.create_model(veca.VecaConfig(width=32, depth=2, heads=2, num_cores=4))
    veca.save(model, tmp_path / "w")
    assert main(["info", str(tmp_path / "w"), "--size", "64"]) == 0
    assert "64" in capsys.readouterr().out


def test_info_overview(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "veca_small_patch16" in out and "21.6 M" in out and "Attention on" in out


def test_info_says_what_auto_would_take(capsys, monkeypatch):
    from veca import precision

    for has, taken in (("", ""), "fp32"), (("AMX", ""), "bf16"), (("AMX", "VNNI"), "int8"):
        monkeypatch.setattr(precision, "processor", lambda has=has: precision.Processor(*has))
        assert main(["info", "--device", "cpu"]) == 0
        said = capsys.readouterr().out
        assert f"most likely {taken}" in said and all(how in said for how in has)


def test_info_reproduces_the_published_figures(capsys):
    assert main(["info", "base", "--size", "512,1024", "--cores", "8,64"]) == 0
    out = capsys.readouterr().out
    for figure in ("12.9%", "1.6%", "0.684", "0.299"):
        assert figure in out


def test_info_counts_merging(capsys):
    assert main(["info", "base", "--size", "512", "--cores", "64", "--keep", "0.5,1"]) == 0
    printed = capsys.readouterr().out
    counted = [veca.cost("base", 512, 64, keep=keep).veca.flops for keep in (0.5, 1)]
    for share, flops in zip(("0.5", "1"), counted, strict=True):
        line = next(x for x in printed.splitlines() if x.split()[2:4] == ["64", share])
        assert f"{flops / 1e9:.4g}" in line
    assert main(["info", "base", "--size", "512", "--cores", "64"]) == 0
    assert "eep" not in capsys.readouterr().out


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
    assert "precision " in said  # auto; which it took, and why, depends on the machine
    assert main([*args, "--device", "cpu", "--precision", "int8"]) == 0
    assert "precision int8: asked for" in capsys.readouterr().out
    assert "both in int8" in (out / "index.html").read_text()


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
        (["info", "tiny", "--keep", "0"], "keep"),
        (["info", "tiny", "--keep", "1.5"], "keep"),
        (["info", "tiny", "--keep", "half"], "keep"),
        (["info", "tiny", "--keep", "nan"], "keep"),
        (["info", "tiny", "--keep", "auto"], "keep"),
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


# ------------------------------------------------------------------------ options of many commands


READERS = (
    *("quickstart", "features", "viz", "demo", "pack", "distill", "probe", "embed", "search"),
    *("tune", "calibrate", "quantize", "large", "read"),
)


@pytest.fixture
def commands():
    return typer.main.get_command(app).commands


def test_every_command_that_reads_images_takes_max_pixels(commands):
    with_option = {
        name
        for name, command in commands.items()
        if any("--max-pixels" in parameter.opts for parameter in command.params)
    }
    assert with_option == set(READERS)


def test_max_pixels_holds_for_one_command(capsys, weights, photo, tmp_path, monkeypatch):
    monkeypatch.delenv("VECA_MAX_PIXELS", raising=False)
    args = ["--weights", weights, "--size", "64", "--device", "cpu", "--out", str(tmp_path / "o")]
    assert main(["features", photo, *args, "--max-pixels", "3499"]) == 2
    assert "max_pixels=3,499" in capsys.readouterr().err
    assert "VECA_MAX_PIXELS" not in os.environ
    assert main(["features", photo, *args]) == 0
    assert main(["viz", "cores", photo, *args, "--max-pixels", "3499"]) == 2
    assert "3,499" in capsys.readouterr().err
    folder = str(Path(photo).parent)
    embed = ["embed", folder, "--out", str(tmp_path / "vectors"), *args[:-2], "--workers", "1"]
    assert main([*embed, "--max-pixels", "3499"]) == 2  # in other processes, too
    failures = (tmp_path / "vectors" / "failures.jsonl").read_text()
    assert "3,499" in failures


def test_switches_look_like_switches(commands, capsys):
    for name in ("features", "bench"):
        assert main([name, "--help"]) == 0
        said = capsys.readouterr().out
        assert "bool" not in said.lower() and "--help" in said
    assert main(["--help"]) == 0
    assert "bool" not in capsys.readouterr().out.lower()


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        (["features", "p", "--out", "o", "--strict", "true"], "leave out 'true'"),
        (["features", "--overwrite", "False", "p", "--out", "o"], "leave out --overwrite"),
        (["bench", "--dense", "no"], "--no-dense"),
    ],
)
def test_a_value_behind_a_switch_is_no_file(args, remedy, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    said = capsys.readouterr().err
    assert "switch" in said and remedy in said and said.count("\n") == 1
    Path("true").mkdir()  # something of that name is what is meant
    if "true" in args:
        main(args)
        assert "switch" not in capsys.readouterr().err


def test_info_without_a_model_heeds_size_and_budgets(capsys):
    assert main(["info", "--size", "512", "--cores", "8"]) == 0
    out = capsys.readouterr().out
    for name in veca.PRESETS:
        assert name in out
    assert "0.438" in out and "11.41" in out  # of small and of tiny
    assert main(["info", "--size", "500"]) == 2
    said = capsys.readouterr()
    assert "496" in said.err and said.out == ""


@pytest.mark.parametrize("command", [["viz", "cores"], ["quickstart"], ["features"], ["embed"]])
@pytest.mark.parametrize("source", ["https://host/a.jpg", "clip.mp4"])
def test_addresses_and_videos_are_refused_alike(command, source, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*command, source, "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert source in said and ("ffmpeg" in said if source == "clip.mp4" else "download" in said)
    assert list(tmp_path.iterdir()) == []


def test_a_kind_that_is_skipped_is_no_side_matter_for_pictures(capsys, weights, photo, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    Path(photo).rename(folder / "a.jpg")
    (folder / "b.mov").touch()
    args = ["--weights", weights, "--size", "64", "--device", "cpu", "--out", str(tmp_path / "o")]
    assert main(["viz", "cores", str(folder), *args]) == 0
    out = capsys.readouterr().out
    assert out.startswith("warning: 1 of 2 files (50%)") and "ffmpeg" in out


def test_one_image_is_not_images(capsys, weights, photo, tmp_path):
    out = str(tmp_path / "o")
    assert main(["features", photo, "--weights", weights, "--size", "64", "--out", out]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 image, ")


def test_help_groups_the_commands_as_the_readme_does():
    readme = (Path(__file__).parents[2] / "README.md").read_text().split("## Commands")[1]
    for name, commands in _GROUPS.items():
        listed = re.search(rf"^{name.lower()} .*(?:\n .*)*", readme, re.MULTILINE)
        assert listed is not None, name
        for command in commands:
            assert re.search(rf"\b{command.__name__.rstrip('_')}\b", listed[0]), command.__name__


def test_viz_wants_a_figure_and_then_photos(
    photo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["viz", photo]) == 2
    assert f"veca viz report {photo}" in capsys.readouterr().err
    assert main(["viz", "cores"]) == 2
    assert "no photo" in capsys.readouterr().err
