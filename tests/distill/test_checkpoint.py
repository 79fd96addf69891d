"""Checkpoints: whole or not there, old ones kept until new ones are."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from veca.distill import DistillConfig, DistillError, read_metrics
from veca.distill.checkpoint import CheckpointStore
from veca.distill.loop import TrainingRun
from veca.distill.parallel import World
from veca.errors import OutputError


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

    monkeypatch.setattr("veca.weights.tensors.save_file", full)
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
