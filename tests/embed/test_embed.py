"""Embedding a collection: the right numbers, every image once, and what goes wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import veca
from data.pictures import encoded, make_folder, picture
from veca._util.files import temporary_beside
from veca.data import DataError, pack
from veca.embed import iter_embeddings, read_embeddings, writers
from veca.embed.plan import locked
from veca.embed.writers import BackgroundWrites, parquet
from veca.errors import (
    ImageError,
    InputError,
    MissingExtraError,
    OutputError,
    SourceError,
    WeightsError,
)

SHARDS = "shards/part-{:06d}.parquet"


def plain(weights, paths, size, cores=4):
    """The definition: each image by itself through the model."""
    model = veca.load(weights)
    with torch.inference_mode():
        return [model(veca.preprocess(p, size=size).pixels, cores=cores) for p in paths]


def test_rows_are_the_models_features_in_the_order_of_the_source(embed, images, weights, tmp_path):
    report = embed(images, tmp_path / "out")
    assert (report.images, report.computed, report.failed, report.shards) == (30, 30, 0, 4)
    names, cls = read_embeddings(tmp_path / "out")
    assert names == sorted(map(str, images.rglob("*.png")))
    assert cls.dtype == np.float32
    expected = torch.cat([out.cls for out in plain(weights, names, (32, 48))])
    np.testing.assert_allclose(cls, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_a_batch_is_computed_as_the_plain_model_computes_it(embed, images, weights, tmp_path):
    embed(images, tmp_path / "out", batch_size=4)
    names, cls = read_embeddings(tmp_path / "out")
    batch, model = veca.preprocess(names[:4], size=(32, 48)), veca.load(weights)
    with torch.inference_mode():
        expected = model.cores_only(batch.pixels, 4, first=1).cls
        whole = model(batch.pixels, cores=4).cls
    assert np.array_equal(cls[:4], expected.numpy())
    torch.testing.assert_close(expected, whole, rtol=1e-4, atol=1e-5)  # CLS alone, to rounding


def test_columns(embed, images, weights, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    embed(images, tmp_path / "out", patches=True, dtype="float16")
    table = pq.read_table(tmp_path / "out" / "shards")
    types = dict(zip(table.schema.names, table.schema.types, strict=True))
    assert types == {
        "path": pa.string(),
        "cls": pa.list_(pa.float16(), 32),
        "patches": pa.large_list(pa.float16()),
        "grid_height": pa.int32(),
        "grid_width": pa.int32(),
        "budget": pa.int32(),
        "weights": pa.string(),
    }
    assert set(table["budget"].to_pylist()) == {4}
    assert set(table["weights"].to_pylist()) == {veca.weights.weights_hash(weights)}


def test_patches_of_images_of_several_sizes(embed, weights, tmp_path):
    folder = make_folder(tmp_path / "images", 5, 48, 64)
    make_folder(tmp_path / "images" / "tall", 5, 64, 48)
    embed(folder, tmp_path / "out", patches=True, size=32)
    parts = iter_embeddings(tmp_path / "out", patches=True)
    rows = [row for part in parts for row in zip(*part, strict=True)]
    assert len(rows) == 10
    for path, cls, grid in rows:
        (out,) = plain(weights, [path], 32)
        assert grid.shape == (*out.grid, 32)
        np.testing.assert_allclose(cls, out.cls[0].numpy(), rtol=1e-4, atol=1e-5)
        expected = out.patches[0].unflatten(0, out.grid).numpy()
        np.testing.assert_allclose(grid, expected, rtol=1e-4, atol=1e-5)
    assert {grid.shape[:2] for _, _, grid in rows} == {(2, 3), (3, 2)}


def test_patches_that_were_not_stored(embed, images, tmp_path):
    embed(images, tmp_path / "out")
    with pytest.raises(InputError, match="--patches"):
        next(iter_embeddings(tmp_path / "out", patches=True))


def test_float16_is_the_rounded_float32(embed, images, tmp_path):
    embed(images, tmp_path / "a")
    embed(images, tmp_path / "b", dtype="float16")
    _, whole = read_embeddings(tmp_path / "a")
    _, half = read_embeddings(tmp_path / "b")
    assert half.dtype == np.float16 and np.array_equal(half, whole.astype(np.float16))


def test_workers_and_threads_change_no_byte(embed, images, tree, tmp_path):
    (images / "0" / "bad.png").write_bytes(b"no image")
    embed(images, tmp_path / "a", patches=True)
    before = torch.get_num_threads()
    embed(images, tmp_path / "b", patches=True, workers=2, threads=3)
    assert torch.get_num_threads() == before
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


@pytest.mark.parametrize("kind", ["list", "tar", "both"])
def test_lists_and_tar_shards(embed, images, tmp_path, kind):
    paths = sorted(images.rglob("*.png"))
    (tmp_path / "list.txt").write_text("\n".join(str(p) for p in reversed(paths)))
    pack(images, tmp_path / "packed", size=None, per_shard=20)
    sources = {"list": [tmp_path / "list.txt"], "tar": [tmp_path / "packed"]}
    sources["both"] = [*sources["list"], *sources["tar"]]
    embed(sources[kind], tmp_path / "out")
    names, _ = read_embeddings(tmp_path / "out")
    listed = [str(p) for p in reversed(paths)]
    assert [n for n in names if ".tar/" not in n] == (listed if kind != "tar" else [])
    assert sum(".tar/" in n for n in names) == (30 if kind != "list" else 0)


def test_an_image_listed_twice_has_one_row(embed, images, tmp_path):
    paths = sorted(map(str, images.rglob("*.png")))[:5]
    (tmp_path / "list.txt").write_text("\n".join([*paths, paths[2], paths[0]]))
    assert embed(tmp_path / "list.txt", tmp_path / "out").images == 5
    assert read_embeddings(tmp_path / "out")[0] == paths


def test_a_model_of_ones_own(embed, images, weights, tmp_path):
    embed(images, tmp_path / "a")
    model = veca.load(weights).train()
    embed(images, tmp_path / "b", weights=model)
    assert model.training
    assert np.array_equal(read_embeddings(tmp_path / "a")[1], read_embeddings(tmp_path / "b")[1])


def test_bfloat16(embed, images, tmp_path):
    embed(images, tmp_path / "a")
    embed(images, tmp_path / "b", precision="bfloat16")
    a, b = (read_embeddings(tmp_path / name)[1] for name in "ab")
    assert not np.array_equal(a, b) and np.abs(a - b).max() < 0.1 * np.abs(a).max()


def test_fast_jpeg_is_near(embed, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.jpg").write_bytes(encoded(picture(i, 512, 768), "JPEG", quality=95))
    embed(folder, tmp_path / "a")
    embed(folder, tmp_path / "b", fast_jpeg=True)
    a, b = (read_embeddings(tmp_path / name)[1] for name in "ab")
    assert not np.array_equal(a, b) and np.abs(a - b).max() < 0.1 * np.abs(a).max()


def test_progress_reaches_the_end(embed, images, tmp_path):
    seen = []
    embed(images, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 30) and seen[-1] == (30, 30) and seen == sorted(seen)


# --------------------------------------------------------------------------------------- resuming

KILLED = """
import os, signal, sys
from veca.embed import embed

