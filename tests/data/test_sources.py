"""Folders, lists, patterns: what is found, in which order, and what is said when nothing is."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from data.pictures import encoded, make_folder, picture
from veca.data import DataError, ImageSource, open_source
from veca.data import index as index_module
from veca.data.names import Names
from veca.data.sources import FolderSource


def names(source: ImageSource, root: Path) -> list[str]:
    return [str(Path(source.name(i)).relative_to(root)) for i in range(len(source))]


def settle(folder: Path) -> None:
    """Let all folders look as if they had last changed a minute ago."""
    past = time.time() - 60
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (past, past))


def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Note every folder that is really listed."""
    done: list[Path] = []
    real = index_module._scan
    monkeypatch.setattr(
        index_module, "_scan", lambda folder, *how: (done.append(folder), real(folder, *how))[1]
    )
    return done


# ---------------------------------------------------------------------------------------- folders


def test_a_folder_of_any_depth(tmp_path: Path) -> None:
    for name in (
        "b/deep/er/2.PNG",
        "a.jpeg",
        "b/10.webp",
        "b/notes.txt",
        ".hidden/x.png",
        "._a.jpg",
    ):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    source = open_source(tmp_path / "photos")
    assert isinstance(source, ImageSource)
    assert names(source, tmp_path / "photos") == ["a.jpeg", "b/10.webp", "b/deep/er/2.PNG"]
    assert source.read(2) == b"b/deep/er/2.PNG"
    with pytest.raises(IndexError):
        source.name(3)


def test_other_files_are_counted_by_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = scans(monkeypatch)
    root = make_folder(tmp_path / "photos", 3)
    for name in ("a.NEF", "1/b.nef", "2/c", "2/d.tar", ".hidden"):
        (root / name).touch()
    settle(root)
    for _ in range(2):  # the second time from the index
        source = open_source(root)
        assert isinstance(source, FolderSource)
        assert source.passed_over == {".nef": 2, "": 1, ".tar": 1}
    assert len(done) == 1


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "photos", 2)
    make_folder(tmp_path / "elsewhere", 1)
    (root / "more").symlink_to(tmp_path / "elsewhere")
    (root / "1" / "loop").symlink_to(root)
    assert names(open_source(root), root) == ["0/000.png", "1/001.png", "more/0/000.png"]


def test_the_index_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = scans(monkeypatch)
    root = make_folder(tmp_path / "photos", 5)
    settle(root)
    first = open_source(root)
    again = open_source(root)
    assert len(done) == 1
    assert names(first, root) == names(again, root)
    assert first.fingerprint() == again.fingerprint()
    assert [p for p in root.rglob("*") if p.is_file()] == list(root.rglob("*.png"))


@pytest.mark.parametrize("change", ["added", "removed", "renamed", "new folder", "rewritten"])
def test_the_index_follows_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    root = make_folder(tmp_path / "photos", 5)
    settle(root)
    before = open_source(root)
    done = scans(monkeypatch)
    if change == "added":
        (root / "0" / "zz.png").write_bytes(b"new")
    elif change == "removed":
        (root / "2" / "002.png").unlink()
    elif change == "renamed":
        (root / "2" / "002.png").rename(root / "2" / "new.png")
    elif change == "new folder":
        make_folder(root / "3", 1)
    else:
        (root / "2" / "002.png").write_bytes(b"shorter")
    after = open_source(root)
    found = sorted(str(p.relative_to(root)) for p in root.rglob("*.png"))
    assert len(done) == 1
    assert names(after, root) == found
    assert after.fingerprint() != before.fingerprint()


def test_a_folder_that_just_changed_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_folder(tmp_path / "photos", 2)
    done = scans(monkeypatch)
    open_source(root)
    open_source(root)
    assert len(done) == 2


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 half", b"\x00" * 200])
def test_a_damaged_index_is_made_again(tmp_path: Path, cache: Path, damage: bytes) -> None:
    root = make_folder(tmp_path / "photos", 3)
    settle(root)
    wanted = names(open_source(root), root)
    (kept,) = (cache / "index").glob("*.npz")
    kept.write_bytes(damage)
    assert names(open_source(root), root) == wanted


def test_an_unwritable_cache_is_no_hindrance(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "photos", 2)
    (tmp_path / "file").write_text("not a folder")
    assert len(open_source(root, cache_dir=tmp_path / "file")) == 2


def test_the_fingerprint_does_not_depend_on_the_place(tmp_path: Path) -> None:
    here, there = make_folder(tmp_path / "a", 4), make_folder(tmp_path / "b", 4)
    assert open_source(here).fingerprint() == open_source(there).fingerprint()
    assert (
        open_source(make_folder(tmp_path / "c", 5)).fingerprint() != open_source(here).fingerprint()
    )


