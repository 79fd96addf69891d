"""Every notebook runs from top to bottom, is kept without its outputs, and is linked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs import notebooks, pages

NOTEBOOKS = sorted((pages.ROOT / "examples" / "notebooks").glob("*.ipynb"))


def _name(path: Path) -> str:
    return path.stem


def _run(path: Path, folder: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "TMPDIR": str(folder)}
    env["PYTHONPATH"] = os.pathsep.join([str(pages.ROOT / "src"), env.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, notebooks.__file__, str(path)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=_name)
def test_notebook_runs(path, tmp_path):
    if path.stem == "choose_a_point":
        pytest.importorskip("matplotlib", reason="plots need the extra viz")
    done = _run(path, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=_name)
def test_notebook_is_kept_without_outputs(path):
    code = [cell for cell in notebooks.cells(path) if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_there_are_three_and_they_are_linked():
    site = (pages.ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    examples = (pages.ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        assert f"(../examples/notebooks/{path.name})" in site
        assert f"(notebooks/{path.name})" in examples
    assert "- notebooks.md" in (pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_a_cell_that_fails_is_told(tmp_path):
    bad = tmp_path / "bad.ipynb"
    bad.write_text('{"cells": [{"cell_type": "code", "source": ["x = 1\\n", "missing"]}]}')
    done = _run(bad, tmp_path)
    assert done.returncode == 1
    assert "bad.ipynb[0]" in done.stderr and "missing" in done.stderr
