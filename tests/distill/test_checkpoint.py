"""Checkpoints: whole or not there, old ones kept until new ones are."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distill.small import TABLE, run, settings
from veca.distill import DistillConfig, DistillError, distill, export_checkpoint, read_metrics
from veca.distill.checkpoint import CheckpointStore
from veca.distill.loop import TrainingRun
from veca.distill.parallel import World
from veca.errors import CheckpointError, OutputError


def sections(value: float, size: int = 4) -> dict:
    return {"student": {"w": torch.full((size,), value)}, "optimizer": {"w/m": torch.ones(2, 3)}}


def save(store: CheckpointStore, step: int, *, best: bool = False) -> None:
    store.save(step, sections(step), {"samples": 10 * step}, best=best)
    store.wait()


def test_there_and_back(tmp_path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.load() is None
    save(store, 3)
    found = store.load()
    assert found is not None
    assert found.step == 3 and found.about["samples"] == 30
    assert torch.equal(found.sections["student"]["w"], torch.full((4,), 3.0))
    assert found.sections["optimizer"]["w/m"].shape == (2, 3)


def test_last_best_and_milestones_are_kept(tmp_path) -> None:
    store = CheckpointStore(tmp_path, milestones=[4])
    for step in range(1, 8):
        save(store, step, best=step == 2)
    assert store.steps() == [2, 4, 7]
    assert store.best_step() == 2
    assert not [p for p in store.folder.iterdir() if p.name.startswith(".")]


def test_a_full_disk_is_an_error_and_the_old_one_stays(tmp_path, monkeypatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    real, calls = save_file, []

    def full(tensors, path, **more):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, **more)

    monkeypatch.setattr("veca._util.tensor_file.save_file", full)
    store.save(2, sections(2), {}, best=True)
    with pytest.raises(OutputError, match="No space left"):
        store.wait()
    monkeypatch.undo()
    assert store.steps() == [1] and store.best_step() is None
    assert not [p for p in store.folder.iterdir() if p.name.startswith(".")]
    found = store.load()
    assert found is not None and found.step == 1
    save(store, 2)  # and it works again once there is room
    assert store.steps() == [2]


def test_a_limit_of_the_system_is_an_error_too(tmp_path) -> None:
    """A real refusal to write: files may not grow beyond 64 KiB."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        store.save(2, sections(2, size=100_000), {}, best=False)
        with pytest.raises(OutputError, match="step-00000002"):
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = store.load()
    assert found is not None and found.step == 1


