"""Killed at any moment, a run goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from distill.small import curve, run, settings
from veca.distill import read_metrics
from veca.distill.checkpoint import CheckpointStore

WORKER = Path(__file__).with_name("worker.py")
CHANGES = {
    "schedule": {"steps": 40},
    "checkpoint": {"every": 2},
    "data": {"hold_out": 4},
    "validation": {"every": 8},
    "ema": 0.9,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The curve of the run that nobody killed."""
    return curve(run(tmp_path_factory.mktemp("whole"), **CHANGES))


def start(out: Path, *options: str, changes: dict = CHANGES, **how) -> subprocess.Popen:
    table = json.dumps(settings(**changes).to_dict())
    command = [sys.executable, str(WORKER), str(out), table, *options]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **how)


@pytest.mark.slow
def test_killed_at_some_moment(tmp_path, whole) -> None:
    process = start(tmp_path)
    store = CheckpointStore(tmp_path)
    while process.poll() is None and not store.steps():
        time.sleep(0.001)
    time.sleep(random.random() * 0.3)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    assert 0 < store.steps()[-1] < 40
    assert curve(run(tmp_path, resume=True, **CHANGES)) == whole


@pytest.mark.slow
def test_killed_in_the_middle_of_saving(tmp_path, whole) -> None:
    assert start(tmp_path, "kill_in_save=12").wait() == -signal.SIGKILL
    store = CheckpointStore(tmp_path)
    assert store.steps()[-1] == 10  # at most the unsaved steps are lost
    assert any(path.name.endswith(".tmp") for path in store.folder.iterdir())
    assert curve(run(tmp_path, resume=True, **CHANGES)) == whole
    assert not any(path.name.endswith(".tmp") for path in store.folder.iterdir())


@pytest.mark.slow
def test_ended_with_all_its_workers_it_stops_cleanly(tmp_path) -> None:
    # torchrun, Slurm and systemd send SIGTERM to every process, those that read images among them.
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(8):
        Image.new("RGB", (48, 48), (30 * number, 80, 160)).save(pictures / f"{number}.png")
    changes = {
        "schedule": {"steps": 100_000},
        "follow": {"every": 1},
        "data": {"source": str(pictures), "workers": 2, "augment": {"kind": "rrc"}},
    }
    out = tmp_path / "run"
    process = start(out, changes=changes, start_new_session=True, stderr=subprocess.PIPE, text=True)
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and not (metrics.exists() and read_metrics(out)):
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert "asked to stop" in said
    done = len(read_metrics(out))
    assert CheckpointStore(out).steps() == [done]
    assert done < 100_000
