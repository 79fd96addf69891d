"""`veca import`, called as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from veca.cli.import_ import import_
from veca.errors import OutputError, WeightsError
from veca.weights import load, read_provenance
from weights import authors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    c = authors.settings()
    torch.save({"student": authors.state(c), "config": c}, tmp_path / "theirs.pt")
    return tmp_path / "theirs.pt"


def run(*args: object) -> Any:
    app = typer.Typer()
    app.command("import")(import_)
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_import(checkpoint: Path, tmp_path: Path) -> None:
    result = run(checkpoint, "--out", tmp_path / "ours")
    assert result.exit_code == 0, result.output
    for words in ("3 layers", "width 128", "2 heads", "16 cores", "M parameters", "ours"):
        assert words in result.output
    assert load(tmp_path / "ours").config.depth == 3
    record = read_provenance(tmp_path / "ours")
    assert record["teacher"] == "someone/teacher"
    assert record["source_file"] == "theirs.pt"


def test_one_file_in_half(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours.safetensors"
    assert run(checkpoint, "--out", out, "--dtype", "float16").exit_code == 0
    assert load(out, dtype=None).norm.weight.dtype == torch.float16


@pytest.mark.parametrize("name", ["ours", "ours.safetensors"])
def test_replaces_only_when_told(checkpoint: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    run(checkpoint, "--out", out)
    with pytest.raises(OutputError, match="--force"):
        run(checkpoint, "--out", out)
    assert run(checkpoint, "--out", out, "--force").exit_code == 0


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"none\.pt"):
        run(tmp_path / "none.pt", "--out", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    assert run(tmp_path / "x", "--out", tmp_path / "y", "--dtype", "int8").exit_code == 2
