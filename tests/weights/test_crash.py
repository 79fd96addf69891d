"""A save that dies half-way leaves the old set whole, or the new one; never a mixture."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from veca._util import files
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

    monkeypatch.setattr("veca._util.tensor_file.save_file", half)
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


# Points of a save at which the machine may die, and which set is there afterwards.
STOPS = {
    "half the tensors written": "old",
    "all written, nothing renamed": "old",
    "old config gone, tensors not renamed": "old",
    "tensors renamed, config not renamed": "new",
    "config renamed, provenance not renamed": "new",
}
# One process for each, which stops for ever at its point; forked, because torch is slow to import.
SAVERS = """
import os, sys, time
from veca import create_model
from veca._util import files, tensor_file
from veca.weights import save, store

folder, stops, changes = sys.argv[1], sys.argv[2].split(";"), eval(sys.argv[3])

def halt(*args, **kwargs):
    os.write(1, f"{os.getpid()};{stop}\\n".encode())
    time.sleep(600)

def write_half(state, target, metadata):
    target.write_bytes(b"x" * 1000)
    halt()

def replace(*args):
    global renames
    if renames == index - 2:
        halt()
    renames += 1
    rename(*args)

rename, renames = os.replace, 0
children = []
for index, stop in enumerate(stops):
    child = os.fork()
    if child:
        children.append(child)
        continue
    if index == 0:
        tensor_file.save_file = write_half
    elif index == 1:
        store._without_stale_config = halt
    else:
        files.os.replace = replace
    save(create_model("tiny", **changes), f"{folder}/{index}", provenance={"teacher": "new"})
    os._exit(1)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed(tmp_path: Path) -> None:
    for index in range(len(STOPS)):
        save(create_model("tiny", **OLD), tmp_path / str(index), provenance={"teacher": "old"})
    command = [sys.executable, "-c", SAVERS, str(tmp_path), ";".join(STOPS), repr(NEW)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as savers:
        assert savers.stdout is not None
        try:
            reached = [savers.stdout.readline().rstrip().partition(";") for _ in STOPS]
            assert {stop for _, _, stop in reached} == set(STOPS)
            for pid, _, _ in reached:
                os.kill(int(pid), signal.SIGKILL)
            assert savers.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(savers.pid, signal.SIGKILL)
    for index, (stop, expected) in enumerate(STOPS.items()):
        path = tmp_path / str(index)
        assert version(path) == expected, stop
        assert (path / "config.json").exists() == (index not in (2, 3)), stop
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