images, out, weights, at = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])

def kill(done, total):
    if done >= at * total:
        os.kill(os.getpid(), signal.SIGKILL)

embed(images, out, weights=weights, size=(32, 48), cores=4, batch_size=4, shard_rows=8, workers=2,
      threads=2, dtype="float32", patches=True, progress=kill)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_killed_and_resumed_leaves_the_bytes_of_an_uninterrupted_run(
    embed, images, weights, tree, tmp_path
):
    (images / "1" / "bad.png").write_bytes(b"no image")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    embed(images, whole, patches=True)
    for at in (0.5, 0.75):
        arguments = [str(images), str(broken), str(weights), str(at)]
        done = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
        assert done.returncode == -9
        finished = list((broken / "shards").glob("part-*.parquet"))
        assert 0 < len(finished) < 4
    (broken / "shards" / ".part-000009.parquet.1-ab.tmp").write_bytes(b"half")
    report = embed(images, broken, patches=True)
    assert report.computed == 30 - 8 * len(finished) and report.images == 30
    assert tree(broken) == tree(whole)
    names, _ = read_embeddings(broken)
    assert len(names) == len(set(names)) == 30


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_stopped_and_resumed_on_other_threads_leaves_equal_bytes(
    embed, images, tree, tmp_path, precision
):
    def stop(done: int, total: int) -> None:
        if done >= 12:
            raise KeyboardInterrupt

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    embed(images, whole, patches=True, precision=precision)
    with pytest.raises(KeyboardInterrupt):
        embed(images, broken, patches=True, precision=precision, progress=stop)
    assert 0 < len(list((broken / "shards").glob("part-*.parquet"))) < 4
    embed(images, broken, patches=True, precision=precision, threads=2, workers=1)
    assert tree(broken) == tree(whole)


