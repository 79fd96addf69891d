"""A save that dies half-way leaves the old set whole, or the new one; never a mixture."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from veca import files
from veca.errors import OutputError
from veca.model import Veca, create_model
from veca.weights import load, read_config, read_provenance, save, store

OLD = {"depth": 2, "width": 32, "heads": 2, "num_cores": 4}
NEW = {**OLD, "rope_base": 50.0, "num_cores": 6}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return save(create_model("tiny", **OLD), tmp_path / "w", provenance={"teacher": "old"})


def version(path: Path) -> str:
    """Which set is there, checked to be of one piece."""
    model, provenance = load(path), read_provenance(path)
    assert read_config(path) == model.config
    name = "old" if model.config.num_cores == 4 else "new"
    assert provenance["teacher"] == name
    return name


def new() -> Veca:
    return create_model("tiny", **NEW)


@pytest.mark.parametrize("call", range(1, 4))
def test_a_rename_that_fails(old: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    calls = 0
    rename = os.replace

    def replace(*args: str) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise PermissionError(13, "Permission denied")
        rename(*args)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(OutputError, match="Permission denied"):
        save(new(), old, provenance={"teacher": "new"})
    monkeypatch.undo()
    assert version(old) == ("old" if call == 1 else "new")
    if call == 1:
        assert sorted(path.name for path in old.iterdir()) == sorted(store.FILES)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_while_writing(
    old: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    before = {path.name: path.read_bytes() for path in old.iterdir()}

    def half(state: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(store, "save_file", half)
    with pytest.raises(error):
        save(new(), old)
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before


def test_a_single_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(create_model("tiny", **OLD), tmp_path / "w.safetensors")
    before = path.read_bytes()

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OutputError, match="No space left"):
        save(new(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# Each stops for ever at one point of a save; the test kills it there.
STOPS = {
    "half the tensors written": "old",
    "all written, nothing renamed": "old",
    "old config gone, tensors not yet": "old",
    "tensors renamed, config not yet": "new",
    "config renamed, provenance not yet": "new",
}
CHILD = """
import os, sys, time
from veca import create_model, files
from veca.weights import save, store

path, stop, changes = sys.argv[1], sys.argv[2], eval(sys.argv[3])
model = create_model("tiny", **changes)

def halt(*args, **kwargs):
    print("stopped", flush=True)
    time.sleep(600)

if stop == "half the tensors written":
    def write(state, target, metadata):
        target.write_bytes(b"x" * 1000)
        halt()
    store.save_file = write
elif stop == "all written, nothing renamed":
    store._without_stale_config = halt
else:
    real, renames = os.replace, 0
    last = ["tensors not yet", "config not yet", "provenance not yet"]
    wanted = [i for i, words in enumerate(last) if stop.endswith(words)][0]
    def replace(*args):
        global renames
        if renames == wanted:
            halt()
        renames += 1
        real(*args)
    files.os.replace = replace
save(model, path, provenance={"teacher": "new"})
"""


def test_killed(tmp_path: Path) -> None:
    running = []
    for i, stop in enumerate(STOPS):
        path = tmp_path / str(i)
        save(create_model("tiny", **OLD), path, provenance={"teacher": "old"})
        command = [sys.executable, "-c", CHILD, str(path), stop, repr(NEW)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append((stop, path, child))
    for stop, path, child in running:
        assert child.stdout is not None
        assert child.stdout.readline() == "stopped\n", stop
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert version(path) == STOPS[stop], stop
        if stop.startswith("old config gone"):
            assert not (path / "config.json").exists()
        # The next save works, and the folder is in order again.
        save(new(), path, provenance={"teacher": "new"})
        assert version(path) == "new"
        assert all((path / name).is_file() for name in store.FILES)


def test_saving_again_and_again_keeps_the_config_in_place(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual case, a checkpoint of the same model: config.json is never away."""
    config = old / "config.json"
    rename = os.replace

    def replace(*args: str) -> None:
        assert config.is_file()
        rename(*args)

    monkeypatch.setattr(files.os, "replace", replace)
    model = create_model("tiny", **OLD)
    save(model, old)
    assert torch.equal(load(old).norm.bias, model.norm.bias)
