"""Tar shards: members found, read in any order, and cut-off files refused by name."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from veca.data import DataError, open_source
from veca.data import shards as shards_module


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_members_of_one_shard(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "a.tar",
        {
            "000.jpg": b"zero",
            "000.json": b"{}",
            "000.mask.png": b"mask",
            "sub/001.PNG": b"one" * 400,
            "._000.jpg": b"litter",
            "v1.2-final.webp": b"two",
            "x" * 150 + ".jpg": b"long name",
        },
    )
    source = open_source(path)
    assert [source.name(i).removeprefix(f"{path}/") for i in range(len(source))] == [
        "000.jpg",
        "sub/001.PNG",
        "v1.2-final.webp",
        "x" * 150 + ".jpg",
    ]
    assert [source.read(i) for i in (3, 1, 0, 2)] == [b"long name", b"one" * 400, b"zero", b"two"]


def test_a_folder_a_pattern_and_braces(tmp_path: Path) -> None:
    for i in range(3):
        write_tar(tmp_path / "set" / f"s-{i:02d}.tar", {f"{i}{j}.jpg": b"%d" % j for j in range(i)})
    for spec in (tmp_path / "set", f"{tmp_path}/set/*.tar", f"{tmp_path}/set/s-{{00..02}}.tar"):
        source = open_source(spec)
        names = [Path(source.name(i)).name for i in range(len(source))]
        assert names == ["10.jpg", "20.jpg", "21.jpg"]
        assert source.read(2) == b"1"
    with pytest.raises(DataError, match=r"s-03\.tar"):
        open_source(f"{tmp_path}/set/s-{{00..03}}.tar")


def test_images_in_a_folder_come_before_shards(tmp_path: Path) -> None:
    write_tar(tmp_path / "set" / "all.tar", {"0.jpg": b"0"})
    (tmp_path / "set" / "photo.jpg").write_bytes(b"photo")
    assert open_source(tmp_path / "set").read(0) == b"photo"


def test_a_shard_is_listed_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "a.tar", {"0.jpg": b"0"})
    listed = []
    real = shards_module._scan
    monkeypatch.setattr(
        shards_module, "_scan", lambda path, size: (listed.append(path), real(path, size))[1]
    )
    first = open_source(path).fingerprint()
    assert open_source(path).fingerprint() == first and len(listed) == 1
    write_tar(path, {"0.jpg": b"0", "1.jpg": b"1"})
    os.utime(path, (1, 1))
    changed = open_source(path)
    assert len(changed) == 2 and changed.fingerprint() != first and len(listed) == 2


def test_more_shards_than_files_may_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "_OPEN_FILES", 2)
    for i in range(5):
        write_tar(tmp_path / "set" / f"{i}.tar", {f"{i}.jpg": b"%d" % i})
    source = open_source(tmp_path / "set")
    for i in (0, 4, 2, 0, 1, 3, 0):
        assert source.read(i) == b"%d" % i
    assert len(source._files) == 2
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read(3) == b"3" and len(copy._files) == 1


@pytest.mark.parametrize("left", [100, 512, 700, 1536, 1537])
def test_a_shard_cut_short_is_refused_by_name(tmp_path: Path, left: int) -> None:
    # Members of 512 + 512 bytes each: cut in a header, after one, in data, and between members.
    path = write_tar(tmp_path / "a.tar", {f"{i}.jpg": b"x" * 500 for i in range(3)})
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DataError, match=r"a\.tar.* cut short"):
        open_source(path)


def test_a_shard_cut_between_members_is_refused_too(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{i}.jpg": b"x" * 500 for i in range(3)})
    path.write_bytes(path.read_bytes()[: 2 * 1024])
    with pytest.raises(DataError, match="end mark"):
        open_source(path)


def test_a_shard_cut_short_while_in_use(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{i}.jpg": b"x" * 500 for i in range(3)})
    source = open_source(path)
    os.truncate(path, 1200)
    assert source.read(0) == b"x" * 500
    with pytest.raises(DataError, match=r"a\.tar.*1\.jpg"):
        source.read(1)


def test_other_unusable_shards(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"0.json": b"{}"})
    with pytest.raises(DataError, match=r"no image.*a\.tar"):
        open_source(path)
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match="compressed"):
        open_source(path)
    path.write_bytes(b"\x01" * 4096)
    with pytest.raises(DataError, match="damaged"):
        open_source(path)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the process's open files")
def test_few_shards_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "_OPEN_FILES", 2)
    for i in range(6):
        write_tar(tmp_path / f"{i}.tar", {"0.jpg": b"%d" % i})
    source = open_source(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert [source.read(i) for i in range(6)] == [b"%d" % i for i in range(6)]
    assert len(list(Path("/proc/self/fd").iterdir())) - before == 2


@pytest.mark.skipif(not hasattr(os, "pread"), reason="files are kept open where there is pread")
def test_threads_that_miss_the_same_shard_open_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(write_tar(tmp_path / "a.tar", {f"{i}.jpg": b"%d" % i for i in range(4)}))
    opened, real = [], os.open

    def slow(*args: object) -> int:
        time.sleep(0.05)  # time for the other threads to miss it, too
        opened.append(args)
        return real(*args)

    monkeypatch.setattr(shards_module.os, "open", slow)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(source.read, range(4))) == [b"0", b"1", b"2", b"3"]
    assert len(opened) == len(source._files) == 1


@pytest.mark.skipif(not hasattr(os, "pread"), reason="files are kept open where there is pread")
def test_no_thread_closes_the_shard_that_another_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "_OPEN_FILES", 1)
    for i in range(3):
        write_tar(tmp_path / f"{i}.tar", {"0.jpg": b"%d" % i})
    source, real = open_source(tmp_path), os.pread

    def slow(*args: int) -> bytes:
        time.sleep(0.01)  # time for another thread to open its shard in place of this one
        return real(*args)

    monkeypatch.setattr(shards_module.os, "pread", slow)
    with ThreadPoolExecutor(3) as threads:
        read = list(threads.map(source.read, [0, 1, 2] * 10))
    assert read == [b"0", b"1", b"2"] * 10
    assert len(source._files) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_read_does_not_lock_the_child(tmp_path: Path) -> None:
    source = open_source(write_tar(tmp_path / "a.tar", {"0.jpg": b"0"}))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with shards_module._files_lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        reading = threading.Thread(target=source.read, args=(0,), daemon=True)
        reading.start()
        reading.join(10)
        os._exit(1 if reading.is_alive() or len(source._files) != 1 else 0)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert source.read(0) == b"0"