def test_a_shard_that_is_gone_is_made_again(embed, images, tree, tmp_path):
    out = tmp_path / "out"
    embed(images, out)
    before = tree(out)
    (out / SHARDS.format(1)).unlink()
    assert embed(images, out).computed == 8
    assert tree(out) == before


def test_a_finished_folder_is_left_alone(embed, images, tmp_path):
    out = tmp_path / "out"
    (images / "0" / "bad.png").write_bytes(b"no image")
    embed(images, out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    report = embed(images, out, workers=2)
    assert (report.computed, report.images, report.failed) == (0, 30, 1)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before


def test_new_images_are_added_in_shards_of_their_own(embed, images, tree, tmp_path):
    out = tmp_path / "out"
    embed(images, out)
    before = tree(out)
    make_folder(images / "0" / "more", 3)  # sorts among the others
    report = embed(images, out)
    assert (report.computed, report.added, report.images, report.shards) == (3, 3, 33, 5)
    after = tree(out)
    assert {name: after[name] for name in before} == before
    names, _ = read_embeddings(out)
    assert [n for n in names if "more" in n] == names[30:] and len(set(names)) == 33
    assert embed(images, out).computed == 0


def test_a_stopped_run_goes_on_as_planned_when_images_were_added(embed, images, tree, tmp_path):
    out = tmp_path / "out"
    embed(images, out)
    before = tree(out)
    for number in (0, 2):
        (out / SHARDS.format(number)).unlink()
    make_folder(images / "0" / "more", 3)
    assert embed(images, out).computed == 16 + 3
    after = tree(out)
    assert {name: after[name] for name in before} == before


def test_images_that_are_gone_keep_their_rows(embed, images, tmp_path):
    out = tmp_path / "out"
    embed(images, out)
    first, last = sorted(images.rglob("*.png"))[0], sorted(images.rglob("*.png"))[-1]
    first.unlink()
    last.unlink()
    report = embed(images, out)
    assert (report.computed, report.images, report.gone) == (0, 30, 2)
    (out / SHARDS.format(3)).unlink()  # that of the last image
    report = embed(images, out)
    assert (report.images, report.failed) == (29, 1)
    (line,) = (out / "failures.jsonl").read_text().splitlines()
    assert json.loads(line) == {"path": str(last), "reason": "no longer in the source"}


def test_many_images_that_are_gone_do_not_stop_a_run(embed, tmp_path):
    folder, out = make_folder(tmp_path / "images", 130, 16, 16), tmp_path / "out"
    embed(folder, out, shard_rows=120, size=(16, 16))
    (out / SHARDS.format(0)).unlink()
    for path in sorted(folder.rglob("*.png"))[:110]:
        path.unlink()
    report = embed(folder, out, shard_rows=120, size=(16, 16))
    assert (report.images, report.failed, report.gone) == (20, 110, 110)


@pytest.mark.slow
class Killed(BaseException):
    """What a killed process does next: nothing."""


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_starting_over_can_be_killed_anywhere(
    embed, images, tree, tmp_path, monkeypatch, overwrite
):
    whole, out = tmp_path / "whole", tmp_path / "out"
    (images / "bad.png").write_bytes(b"no image")
    embed(images / "0", out)
    embed(images, out)  # a plan of two parts
    (out / "notes.txt").write_text("mine")
    shutil.copytree(out, whole)
    embed(images, whole, overwrite=True)
    steps = 0
    for steps in range(99):
        folder = tmp_path / f"killed-{steps}"
        shutil.copytree(out, folder)
        left = iter(range(steps))

        def or_die(do, left=left):
            def step(*arguments, **options):
                if next(left, None) is None:
                    raise Killed
                return do(*arguments, **options)

            return step

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", or_die(Path.unlink))
            patch.setattr(os, "replace", or_die(os.replace))
            try:
                embed(images, folder, overwrite=True)
                break
            except Killed:
                pass
        (folder / ".embed.lock").unlink(missing_ok=True)
        assert embed(images, folder, overwrite=overwrite).images == 30
        names, _ = read_embeddings(folder)
        assert sorted(names) == sorted(str(p) for p in images.glob("*/*"))
        if overwrite:
            assert tree(folder) == tree(whole)
    assert steps > 10


def test_a_folder_left_without_manifest_goes_on(embed, images, tmp_path):
    out = tmp_path / "out"
    for folder in ("shards", "plan"):
        (out / folder).mkdir(parents=True)
    assert embed(images, out).images == 30
    (out / "embed.json").unlink()
    with pytest.raises(OutputError, match="shards"):
        embed(images, out)


@pytest.mark.slow
def test_two_runs_at_a_time_are_refused(embed, images, weights, tmp_path):
    command = [sys.executable, "-c", KILLED, str(images), str(tmp_path / "out"), str(weights), "2"]
    with locked(tmp_path / "out"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "another process" in done.stderr


# --------------------------------------------------------------------------------------- failures


def test_failures_are_listed(embed, images, tmp_path):
    out = tmp_path / "out"
    bad = images / "0" / "bad.png"
    bad.write_bytes(encoded(picture(0))[:50])
    (images / "2" / "empty.jpg").touch()
    report = embed(images, out)
    assert (report.images, report.failed) == (30, 2)
    lines = [json.loads(line) for line in report.failures_file.read_text().splitlines()]
    assert [line["path"] for line in lines] == [str(bad), str(images / "2" / "empty.jpg")]
    assert "empty" in lines[1]["reason"] and all(line["reason"] for line in lines)
    assert str(bad) not in read_embeddings(out)[0]


def test_a_pipe_is_a_failure(embed, images, tmp_path):
    os.mkfifo(images / "pipe.png")
    report = embed(images, tmp_path / "out")
    assert (report.images, report.failed) == (30, 1)
    assert "a pipe, a device or a socket" in report.failures_file.read_text()


def test_sizes_of_any_kind_of_whole_number(embed, images, tree, tmp_path):
    embed(images, tmp_path / "one", size=(32, 48))
    embed(images, tmp_path / "two", size=(np.int64(32), np.int32(48)))
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_repaired_images_are_done_on_request(embed, images, tree, tmp_path):
    bad = images / "0" / "bad.png"
    bad.write_bytes(b"no image")
    embed(images, tmp_path / "a")
    bad.write_bytes(encoded(picture(77)))
    assert embed(images, tmp_path / "a").computed == 0
    report = embed(images, tmp_path / "a", retry_failed=True)
    assert (report.computed, report.images, report.failed) == (8, 31, 0)
    embed(images, tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")  # failures.jsonl is gone, too


def test_a_repair_keeps_the_rows_of_images_that_are_gone(embed, images, tmp_path):
    """A shard is made anew as a whole, and what is gone cannot be."""
    bad = images / "0" / "bad.png"
    bad.write_bytes(b"no image")
    embed(images, tmp_path / "a", shard_rows=50)
    bad.write_bytes(encoded(picture(77)))
    gone = sorted((images / "0").glob("0*.png"))[0]
    gone.unlink()
    report = embed(images, tmp_path / "a", shard_rows=50, retry_failed=True)
    assert str(gone) in read_embeddings(tmp_path / "a")[0]
    assert (report.computed, report.images, report.failed) == (0, 30, 1)


def test_a_hundred_failures_in_a_row_stop_the_run(embed, images, tree, tmp_path):
    for i in range(120):
        (images / "1" / f"bad{i:03d}.png").write_bytes(b"no image")
    out = tmp_path / "out"
    with pytest.raises(DataError, match="100 images"):
        embed(images, out, shard_rows=50)
    assert [n for n in tree(out) if n.startswith("shards")] == [SHARDS.format(i) for i in (0, 1)]
    for path in (images / "1").glob("bad*.png"):
        path.write_bytes(encoded(picture(5)))
    assert embed(images, out, shard_rows=50, retry_failed=True).images == 150


def test_no_readable_image_at_all(embed, tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(3):
        (tmp_path / "images" / f"{i}.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"failures\.jsonl"):
        embed(tmp_path / "images", tmp_path / "out")
    assert len((tmp_path / "out" / "failures.jsonl").read_text().splitlines()) == 3


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("option", "noun"),
    [
        ({"cores": 8}, "cores: 4"),
        ({"size": 64}, r"size: \[32, 48\]"),
        ({"patches": True}, "patches: false"),
        ({"dtype": "float16"}, "dtype: "),
        ({"batch_size": 5}, "batch: 4"),
        ({"shard_rows": 9}, "shard_rows: 8"),
    ],
)
def test_other_settings_are_refused(embed, images, tmp_path, option, noun):
    embed(images, tmp_path / "out")
    with pytest.raises(InputError, match=noun):
        embed(images, tmp_path / "out", **option)


def test_other_weights_are_refused(embed, images, tiny, tmp_path):
    embed(images, tmp_path / "out")
    with pytest.raises(InputError, match="weights: "):
        embed(images, tmp_path / "out", weights=tiny)


def test_another_source_is_refused(embed, images, tmp_path):
    embed(images, tmp_path / "out")
    with pytest.raises(InputError, match="another source"):
        embed(make_folder(tmp_path / "other", 3), tmp_path / "out")


@pytest.mark.parametrize("damage", ["half", "empty", "foreign", "stray", "moved", "other"])
def test_a_damaged_or_foreign_shard_is_refused(embed, images, tmp_path, damage):
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = tmp_path / "out"
    embed(images, out)
    shard, other = out / SHARDS.format(1), out / SHARDS.format(2)
    if damage == "half":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "empty":
        shard.write_bytes(b"")
    elif damage == "foreign":
        pq.write_table(pa.table({"a": [1, 2]}), shard)
    elif damage == "stray":
        shard = out / "shards" / "mine.parquet"
        pq.write_table(pa.table({"a": [1, 2]}), shard)
    elif damage == "moved":
        shard.write_bytes(other.read_bytes())
    else:
        embed(images, tmp_path / "b", cores=2)
        shard.write_bytes((tmp_path / "b" / SHARDS.format(1)).read_bytes())
    for call in (lambda: embed(images, out), lambda: read_embeddings(out)):
        with pytest.raises(InputError, match=re.escape(shard.name)) as caught:
            call()
        assert "\n" not in str(caught.value)
    shard.unlink()
    assert embed(images, out).images == 30


def test_a_folder_with_other_things_is_refused(embed, images, tmp_path):
    with pytest.raises(OutputError, match=r"\(0, 1, 2\)"):
        embed(images, images)
    (tmp_path / "embed.json").write_text("{}")
    with pytest.raises(InputError, match=r"embed\.json.*settings"):
        embed(images, tmp_path)


def test_nothing_is_written_after_a_failure():
    writes, queued, written = BackgroundWrites(1, most=2), threading.Event(), []

    def fail():
        queued.wait(10)
        raise OutputError("full")

    writes.submit(fail)
    writes.submit(written.append, 1)
    queued.set()
    for _ in range(2):
        with pytest.raises(OutputError, match="full"):
            writes.finish()
    with pytest.raises(OutputError, match="full"):
        writes.submit(written.append, 2)
        writes.finish()
    writes.close()
    assert not written


def test_a_shard_whose_first_rows_could_not_be_written_is_not_there(
    embed, images, tree, tmp_path, monkeypatch
):
    queued, calls = threading.Event(), []

    class Pool(ThreadPoolExecutor):
        def submit(self, *arguments):
            future = super().submit(*arguments)
            calls.append(arguments)
            if len(calls) == 2:
                queued.set()
            return future

    def full(path):
        monkeypatch.setattr(parquet, "temporary_beside", temporary_beside)
        queued.wait(10)  # the last rows of the shard wait behind these
        raise OutputError("No space left on device")

    monkeypatch.setattr(writers, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(parquet, "temporary_beside", full)
    with pytest.raises(OutputError, match="No space left"):
        embed(images, tmp_path / "out")
    assert not list((tmp_path / "out").glob("shards/*"))
    embed(images, tmp_path / "out")
    embed(images, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["gone", "half", "no array"])
def test_a_folder_without_its_plan_is_refused(embed, images, tmp_path, damage):
    embed(images, tmp_path / "out")
    plan = tmp_path / "out" / "plan" / "000000.npz"
    if damage == "gone":
        plan.unlink()
    elif damage == "half":
        plan.write_bytes(plan.read_bytes()[:99])
    else:
        ends = np.load(plan)["ends"]
        np.savez(plan, ends=ends)
        with zipfile.ZipFile(plan, "a") as members:
            members.writestr("text", b"no array")
    with pytest.raises(InputError, match="list of images"):
        embed(images, tmp_path / "out")


def test_a_folder_that_cannot_be_written(embed, images, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file/out"):
        embed(images, tmp_path / "file" / "out")


def test_bad_input_leaves_nothing(embed, images, tiny, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    cases = [
        (tmp_path / "empty", {}, SourceError, "/empty"),
        (tmp_path / "nowhere", {}, SourceError, "/nowhere"),
        (images, {"cores": 9}, InputError, r"cores.*\b9\b"),
        (images, {"size": 8}, ImageError, "size=8"),
        (images, {"dtype": "float8"}, InputError, "'float8'"),
        (images, {"precision": "int4"}, InputError, "int4"),
        (images, {"batch_size": 0}, InputError, "batch_size"),
        (images, {"shard_rows": 1.5}, InputError, "shard_rows"),
        (images, {"workers": -1}, InputError, "workers"),
        (images, {"engine": "spark"}, InputError, "'spark'"),
        (images, {"device": "gpu"}, InputError, "'gpu'"),
        (images, {"weights": tmp_path / "none"}, WeightsError, "/none"),
        (images, {"weights": torch.nn.DataParallel(tiny)}, InputError, "DataParallel"),
    ]
    for source, options, kind, noun in cases:
        with pytest.raises(kind, match=noun):
            embed(source, out, **options)
    assert not out.exists()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(OutputError, match="empty"):
        embed(images, "")
    assert not list((tmp_path / "empty").iterdir())


def test_missing_extras(embed, images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"\[ray\]"):
        embed(images, tmp_path / "out", engine="ray")
    for name in [n for n in sys.modules if n.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"\[embed\]"):
        embed(images, tmp_path / "out")
    # With ray missing as well, one extra brings both.
    with pytest.raises(MissingExtraError, match=r"--engine ray.*\[ray\]"):
        embed(images, tmp_path / "out", engine="ray")
    assert not (tmp_path / "out").exists()


def test_no_embeddings_to_read(tmp_path):
    with pytest.raises(InputError, match=r"embed\.json"):
        read_embeddings(tmp_path)


@pytest.mark.skipif(os.name != "posix" or sys.platform == "darwin", reason="names of any bytes")
def test_a_name_that_is_no_text(embed, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/a\xff.png")).write_bytes(encoded(picture(1)))
    Path(os.fsdecode(os.fsencode(folder) + b"/b\xfe.png")).write_bytes(b"no image")
    report = embed(folder, tmp_path / "out")
    assert (report.images, report.failed) == (1, 1)
    assert read_embeddings(tmp_path / "out")[0] == [f"{folder}/a\\xff.png"]
    assert embed(folder, tmp_path / "out").computed == 0


def test_a_sliver_is_a_failure_and_not_a_giant(embed, images, tmp_path, monkeypatch):
    monkeypatch.setenv("VECA_MAX_PIXELS", "20000")
    (images / "0" / "sliver.png").write_bytes(encoded(picture(0, 4, 200)))
    report = embed(images, tmp_path / "out", size=32)
    assert (report.images, report.failed) == (30, 1)
    (line,) = map(json.loads, (tmp_path / "out" / "failures.jsonl").read_text().splitlines())
    assert line["reason"].startswith("4 x 200 would become 32 x 1600, more than the limit")
