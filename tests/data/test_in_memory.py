"""Decoded sets: their pixels, their file, and what is left out."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from data.pictures import encoded, make_folder, picture
from veca.data import DataError, InMemoryImages, TooManyBadError, cache_file, open_source


@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_ids_and_names(tmp_path: Path, workers: int) -> None:
    source = open_source(make_folder(tmp_path / "photos", 20))
    steps: list[tuple[int, int]] = []
    images = InMemoryImages.build(
        source, size=32, workers=workers, progress=lambda *done: steps.append(done)
    )
    assert images.images.shape == (20, 3, 32, 32) and images.images.dtype == torch.uint8
    assert images.ids.tolist() == list(range(20)) and images.size == 32
    assert steps == [(16, 20), (20, 20)]
    for i in (0, 7, 19):
        assert images.name(i) == source.name(i)
        photo = Image.open(source.name(i))
        wanted = photo.resize((32, 32), Image.Resampling.BICUBIC, box=(8, 0, 56, 48))
        assert np.array_equal(images.images[i].permute(1, 2, 0).numpy(), np.asarray(wanted))


def test_squashed_squares(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path / "photos", 2))
    images = InMemoryImages.build(source, size=16, mode="squash", workers=0)
    wanted = Image.open(source.name(1)).resize((16, 16), Image.Resampling.BICUBIC)
    assert np.array_equal(images.images[1].permute(1, 2, 0).numpy(), np.asarray(wanted))
    square = InMemoryImages.build(source, size=16, workers=0)
    assert images.fingerprint() != square.fingerprint()


def test_the_file_is_written_once_and_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(make_folder(tmp_path / "photos", 18))
    kept = tmp_path / "kept"
    first = InMemoryImages.build(source, size=16, workers=0, cache=kept)
    path = cache_file(kept, source, 16)
    assert list(kept.iterdir()) == [path]
    monkeypatch.setattr("veca.data.in_memory._decode_to", None)
    again = InMemoryImages.build(source, size=16, workers=0, cache=kept)
    plain = InMemoryImages.build(source, size=16, workers=0)
    for other in (first, again):
        assert torch.equal(other.images, plain.images)
        assert list(other.names) == list(plain.names)
        assert other.ids.tolist() == plain.ids.tolist()
        assert other.fingerprint() == plain.fingerprint()
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("images"), plain.images)
        assert file.get_tensor("ids").tolist() == list(range(18))
    before = path.read_bytes()
    again.images.zero_()  # a private copy of the page, not the file
    assert path.read_bytes() == before


def test_another_source_or_a_damaged_file_is_built_again(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path / "photos", 4))
    path = tmp_path / "set.safetensors"
    InMemoryImages.build(source, size=16, workers=0, cache=path)
    with pytest.raises(DataError, match=r"\bsize\b.*16.*32"):
        InMemoryImages.load(path, size=32)
    with pytest.raises(DataError, match=r"mode.*square.*squash"):
        InMemoryImages.load(path, mode="squash")
    other = open_source(make_folder(tmp_path / "others", 5))
    with pytest.raises(DataError, match="source"):
        InMemoryImages.load(path, source=other)
    assert len(InMemoryImages.build(other, size=16, workers=0, cache=path)) == 5
    whole = path.read_bytes()
    for damaged in (whole[:100], whole[:3000], whole[:-1], b"", b"\xff" * 4000, b"\0" * 4000):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"set\.safetensors"):
            InMemoryImages.load(path)
        assert len(InMemoryImages.build(other, size=16, workers=0, cache=path)) == 5
        assert path.read_bytes() == whole
    with pytest.raises(DataError, match=r"nowhere\.safetensors"):
        InMemoryImages.load(tmp_path / "nowhere.safetensors")


def test_saving_by_hand(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path / "photos", 4))
    images = InMemoryImages.build(source, size=16, workers=0)
    loaded = InMemoryImages.load(images.save(tmp_path / "mine.safetensors"), source=source)
    assert torch.equal(loaded.images, images.images) and list(loaded.names) == list(images.names)


def test_bad_images_are_left_out_counted_and_named(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "photos", 30)
    (root / "0" / "003.png").write_bytes(b"no image")
    source = open_source(root)
    told: list[tuple[str, str]] = []
    for cache in (None, tmp_path / "kept"):
        told.clear()
        images = InMemoryImages.build(
            source, size=16, workers=0, cache=cache, on_bad=lambda *bad: told.append(bad)
        )
        assert len(images) == 29 and 1 not in images.ids.tolist()
        assert images.ids.tolist() == [0, *range(2, 30)]
        assert [name for name, _ in images.bad] == [str(root / "0" / "003.png")]
        assert told == images.bad and "not an image" in told[0][1]


def test_too_many_bad_images_are_listed(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "photos", 30)
    for name in ("0/003.png", "1/004.png"):
        (root / name).write_bytes(b"no image")
    source = open_source(root)
    with pytest.raises(TooManyBadError, match=r"003\.png.*004\.png") as caught:
        InMemoryImages.build(source, size=16, workers=0, cache=tmp_path / "kept")
    assert len(caught.value.bad) == 2
    assert not list((tmp_path / "kept").glob("*"))  # nothing half-written
    assert len(InMemoryImages.build(source, size=16, workers=0, bad_limit=0.1)) == 28


def test_nothing_readable(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a\.png"):
        InMemoryImages.build(open_source(tmp_path / "photos"), size=16, workers=0)


def test_files_that_vanished_are_bad_images(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "photos", 3)
    source = open_source(root)
    shutil.rmtree(root / "1")
    images = InMemoryImages.build(source, size=16, workers=0)
    assert images.bad == [(str(root / "1" / "001.png"), "no such file")]


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"size": 0}, r"\bsize\b"),
        ({"size": 16, "mode": "short"}, "squash"),
        ({"size": 16, "mode": "crop"}, "'crop'"),
        ({"size": 16, "bad_limit": 2}, "share"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict, noun: str) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture(0)))
    with pytest.raises(DataError, match=noun):
        InMemoryImages.build(open_source(tmp_path / "a.png"), workers=0, **options)


def test_moving_to_a_device(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path / "photos", 3))
    images = InMemoryImages.build(source, size=16, workers=0)
    assert images.to("cpu") is images
    moved = images.to("meta")  # stands for a card: memory of another kind
    assert moved.images.device.type == "meta" and moved.images.shape == images.images.shape
    assert moved.fingerprint() == images.fingerprint() and moved.to("meta") is moved


def test_lists_of_the_same_names_in_two_folders_are_kept_apart(tmp_path: Path) -> None:
    built = []
    for i, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        (folder / "0.png").write_bytes(encoded(picture(i)))
        (folder / "list.txt").write_text("0.png\n")
        source = open_source(folder / "list.txt")
        built.append(InMemoryImages.build(source, size=16, cache=tmp_path / "kept", workers=0))
    assert not torch.equal(built[0].images, built[1].images)


def test_a_kept_set_with_more_bad_images_than_are_allowed_now(tmp_path: Path) -> None:
    photos = make_folder(tmp_path / "photos", 20)
    for path in sorted(photos.rglob("*.png"))[:5]:
        path.write_bytes(b"no image")
    ways = {"size": 16, "cache": tmp_path / "kept", "workers": 0}
    assert len(InMemoryImages.build(open_source(photos), bad_limit=0.5, **ways)) == 15
    with pytest.raises(TooManyBadError, match="5 of 20"):
        InMemoryImages.build(open_source(photos), **ways)
