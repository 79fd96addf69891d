"""The measurements that are kept in the repository can be read, and name no one's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from veca.probe import read_run
from veca.probe.protocol import from_dict

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results" / "probes"
RESULTS = sorted(FOLDER.glob("*/results.json"))


@pytest.mark.skipif(not RESULTS, reason="no results beside these tests")
class TestKept:
    @pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
    def test_whole_and_public(self, path):
        run = read_run(path)
        assert run.command.startswith(f"veca probe {run.task} ") and run.rows
        assert from_dict(run.protocol).tasks == (run.task,)
        for file in path.parent.glob("results.*"):
            text = file.read_text()
            for word in ("/home/", "/work", "/tmp", "/root"):
                assert word not in text, f"{file.name} holds {word}"
