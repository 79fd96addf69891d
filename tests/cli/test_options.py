"""Every option of a command reaches the library under its own name."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import Annotated

import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

import veca
from conftest import SMALLEST
from veca.cli.common import command_line, parse_keep, parse_keeps
from veca.cli.main import app, main
from veca.errors import InputError


class Reached(Exception):
    pass


@pytest.fixture
def reached(monkeypatch):
    """What a command calls a function of the library with."""

    def call(function, *words):
        seen = {}
        module, _, name = function.rpartition(".")

        def stub(*_, **options):
            seen.update(options)
            raise Reached

        monkeypatch.setattr(importlib.import_module(module), name, stub)
        with pytest.raises(Reached):
            main([str(word) for word in words])
        for call_back in ("progress", "on_estimate", "on_model"):
            seen.pop(call_back, None)
        return seen

    return call


@pytest.fixture
def weights(tmp_path):
    return veca.save(veca.create_model(SMALLEST), tmp_path / "weights")


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (40, 32), "teal").save(tmp_path / "photos" / "a.png")
    return tmp_path / "photos"


def test_features(reached, weights, photos, tmp_path):
    assert reached(
        "veca.embed.extract", "features", photos, "--out", tmp_path / "out", "--weights",
        weights, "--cores", 3, "--size", "32x48", "--fit", "crop", "--what", "cls", "--format",
        "safetensors", "--dtype", "float32", "--batch-size", 5, "--device", "cpu", "--workers", 2,
        "--root", tmp_path, "--strict", "--overwrite", "--width", "native", "--pca", 4,
        "--keep", 0.5, "--agreement", 0.98,
    ) == {
        "width": "native", "pca": 4, "keep": 0.5, "agreement": 0.98,
        "cores": 3, "size": (32, 48), "fit": "crop", "what": ["cls"], "format": "safetensors",
        "dtype": "float32", "batch_size": 5, "workers": 2, "root": tmp_path, "on_error": "raise",
        "overwrite": True,
    }  # fmt: skip


def test_embed(reached, photos, tmp_path):
    assert reached(
        "veca.embed.embed", "embed", photos, "--out", tmp_path / "out", "--weights", "w",
        "--cores", 3, "--size", "native", "--what", "cls,patches",
        "--width", "native", "--pca", 4, "--dtype", "float32", "--precision",
        "bfloat16", "--batch-size", 5, "--workers", 2, "--shard-rows", 7, "--fast-jpeg", "--device",
        "cpu", "--threads", 1, "--engine", "ray", "--address", "here", "--retry-failed",
        "--strict", "--overwrite", "--keep", 0.5, "--agreement", 0.98,
    ) == {
        "weights": "w", "cores": 3, "size": None, "what": ["cls", "patches"],
        "width": "native", "pca": 4, "dtype": "float32", "keep": 0.5, "agreement": 0.98,
        "precision": "bfloat16", "batch_size": 5, "workers": 2, "shard_rows": 7, "fast_jpeg": True,
        "device": "cpu", "threads": 1, "engine": "ray", "address": "here", "retry_failed": True,
        "on_error": "raise", "overwrite": True,
    }  # fmt: skip


def test_options_of_0_1_are_others_now_and_say_so(reached, photos, tmp_path, capsys):
    words = ("embed", photos, "--out", tmp_path / "out", "--patches", "--batch", 3)
    found = reached("veca.embed.embed", *words)
    assert (found["what"], found["batch_size"]) == (["cls", "patches"], 3)
    assert "--what" in (said := capsys.readouterr().err) and "--batch-size" in said


@pytest.mark.parametrize("command", ["features", "embed"])
def test_what_is_not_given_is_left_to_the_folder(reached, weights, photos, tmp_path, command):
    function = {"features": "veca.embed.extract", "embed": "veca.embed.embed"}[command]
    words = (command, photos, "--out", tmp_path / "out", "--weights", weights, "--device", "cpu")
    found = reached(function, *words)
    assert (found["size"], found["width"], found["pca"]) == ("auto", "auto", None)


def test_one_name_for_one_option():
    """What features, embed, search, probe and viz share has one name, type and short help."""
    commands = typer.main.get_command(app).commands
    shared = (
        "--cores",
        "--keep",
        "--size",
        "--weights",
        "--width",
        "--what",
        "--pca",
        "--dtype",
        "--precision",
        "--batch-size",
        "--device",
        "--threads",
        "--strict",
        "--overwrite",
    )
    named = {
        name: {flag for one in commands[name].params if not one.hidden for flag in one.opts}
        for name in ("features", "embed", "search", "probe", "viz")
    }
    for name in ("features", "embed"):
        assert set(shared) <= named[name]
    for name in ("search", "probe"):
        used = {"--weights", "--cores", "--keep", "--size", "--width", "--device", "--threads"}
        assert used <= named[name]
    assert {"--weights", "--cores", "--keep", "--size", "--device", "--threads"} <= named["viz"]
    old = {"--batch", "--patches", "--projection", "--no-keep"}
    assert not old & set().union(*named.values())


@pytest.mark.parametrize("wrong", ["0", "1.5", "half", "nan", "-1", ""])
def test_shares_that_are_none_are_one_line(wrong):
    assert parse_keep(None) is None and parse_keep("auto") == "auto" and parse_keep(".5") == 0.5
    for read in (parse_keep, parse_keeps):
        with pytest.raises(InputError, match="keep must be a number"):
            read(wrong)


@pytest.mark.parametrize("command", ["features", "embed"])
def test_bad_shares_are_told_before_the_weights(photos, tmp_path, command, capsys):
    words = [command, str(photos), "--out", str(tmp_path / "out"), "--weights", "nowhere/at all"]
    assert main([*words, "--keep", "1.5"]) == 2
    said = capsys.readouterr().err
    assert "keep" in said and "nowhere" not in said and said.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()


def test_search(reached, photos, monkeypatch):
    monkeypatch.setattr("veca.embed.Collection", lambda folder: folder)
    assert reached(
        "veca.embed.search", "search", "folder", photos / "a.png", "--top", 3, "--exact",
        "--weights", "w", "--device", "cpu", "--cores", 3, "--size", "native", "--width", "native",
        "--keep", 0.5,
    ) == {
        "exact": True, "weights": "w", "device": torch.device("cpu"), "cores": 3, "size": None,
        "width": "native", "keep": 0.5,
    }  # fmt: skip


def test_pack(reached, photos, tmp_path):
    assert reached(
        "veca.data.pack", "pack", photos, "--out", tmp_path / "out", "--size", 64, "--mode",
        "square", "--format", "webp", "--quality", 33, "--shard-size", "3MB", "--per-shard", 4,
        "--workers", 0,
    ) == {
        "size": 64, "mode": "square", "format": "webp", "quality": 33, "shard_size": "3MB",
        "per_shard": 4, "workers": 0,
    }  # fmt: skip


def test_export(reached, weights, tmp_path):
    assert reached(
        "veca.export.export_model", "export", weights, "--out", tmp_path, "--to", "torch-export",
        "--cores", "2,any", "--size", "32x48", "--dtype", "float16", "--name", "mine",
        "--check-sizes", "64x32", "--threads", 1, "--keep", 0.5,
    ) == {
        "to": "torch-export", "cores": [2, "any"], "size": (32, 48), "precision": ["fp16"],
        "name": "mine", "check_sizes": [(64, 32)], "keep": 0.5, "data": None, "gate": None,
    }  # fmt: skip


def test_publish(reached, tmp_path):
    (tmp_path / "reached.md").write_text("much")
    assert reached(
        "veca.distill.export.publish", "publish", "w", "--out", tmp_path / "out", "--name", "n",
        "--licence", "l", "--data", "d", "--data-licence", "dl", "--results",
        tmp_path / "reached.md", "--dtype", "bfloat16",
    ) == {
        "name": "n", "licence": "l", "data": "d", "data_licence": "dl", "results": "much",
        "dtype": torch.bfloat16, "code": True,
    }  # fmt: skip


def test_probe(reached, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = reached(
        "veca.probe.run_probe", "probe", "knn", "--weights", weights, "--dataset", "cifar10",
        "--data", tmp_path, "--train-dataset", "cifar100", "--train-data", tmp_path / "other",
        "--train-split", "test", "--test-split", "train", "--size", 32, "--cache",
        tmp_path / "cache", "--device", "cpu", "--workers", 2, "--no-time", "--verify",
        "--width", "native",
    )  # fmt: skip
    assert {"protocol", "command", "options"} <= found.keys()
    wanted = {
        "dataset": "cifar10", "data": tmp_path, "train_dataset": "cifar100",
        "train_data": tmp_path / "other", "train_split": "test", "test_split": "train",
        "sizes": [32], "cache": tmp_path / "cache", "device": torch.device("cpu"), "workers": 2,
        "measure_time": False, "verify": True,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    assert found["protocol"].extract.projection is False


def test_the_command_is_told_as_it_may_be_typed_again():
    app, told = typer.Typer(), []

    @app.command()
    def viz(
        context: typer.Context,
        photos: list[str],
        out: Path = Path("viz"),
        at: Annotated[list[str] | None, typer.Option()] = None,
        exact: Annotated[bool | None, typer.Option("--exact/--index")] = None,
        cores: int = 8,
    ) -> None:
        told.append(command_line(context))

    def run(*words):
        assert CliRunner().invoke(app, words, prog_name="veca viz").exit_code == 0
        return told[-1]

    assert run("a.jpg") == "veca viz a.jpg"
    typed = ("a b.jpg", "c.jpg", "--out", "o", "--at", "1,2", "--at", "3,4", "--index")
    again = run(*typed)
    assert shlex.split(again)[2:] == list(typed)
    assert run("a.jpg", "--exact", "--cores", "8") == "veca viz a.jpg --exact --cores 8"
