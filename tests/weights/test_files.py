"""Atomic writing."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
from pathlib import Path

import pytest

from veca._util import files
from veca.errors import InputError, OutputError


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_writes_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.bin"
    with files.atomic_write(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    assert leftovers(path.parent) == []


def test_text_and_json(tmp_path: Path) -> None:
    files.atomic_write_text(tmp_path / "x.txt", "größer\n")
    assert (tmp_path / "x.txt").read_text(encoding="utf-8") == "größer\n"
    files.atomic_write_json(tmp_path / "x.json", {"a": [1, "é"]})
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"a": [1, "é"]}
    assert text.endswith("}\n")
    with pytest.raises(ValueError):
        files.atomic_write_json(tmp_path / "x.json", {"a": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"a": [1, "é"]}


def test_half_a_pair_in_a_name_is_printed() -> None:
    assert files.printable("a\ud800\udcff.png") == "a\\ud800\\udcff.png"


def test_names_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"a\xff\xc3\xa9")
    assert files.printable(name) == "a\\xff\xe9"
    files.atomic_write_json(tmp_path / "x.json", {"name": name})
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == {"name": name}


def test_names_as_long_as_they_can_be(tmp_path: Path) -> None:
    longest = os.pathconf(tmp_path, "PC_NAME_MAX")
    for letter in ("a", "\u20ac"):
        path = tmp_path / (letter * (longest // len(letter.encode())))
        files.atomic_write_text(path, "whole")
        assert path.read_text() == "whole"
    too_long = tmp_path / "new" / ("a" * (longest + 1))
    with pytest.raises(OutputError, match="shorter"), files.temporary_beside(too_long):
        pytest.fail("told too late")
    assert not (tmp_path / "new").exists()


def test_an_empty_path_is_no_place(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="empty"):
        files.place_for("")
    assert files.place_for(tmp_path) == tmp_path


def test_obeys_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        files.atomic_write_text(tmp_path / "x", "")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_middle_leaves_the_old(tmp_path: Path, error: type) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(error), files.atomic_write(path) as file:
        file.write(b"half of the new")
        raise error
    assert path.read_bytes() == b"old"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_failing_system_call_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(OutputError, match="Input/output error"):
        files.atomic_write_text(path, "new")
    assert path.read_bytes() == b"old"
    assert leftovers(tmp_path) == []


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands in for one."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OutputError) as caught, files.atomic_write(path) as file:
            file.write(b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(path) in str(caught.value)
    assert "place" in str(caught.value)
    assert path.read_bytes() == b"old"
    assert leftovers(tmp_path) == []


def test_reasons_and_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(code: int) -> None:
        def replace(*args: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(files.os, "replace", replace)
        files.atomic_write_text(tmp_path / "x", "new")

    with pytest.raises(OutputError, match=r"No space left on device.*free"):
        fail(errno.ENOSPC)
    with pytest.raises(OutputError, match=r"Permission denied.*may write"):
        fail(errno.EACCES)


def test_targets_that_cannot_be_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="/folder"):
        files.atomic_write_text(tmp_path / "folder", "")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file/x"):
        files.atomic_write_text(tmp_path / "file" / "x", "")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="/pipe"):
        files.atomic_write_text(tmp_path / "pipe", "")
    with pytest.raises(InputError, match="'ab'"), files.atomic_write(tmp_path / "x", "ab"):
        pass


def test_a_folder_that_stays_empty_goes_again(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    new, there = tmp_path / "a" / "b", tmp_path / "there"
    for folder in (new, there, there / "deeper"):
        with pytest.raises(RuntimeError), files.folder_to_fill(folder):
            assert folder.is_dir()
            raise RuntimeError
    assert list(tmp_path.rglob("*")) == [there]
    with pytest.raises(RuntimeError), files.folder_to_fill(new):
        (tmp_path / "a" / "note.txt").write_text("mine")
        raise RuntimeError
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["note.txt"]
    with files.folder_to_fill(new):
        (new / "x").touch()
    assert (new / "x").exists()


def test_what_fails_to_write_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), files.atomic_write(tmp_path / "a" / "b" / "x"):
        raise RuntimeError
    with pytest.raises(RuntimeError), files.exclusive(tmp_path / "c" / ".lock", "busy"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files.atomic_write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_errors_about_other_files_pass_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, files.atomic_write(tmp_path / "x"):
        (tmp_path / "input").read_bytes()
    assert not isinstance(caught.value, OutputError)
    assert list(tmp_path.iterdir()) == []
