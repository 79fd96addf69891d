"""Two processes under torchrun follow the curve of one; a lost worker is made up for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import veca
from distill.small import curve, run, settings
from veca.distill import read_metrics
from veca.distill.checkpoint import CheckpointStore
from veca.distill.parallel import World, meet

WORKER = Path(__file__).with_name("worker.py")
CHANGES = {
    "schedule": {
        "size": 0,
        "steps": 8,
        "phases": [{"until": 3, "draw": {"32": 1.0}}, {"draw": {"32": 0.5, "48": 0.5}}],
        "batch_by_size": {"48": 2},
    },
    "optimizer": {"clip": 1.0, "accumulate": 2},
    "data": {"hold_out": 5},
    "validation": {"every": 4, "batch": 2},
    "checkpoint": {"every": 4, "milestones": [4]},
    "nested": {"keep": [1.0, 0.5]},
    "ema": 0.9,
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run of one process."""
    out = tmp_path_factory.mktemp("one")
    run(out, **CHANGES)
    return out


def torchrun(out: Path, *options: str, restarts: int = 0, **changes) -> None:
    table = settings(**CHANGES).to_dict() | changes
    start_two(str(out), json.dumps(table), *options, restarts=restarts)


def start_two(*words: str, restarts: int = 0) -> None:
    """Two processes of worker.py, to their end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", str(WORKER), *words]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def assert_same(out: Path, one: Path) -> None:
    mine, theirs = read_metrics(out), read_metrics(one)
    assert [(r["step"], r["cores"], r["size"], r["batch"]) for r in mine] == [
        (r["step"], r["cores"], r["size"], r["batch"]) for r in theirs
    ]
    for a, b in zip(mine, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    grids = [read_metrics(x, "validation") for x in (out, one)]
    for a, b in zip(*grids, strict=True):
        for row, other in zip(a["grid"], b["grid"], strict=True):
            assert row == pytest.approx(other, abs=1e-5)
    a, b = veca.load(out / "final"), veca.load(one / "final")
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-4)


@pytest.mark.slow
def test_two_processes_follow_one(tmp_path, one) -> None:
    # No time at all: both stop and resume at every look.
    torchrun(tmp_path, parallels=["ddp", "fsdp"], max_minutes=1e-9)
    for kind in ("ddp", "fsdp"):
        assert_same(tmp_path / kind, one)
        launches = json.loads((tmp_path / kind / "run.json").read_text())["launches"]
        assert [x["from_step"] for x in launches] == [0, 3, 4, 6]
    # A checkpoint of two processes with sharded weights is read by one.
    store = CheckpointStore(tmp_path / "fsdp")
    store.path(8).rename(tmp_path / "elsewhere")
    assert store.steps() == [4]
    run(tmp_path / "fsdp", resume=True, **CHANGES)
    assert_same(tmp_path / "fsdp", one)


@pytest.mark.slow
def test_processes_leave_in_peace() -> None:
    # Gloo lets go of tensors at its own time; without a pause for it such processes often abort.
    for _ in range(2):
        start_two("leave_at_once")


@pytest.mark.slow
def test_a_lost_worker_is_made_up_for(tmp_path, one) -> None:
    torchrun(tmp_path, "lose_worker=6", restarts=1)
    launches = json.loads((tmp_path / "run.json").read_text())["launches"]
    assert [x["from_step"] for x in launches] == [0, 4]
    assert_same(tmp_path, one)


def test_ranks_meet_though_the_store_remembers_the_dead() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(2):  # the second time, hellos and answers of the first are still there
        store.set("veca/hello/2", "of a process that died")
        with ThreadPoolExecutor(3) as pool:
            clients = [
                torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False)
                for _ in range(3)
            ]
            first = pool.submit(meet, clients[0], 0, 3)
            others = [pool.submit(meet, clients[rank], rank, 3) for rank in (1, 2)]
            names = {first.result(60), *(other.result(60) for other in others)}
        assert len(names) == 1


def test_one_process_needs_nobody() -> None:
    world = World()
    assert world.any(True) and not world.any(False)
    assert world.from_first("x") == "x"
    tensor = torch.tensor([2.0])
    assert world.mean(tensor) is tensor and world.sum(tensor) is tensor
    assert curve([]) == []


def test_gradients_are_clipped_by_their_common_length() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    for p in parameters:
        p.grad = torch.randn_like(p)
    length = float(torch.cat([p.grad.flatten() for p in parameters]).norm())
    assert float(World().clip_gradients(parameters, 0.0)) == pytest.approx(length)
    World().clip_gradients(parameters, 0.1)
    clipped = float(torch.cat([p.grad.flatten() for p in parameters]).norm())
    assert clipped == pytest.approx(0.1, rel=1e-4)