# ----------------------------------------------------------------------------- lists and patterns


def test_a_list_of_files(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "photos", 3)
    absolute = tmp_path / "other.png"
    absolute.write_bytes(encoded(picture(9)))
    listing = tmp_path / "photos" / "train.txt"
    listing.write_text(f"# mine\n2/002.png\n\n  0/000.png \r\n{absolute}\n1/missing.png\n")
    source = open_source(str(listing))
    assert len(source) == 4
    assert source.read(0) == (root / "2" / "002.png").read_bytes()
    assert source.read(2) == absolute.read_bytes()
    with pytest.raises(FileNotFoundError):
        source.read(3)
    assert source.name(3) == str(root / "1" / "missing.png")


def test_patterns(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "photos", 6)
    assert len(open_source(f"{root}/**/*.png")) == 6
    assert names(open_source(f"{root}/0/00{{3,0}}.png"), root) == ["0/003.png", "0/000.png"]
    assert len(open_source(f"{root}/{{0..1}}/*.png")) == 4


def test_several_sources_in_a_row(tmp_path: Path) -> None:
    one, two = make_folder(tmp_path / "a", 2), make_folder(tmp_path / "b", 3)
    source = open_source([one, str(two)])
    assert len(source) == 5
    assert source.name(2) == open_source(two).name(0)
    assert source.read(4) == open_source(two).read(2)
    assert source.fingerprint() != open_source([two, one]).fingerprint()
    files = open_source([one / "0" / "000.png", two / "1" / "001.png"])
    assert [Path(files.name(i)).name for i in range(2)] == ["000.png", "001.png"]
    assert len(open_source([one, open_source(two)])) == 5


def test_a_source_is_passed_through_and_travels_to_workers(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path / "a", 3))
    assert open_source(source) is source
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read(1) == source.read(1) and copy.fingerprint() == source.fingerprint()


@pytest.mark.parametrize(
    ("make", "noun"),
    [
        (lambda p: p / "nowhere", "nowhere"),
        (lambda p: p, r"\.tar .*folder"),
        (lambda p: "", "empty path"),
        (lambda p: [], "^no images"),
        (lambda p: f"{p}/*.jpg", r"\*\.jpg.*pattern"),
        (lambda p: p / "list.txt", r"list\.txt.*2 files"),
        (lambda p: p / "empty.txt", r"empty\.txt"),
        (lambda p: p / "binary.txt", "UTF-8"),
        (lambda p: p / "nul.txt", "NUL"),
        (lambda p: p / "long.txt", "there is no file"),
        (lambda p: p / "table.csv", r"table\.csv"),
        (lambda p: p / "shard.tar.gz", r"shard\.tar\.gz.*compressed"),
        (lambda p: "https://example.org/photos.tar", r"https://example\.org.*network"),
        (lambda p: [p / "gone.jpg"], r"no file.*gone\.jpg"),
        (lambda p: f"{p}/x-{{5..2}}.tar", r"\{5\.\.2\}.*range"),
        (lambda p: 7, r"\bint\b"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, make, noun: str) -> None:
    (tmp_path / "list.txt").write_text("a.jpg\nb.jpg\n")
    (tmp_path / "empty.txt").write_text("\n# nothing\n")
    (tmp_path / "nul.txt").write_bytes(b"a\0b.jpg\n")
    (tmp_path / "long.txt").write_text("x" * 100_000)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "shard.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=noun):
        open_source(make(tmp_path))


def test_names_are_kept_to_the_letter() -> None:
    listed = ["", "a", "ünï/中.png", "line\nbreak", b"\xff raw".decode("utf-8", "surrogateescape")]
    kept = Names.of(listed)
    assert list(kept) == listed and kept[-1] == listed[-1] and kept[1:3] == listed[1:3]
    assert list(kept.pick([2, 0])) == [listed[2], listed[0]]
    with pytest.raises(IndexError):
        kept[5]
    with pytest.raises(DataError, match="names"):
        Names(np.zeros(3, np.uint8), np.array([2]))


def test_a_link_to_itself_is_no_folder(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos", 2)
    (tmp_path / "photos" / "0" / "self").symlink_to("self")
    assert len(open_source(tmp_path / "photos")) == 2


def test_a_list_with_a_byte_order_mark(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos", 1)
    (tmp_path / "list.txt").write_text("photos/0/000.png\n", encoding="utf-8-sig")
    assert open_source(tmp_path / "list.txt").read(0).startswith(b"\x89PNG")


def test_a_pattern_names_each_image_once(tmp_path: Path) -> None:
    make_folder(tmp_path, 4)
    found = open_source(str(tmp_path / "0" / "{003,*}.png"))
    assert names(found, tmp_path) == ["0/003.png", "0/000.png"]