def test_what_a_kill_leaves_is_neither_read_nor_kept(tmp_path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    half = store.folder / ".step-00000009.123-abcd.tmp"
    half.mkdir()
    (half / "student.safetensors").write_bytes(b"half")
    assert store.steps() == [5]
    store.clean()
    assert not half.exists()
    assert store.steps() == [5]


def test_the_same_step_again_keeps_what_is_there(tmp_path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    save(store, 5, best=True)
    assert store.steps() == [5] and store.best_step() == 5


def test_a_damaged_checkpoint_is_named(tmp_path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    path = store.path(5) / "student.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DistillError, match="step-00000005"):
        store.load()


def test_a_newer_format_is_refused(tmp_path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    about = store.path(5) / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "format_version": 99}))
    with pytest.raises(DistillError, match="version 99"):
        store.load()


def test_a_run_that_0_1_began_goes_on_exactly(tmp_path) -> None:
    begun = Path(__file__).parent / "from_0_1"  # the checkpoint of step 3, and all six steps of 0.1
    shutil.copytree(begun / "checkpoints", tmp_path / "checkpoints")
    stored = CheckpointStore(begun).load()
    config = DistillConfig.from_dict(stored.about["config"])
    run = TrainingRun(config, tmp_path, World(), None, None, None, True, None)
    taken_over = run.group.state()
    assert taken_over.keys() == stored.sections.keys()
    for name, tensors in stored.sections.items():
        assert tensors.keys() == taken_over[name].keys()
        assert all(torch.equal(tensors[key], taken_over[name][key]) for key in tensors), name
    run.train()
    run.close()
    for kind in ("train", "validation"):
        wanted = [record for record in read_metrics(begun, kind) if record["step"] > 3]
        for mine, theirs in zip(read_metrics(tmp_path, kind), wanted, strict=True):
            # Other machines round differently.
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
            same = ("step", "cores", "size", "batch", "lr")
            assert [mine.get(key) for key in same] == [theirs.get(key) for key in same]


CHANGES = {"ema": 0.9, "schedule": {"steps": 4}, "checkpoint": {"every": 2}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of four steps, with an average, targets that are scaled, and a sibling."""
    out = tmp_path_factory.mktemp("finished")
    run(out, **CHANGES, siblings={"other": TABLE["student"]})
    return out


def resume(out: Path) -> None:
    config = settings(**CHANGES, siblings={"other": TABLE["student"]})
    TrainingRun(config, out, World(), None, None, None, True, None).close()


def test_a_section_that_is_missing_is_refused(finished, tmp_path) -> None:
    names = {path.name for path in CheckpointStore(finished).path(4).glob("*.safetensors")}
    assert len(names) == 7  # three of each student, and the targets
    for name in sorted(names):
        out = tmp_path / name
        shutil.copytree(finished, out)
        (CheckpointStore(out).path(4) / name).unlink()
        with pytest.raises(CheckpointError, match=name.removesuffix(".safetensors")):
            resume(out)


def test_a_section_of_another_step_is_refused(finished, tmp_path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    store = CheckpointStore(tmp_path / "run")
    run(tmp_path / "less", **{**CHANGES, "schedule": {"steps": 2}})
    shutil.copy(CheckpointStore(tmp_path / "less").path(2) / "ema.safetensors", store.path(4))
    with pytest.raises(CheckpointError, match="ema"):
        store.load()


def test_each_flipped_bit_of_a_checkpoint_is_seen(finished, tmp_path) -> None:
    rng = random.Random(0)
    shutil.copytree(finished, tmp_path / "run")
    store = CheckpointStore(tmp_path / "run")
    for path in sorted(store.path(4).iterdir()):
        good = path.read_bytes()
        for _ in range(10):
            damaged = bytearray(good)
            damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match="step-00000004"):
                store.load()
        path.write_bytes(good)
    assert store.load() is not None


def test_an_export_needs_no_optimiser(finished, tmp_path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (CheckpointStore(tmp_path / "run").path(4) / "optimizer.safetensors").unlink()
    export_checkpoint(tmp_path / "run", tmp_path / "out", which=4)


def test_what_a_checkpoint_of_0_1_must_hold(tmp_path) -> None:
    begun = Path(__file__).parent / "from_0_1"
    config = DistillConfig.from_dict(CheckpointStore(begun).load().about["config"])
    for name in ("ema", "optimizer", "student", "targets"):
        out = tmp_path / name
        shutil.copytree(begun, out)
        (CheckpointStore(out).path(3) / f"{name}.safetensors").unlink()
        with pytest.raises(CheckpointError, match=name):
            TrainingRun(config, out, World(), None, None, None, True, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "3"),
        ("samples", None),
        ("siblings", []),
        ("teachers", {}),
        ("seed", 1.5),
        ("loader", []),
        ("loader", {}),
        ("loader", "step"),
        ("best", "low"),
        ("config", None),
        ("config", {"schedule": 3}),
        ("config", {"schedule": {"cooldown": []}}),
        ("provenance", []),
        ("provenance", {"standardised": 1}),
        ("architecture", "tiny"),
        ("format_version", None),
    ],
)
def test_odd_fields_are_named(tmp_path, field, value) -> None:
    begun = Path(__file__).parent / "from_0_1"
    shutil.copytree(begun, tmp_path / "run")
    about = CheckpointStore(tmp_path / "run").path(3) / "about.json"
    table = json.loads(about.read_text())
    config = DistillConfig.from_dict(table["config"])
    about.write_text(json.dumps({**table, field: value}))
    with pytest.raises(DistillError, match=field):
        TrainingRun(config, tmp_path / "run", World(), None, None, None, True, None)


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[]", '{"format_version": 1e999}', "\0"])
def test_an_about_that_is_none(tmp_path, text) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    (store.path(5) / "about.json").write_text(text)
    (store.folder / "best.json").write_text(text)
    with pytest.raises(CheckpointError, match="about"):
        store.load()
    assert store.best_step() is None


def test_a_pipe_in_a_checkpoint_is_refused(tmp_path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    for name in ("optimizer.safetensors", "about.json"):
        (store.path(5) / name).unlink()
        os.mkfifo(store.path(5) / name)
        with pytest.raises(CheckpointError, match="pipe"):
            store.load()


# ------------------------------------------------------------------------------------- one run


HOLDER = """
import sys, time
from pathlib import Path
from veca._util.files import exclusive
with exclusive(Path(sys.argv[1]), "busy"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_runs_in_one_folder_are_refused(tmp_path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(out / ".distill.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(OutputError, match="another process"):
            distill(settings(), out)
        assert [path.name for path in out.iterdir()] == [".distill.lock"]
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (out / ".distill.lock").exists()  # of a process that is dead: taken over
    distill(settings(schedule={"steps": 1, "warmup": 0}), out)
    assert not (out / ".distill.lock").exists()


def test_nor_twice_in_one_process(tmp_path) -> None:
    first = TrainingRun(settings(), tmp_path, World(), None, None, None, False, None)
    began = time.monotonic()
    with pytest.raises(OutputError, match="another process"):
        distill(settings(), tmp_path)
    assert time.monotonic() - began < 5
    first.close()
    distill(settings(schedule={"steps": 1, "warmup": 0}), tmp_path)
