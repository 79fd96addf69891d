"""Both commands see the same images in the same order, and folders of 0.1 go on as they began."""

from __future__ import annotations

import glob
import importlib
import json
import os
import shutil
import sys
import warnings
from pathlib import Path

import pytest

import veca.features
from conftest import SMALLEST, stirred
from data.pictures import encoded, make_folder, picture
from veca.cli.main import main
from veca.data import open_source, pack
from veca.embed import embed as embed_images
from veca.embed import extract, read_embeddings, read_features
from veca.embed.sources import open_images
from veca.errors import DataError, ImageError, SourceError
from veca.images import find_images

pytest.importorskip("pyarrow")


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Numbers, capitals, hidden names, links to files and folders, a link to nowhere, no text."""
    folder = tmp_path / "odd"
    names = ["img10.png", "img2.png", "IMG1.PNG", "b/2.png", "b/10.png", "b/c/1.png", ".hid/x.png",
             ".x.png", "with space.png", "a\u00e9.png"]  # fmt: skip
    if sys.platform == "linux":
        names.append(os.fsdecode(b"z\xff.png"))
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded(picture(i)))
    make_folder(tmp_path / "elsewhere", 2)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "again.png").symlink_to("img2.png")
    (folder / "loop").symlink_to(folder)
    (folder / "note.txt").write_text("no image")
    return folder


def run(command: str, weights: Path, out: Path, *sources: object) -> None:
    common = ["--weights", weights, "--size", "32x32", "--device", "cpu", "--threads", 1]
    assert main([str(a) for a in (command, *sources, "--out", out, *common)]) == 0


def seen_by(command: str, weights: Path, out: Path, *sources: object) -> list[str]:
    run(command, weights, out, *sources)
    return read_embeddings(out)[0] if command == "embed" else read_features(out)["images"]


def test_both_commands_see_the_same_images_in_the_same_order(odd, weights, tmp_path):
    embedded = seen_by("embed", weights, tmp_path / "vectors", odd)
    features = seen_by("features", weights, tmp_path / "all.npz", odd)
    printed = [os.fsencode(name).decode("utf-8", "backslashreplace") for name in features]
    assert [f"{odd}/{name}" for name in printed] == embedded
    assert features[:4] == ["again.png", "a\u00e9.png", "b/2.png", "b/10.png"]
    order = [features.index(name) for name in ("IMG1.PNG", "img2.png", "img10.png")]
    assert order == sorted(order)
    assert not [name for name in features if "linked" in name or "loop" in name or "hid" in name]
    assert [odd / name for name in features] == find_images(odd)


@pytest.mark.parametrize("kind", ["pattern", "list", "several", "shards", "braces"])
def test_every_kind_of_source_is_read_by_both(kind, odd, weights, tmp_path):
    (tmp_path / "list.txt").write_text("odd/img10.png\nodd/b/2.png\n")
    if kind == "shards":
        pack(odd / "b", tmp_path / "packed", size=32, workers=0)
    sources, expected = {
        "pattern": ([odd / "img*.png"], ["img2.png", "img10.png"]),
        "list": ([tmp_path / "list.txt"], ["img10.png", "b/2.png"]),
        "several": ([odd / "b", odd / "img2.png", odd / "b" / "2.png"],
                    ["b/2.png", "b/10.png", "b/c/1.png", "img2.png"]),
        "shards": ([tmp_path / "packed"], None),
        "braces": ([odd / "b" / "{10,2}.png"], ["b/10.png", "b/2.png"]),
    }[kind]  # fmt: skip
    embedded = seen_by("embed", weights, tmp_path / "vectors", *sources)
    root = ["--root", tmp_path]
    features = seen_by("features", weights, tmp_path / "all.npz", *sources, *root)
    assert [f"{tmp_path}/{name}" for name in features] == embedded
    if expected is not None:
        assert features == [f"odd/{name}" for name in expected]
    else:
        assert len(features) == 3 and all(".tar/" in name for name in features)


def test_features_of_shards_are_resumed(odd, weights, tmp_path):
    pack(odd / "b", tmp_path / "packed", size=32, workers=0)
    model, out = veca.load(weights), tmp_path / "out"
    assert extract(model, tmp_path / "packed", out, size=(32, 32)).computed == 3
    assert extract(model, tmp_path / "packed", out, size=(32, 32)).reused == 3
    (shard,) = (tmp_path / "packed").rglob("*.tar")
    os.utime(shard, ns=(10**18, 10**18))
    assert extract(model, tmp_path / "packed", out, size=(32, 32)).computed == 3


def test_what_is_missing_is_an_error_of_either_kind(tmp_path):
    (tmp_path / "empty").mkdir()
    for sources, noun in [
        (tmp_path / "none", r"/none\b"),
        ([tmp_path / "none.png"], r"/none\.png"),
        (tmp_path / "empty", "/empty"),
        ([], "list of files"),
        ("", "empty path"),
    ]:
        for kind in (DataError, ImageError):
            with pytest.raises(kind, match=noun):
                open_images(sources)


def found_in(sources: object, root: Path, *, natural: bool = True) -> list[str]:
    source = open_images(sources, natural=natural)
    return [Path(source.name(i)).relative_to(root).as_posix() for i in range(len(source))]


def test_images_win_over_shards_in_patterns_as_in_folders(odd, tmp_path):
    pack(odd / "b", tmp_path / "packed", size=32, workers=0)
    (shard,) = (tmp_path / "packed").rglob("*.tar")
    mixed = make_folder(tmp_path / "mixed", 2) / "0"
    shutil.copy(shard, mixed / "a.tar")
    for source in (mixed, f"{mixed}/*"):
        assert found_in(source, mixed) == ["000.png"]
        assert open_images(source).passed_over == {".tar": 1}
    # Training takes the shards of a pattern, as in 0.1.
    assert len(found_in(f"{mixed}/*", mixed, natural=False)) == 3


def test_a_wildcard_meets_no_link_to_a_folder(odd, tmp_path):
    (odd / "loop2").symlink_to(odd)  # with "loop" a tree without end
    (odd / "b" / "linked").symlink_to(tmp_path / "elsewhere" / "0")
    plain = [path.relative_to(odd).as_posix() for path in find_images(odd)]
    for pattern in ("**", "**/*", "**/*.[pP][nN][gG]", "**/**/*"):
        assert found_in(f"{odd}/{pattern}", odd) == plain
    assert found_in(f"{odd}/*/2.png", odd) == ["b/2.png"]
    with pytest.raises(DataError, match="pattern"):
        open_images(f"{odd}/link*/**/*.png")
    # Who names a link means it, before a wildcard or after one.
    assert found_in(f"{odd}/linked/**/*.png", odd) == ["linked/0/000.png", "linked/1/001.png"]
    assert found_in(f"{odd}/*/linked/*.png", odd) == ["b/linked/000.png"]


def test_patterns_match_as_everywhere(odd, monkeypatch):
    (odd / "linked").unlink()
    (odd / "loop").unlink()
    (odd / "b" / "[1]").mkdir()
    shutil.copy(odd / "img2.png", odd / "b" / "[1]" / "3.png")
    monkeypatch.chdir(odd)
    for pattern in ("*.png", "**/*.png", "b/**/*.png", "*/*/*.png", "b/[[]1]/*", "./b/../*/2.png",
                    ".hid/*", ".*/*.png", "**/1.png", "b/**/c/?.png", "**.png"):  # fmt: skip
        expected = {Path(m).absolute() for m in glob.glob(pattern, recursive=True)}  # noqa: PTH207
        for one in (pattern, f"{odd}/{pattern}"):
            source = open_images(one)
            assert {Path(source.name(i)) for i in range(len(source))} == expected


def test_a_folder_called_like_an_image_is_a_folder(odd, tmp_path):
    make_folder(odd / "album.jpg", 2)
    album = ["album.jpg/0/000.png", "album.jpg/1/001.png"]
    assert found_in([odd / "album.jpg", odd / "img2.png"], odd) == [*album, "img2.png"]
    assert found_in([odd / "img2.png", odd / "album.jpg"], odd) == ["img2.png", *album]


@pytest.mark.parametrize("natural", [True, False])
def test_the_home_folder_in_lists_of_files(natural, odd, monkeypatch):
    monkeypatch.setenv("HOME", str(odd))
    monkeypatch.setenv("USERPROFILE", str(odd))
    names = ["~/img10.png", "~/img2.png"]
    assert found_in(names, odd, natural=natural) == ["img10.png", "img2.png"]
    assert found_in(names[:1], odd, natural=natural) == ["img10.png"]
    assert found_in([*names, "~/b"], odd, natural=natural)[:3] == ["img10.png", "img2.png", *(
        ["b/2.png"] if natural else ["b/10.png"])]  # fmt: skip
    assert open_source(names[0], natural=natural).read(0) == (odd / "img10.png").read_bytes()


def failures(out: Path) -> list[str]:
    lines = (out / "failures.jsonl").read_text().splitlines()
    return [json.loads(line)["path"] for line in lines]


@pytest.mark.parametrize("beside", ["file", "folder", "pattern", "list", "shard", "another kind"])
def test_a_missing_file_is_a_failure_beside_others(beside, odd, weights, tmp_path):
    (tmp_path / "list.txt").write_text("odd/img10.png\n")
    shutil.copy(odd / "img2.png", tmp_path / "photo.dat")
    if beside == "shard":
        pack(odd / "b", tmp_path / "packed", size=32, workers=0)
    source = {
        "file": odd / "img2.png",
        "folder": odd / "b",
        "pattern": odd / "img*.png",
        "list": tmp_path / "list.txt",
        "shard": tmp_path / "packed",
        "another kind": tmp_path / "photo.dat",
    }[beside]
    none = tmp_path / "none.png"
    for i, sources in enumerate([(none, source), (source, none)]):
        for command in ("embed", "features"):
            run(command, weights, tmp_path / f"{command}{i}", *sources)
            assert failures(tmp_path / f"{command}{i}") == [str(none)]


def test_one_file_of_many_is_found(odd):
    names = [odd / f"none{i}.png" for i in range(100)]
    names[41] = odd / "img2.png"
    assert len(open_images(names)) == 100


def test_nothing_but_missing_files_is_an_error(odd, tmp_path):
    (tmp_path / "empty").mkdir()
    none = tmp_path / "none.png"
    for sources in ([none], [none, tmp_path / "none2.png"], [none, tmp_path / "empty"],
                    [odd, tmp_path / "nowhere"], [odd, "https://example.org/a.png"]):  # fmt: skip
        with pytest.raises(SourceError):
            open_images(sources)


# ------------------------------------------------------------------------------------- from 0.1


def as_of_0_1(folder: Path) -> None:
    """Take from a folder of embeddings what 0.1 did not write."""
    manifest = json.loads((folder / "embed.json").read_text())
    assert manifest.pop("order") == "natural"
    (folder / "embed.json").write_text(json.dumps(manifest))


def test_embeddings_of_0_1_are_continued_exactly(embed, odd, tree, tmp_path):
    """They have links to folders, and the order of the paths."""
    whole = tmp_path / "whole"
    embed(open_source(odd), whole, shard_rows=3)
    as_of_0_1(whole)
    names = read_embeddings(whole)[0]
    assert names == sorted(names) and any("linked" in name for name in names)
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    for number in (1, 3):
        (broken / f"shards/part-{number:06d}.parquet").unlink()
    report = embed(odd, broken, shard_rows=3)
    assert (report.computed, report.added, report.gone, report.failed) == (6, 0, 0, 0)
    assert tree(broken) == tree(whole)
    for name in ("new10.png", "new2.png", "linked/0/new.png"):
        (odd / name).write_bytes(encoded(picture(9)))
    assert embed(odd, broken, shard_rows=3).added == 3
    added = [name.removeprefix(f"{odd}/") for name in read_embeddings(broken)[0][len(names) :]]
    assert added == ["linked/0/new.png", "new10.png", "new2.png"]


def test_starting_over_takes_the_new_order(embed, odd, tmp_path):
    out = tmp_path / "out"
    embed(open_source(odd), out, shard_rows=3)
    as_of_0_1(out)
    (out / "mine.txt").write_text("keep me")
    report = embed(odd, out, cores=3, overwrite=True)
    assert report.computed == report.images == len(find_images(odd))
    assert not [name for name in read_embeddings(out)[0] if "linked" in name]
    assert (out / "mine.txt").exists() and len(list((out / "shards").iterdir())) == report.shards


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_the_list_of_failures_of_0_1_gives_way(odd, weights, tmp_path, version, overwrite):
    model, out = veca.load(weights), tmp_path / "out"
    (odd / "bad.png").write_bytes(b"no image")
    extract(model, odd, out, size=(32, 32))
    (out / "failures.jsonl").rename(out / "failures.txt")  # its name in 0.1
    manifest = json.loads((out / "features.json").read_text())
    (out / "features.json").write_text(json.dumps({**manifest, "veca": version}))
    assert len(extract(model, odd, out, size=(32, 32), overwrite=overwrite).failed) == 1
    assert (out / "failures.jsonl").exists()
    assert (out / "failures.txt").exists() == (version == "0.2.0")  # then it is the user's own


def test_the_old_name_of_the_batch_size(weights, odd, tmp_path, capsys):
    old = ["embed", odd / "b", "--out", tmp_path / "out", "--weights", weights, "--batch", 2]
    assert main([str(word) for word in (*old, "--device", "cpu", "--workers", 0)]) == 0
    assert "--batch-size" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "embed.json").read_text())["settings"]["batch"] == 2
    with pytest.warns(DeprecationWarning, match="batch_size"):
        embed_images(odd / "b", tmp_path / "again", weights=weights, batch=2, workers=0)


def test_the_old_name_of_the_room():
    collections = importlib.import_module("veca.collections")
    for name in collections.__all__:
        with pytest.warns(DeprecationWarning, match=rf"veca\.embed\.{name}"):
            assert getattr(collections, name) is getattr(veca.embed, name)
    with pytest.raises(AttributeError):
        _ = collections.nothing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in veca.features.__all__:
            assert getattr(veca.features, name) is getattr(veca.embed, name)


# --------------------------------------------------------------------------------------- embed


def test_strict_stops_at_the_first(embed, images, tmp_path):
    (images / "1" / "bad.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"1/bad\.png"):
        embed(images, tmp_path / "out", on_error="raise")
    assert (tmp_path / "out" / "shards" / "part-000000.parquet").exists()
    (images / "1" / "bad.png").write_bytes(encoded(picture(3)))
    assert embed(images, tmp_path / "out", on_error="raise").images == 31


def test_failures_that_are_known_before_earlier_shards_are_computed(embed, tree, tmp_path):
    """They are read ahead, while the batches of the shards before are still under way."""
    folder = make_folder(tmp_path / "images", 24)
    for i in range(3):
        (folder / str(i) / "000bad.png").write_bytes(b"no image")
    model = stirred(veca.create_model(SMALLEST)).eval()
    trees = []
    for name, options in (("one", {"threads": 1}), ("two", {"threads": 3, "workers": 2})):
        report = embed(folder, tmp_path / name, weights=model, shard_rows=2, **options)
        assert (report.images, report.failed, report.shards) == (24, 3, 14)
        trees.append(tree(tmp_path / name))
    assert trees[0] == trees[1]
    listed = [json.loads(line)["path"] for line in report.failures_file.read_text().splitlines()]
    assert listed == [f"{folder}/{i}/000bad.png" for i in range(3)]
