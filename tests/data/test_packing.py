"""Packing: what lies in the shards, and that kills, workers and reruns leave the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.pictures import encoded, make_folder, picture
from veca.data import DataError, open_source, pack
from veca.data.packing import FAILURES, MANIFEST, parse_bytes
from veca.errors import OutputError


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", 40)


def test_shards_hold_the_images_in_order(photos: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    report = pack(
        photos, tmp_path / "out", size=24, per_shard=15, quality=90, workers=0,
        progress=lambda *done: steps.append(done),
    )  # fmt: skip
    assert [path.name for path in report.shards] == [f"shard-{i:06d}.tar" for i in range(3)]
    assert report.images == report.written == 40 and not report.failures
    assert report.bytes == sum(path.stat().st_size for path in report.shards)
    assert steps[0] == (0, 40) and steps[-1] == (40, 40)
    packed, source = open_source(tmp_path / "out"), open_source(photos)
    assert len(packed) == 40
    for i in (0, 14, 15, 39):
        stem = Path(source.name(i)).stem
        assert Path(packed.name(i)).name == f"{i:08d}_{stem}.jpg"
        wanted = Image.open(source.name(i)).resize((32, 24), Image.Resampling.BICUBIC)
        assert packed.read(i) == encoded(wanted, "jpeg", quality=90)
    with tarfile.open(report.shards[0]) as tar:
        member = tar.getmembers()[3]
        assert (member.mtime, member.uid, member.mode, member.isreg()) == (0, 0, 0o644, True)


def test_square_webp_shards_of_limited_size(photos: Path, tmp_path: Path) -> None:
    report = pack(
        photos,
        tmp_path / "out",
        size=20,
        mode="square",
        format="webp",
        shard_size=16_000,
        workers=0,
    )
    assert len(report.shards) > 2
    sizes = [path.stat().st_size for path in report.shards]
    assert all(10_000 < size <= 16_000 for size in sizes[:-1])
    packed = open_source(tmp_path / "out")
    assert packed.name(0).endswith(".webp")
    with Image.open(tmp_path / "photos" / "0" / "000.png") as photo:
        wanted = photo.resize((20, 20), Image.Resampling.BICUBIC, box=(8, 0, 56, 48))
    assert packed.read(0) == encoded(wanted, "webp", quality=75)


def test_native_size_keeps_every_pixel_count(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "out", size=None, workers=0)
    from io import BytesIO

    assert Image.open(BytesIO(open_source(tmp_path / "out").read(3))).size == (64, 48)


def test_one_huge_image_gets_a_shard_of_its_own(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    (tmp_path / "photos").mkdir()
    for i, image in enumerate([picture(0), Image.fromarray(noise), picture(1)]):
        (tmp_path / "photos" / f"{i}.png").write_bytes(encoded(image))
    report = pack(tmp_path / "photos", tmp_path / "out", size=None, shard_size=8_000, workers=0)
    assert len(report.shards) == 3 and report.images == 3


def test_workers_and_reruns_leave_the_same_bytes(photos: Path, tmp_path: Path) -> None:
    (photos / "1" / "007.png").write_bytes(b"broken")
    options = {"size": 24, "per_shard": 7}
    pack(photos, tmp_path / "one", workers=0, **options)
    pack(photos, tmp_path / "two", workers=2, **options)
    wanted = content(tmp_path / "one")
    assert content(tmp_path / "two") == wanted
    assert set(wanted) == {*(f"shard-{i:06d}.tar" for i in range(6)), MANIFEST, FAILURES}
    again = pack(photos, tmp_path / "two", workers=0, **options)
    assert again.written == 0 and again.images == 39
    assert content(tmp_path / "two") == wanted


SCRIPT = """
import sys
from veca.data import pack
pack(sys.argv[1], sys.argv[2], size=24, per_shard=50, workers=2)
"""


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    photos = make_folder(tmp_path / "photos", 600)
    (photos / "1" / "040.png").write_bytes(b"broken")
    (photos / "2" / "599.png").write_bytes(b"broken")  # the very last
    pack(photos, tmp_path / "whole", size=24, per_shard=50, workers=0)
    out = tmp_path / "killed"
    kills = 0
    for shards in (1, 4):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(photos), str(out)], start_new_session=True
        )
        give_up = time.monotonic() + 60
        while len(list(out.glob("*.tar"))) < shards and process.poll() is None:
            assert time.monotonic() < give_up
            time.sleep(0.001)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills
    manifest = json.loads((out / MANIFEST).read_text()) if (out / MANIFEST).exists() else {}
    assert not manifest.get("complete")
    report = pack(photos, out, size=24, per_shard=50, workers=2)
    assert content(out) == content(tmp_path / "whole")
    assert report.images == 598 and [Path(name).name for name, _ in report.failures] == [
        "040.png",
        "599.png",
    ]


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from veca.data.pool import ordered_map\n"
        "def work(item):\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "    time.sleep(0.01)\n"
        "list(ordered_map(work, range(10**6), 2))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    workers = {int(process.stdout.readline()) for _ in range(50)}
    assert len(workers) == 2
    process.kill()
    process.wait()
    give_up = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and sys.platform == "linux":
        assert time.monotonic() < give_up
        time.sleep(0.1)


def test_a_damaged_shard_is_packed_again(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(photos, out, size=24, per_shard=10, workers=0)
    wanted = content(out)
    (out / "shard-000001.tar").write_bytes(b"")
    (out / "shard-000003.tar").unlink()
    (out / ".shard-000002.tar.123-abc.tmp").write_bytes(b"left behind")
    report = pack(photos, out, size=24, per_shard=10, workers=0)
    assert report.written == 30 and content(out) == wanted


def test_other_settings_or_another_source_are_refused(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(photos, out, size=24, workers=0)
    wanted = content(out)
    with pytest.raises(DataError, match=r"quality.*75.*80"):
        pack(photos, out, size=24, quality=80, workers=0)
    with pytest.raises(DataError, match="shard_size"):
        pack(photos, out, size=24, per_shard=5, workers=0)
    (photos / "new.png").write_bytes(encoded(picture(1)))
    with pytest.raises(DataError, match="source"):
        pack(photos, out, size=24, workers=0)
    (out / MANIFEST).write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json"):
        pack(photos, out, size=24, workers=0)
    (out / MANIFEST).write_bytes(wanted[MANIFEST])
    assert content(out) == wanted
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "mine.tar").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"mine\.tar"):
        pack(photos, strange, size=24, workers=0)


def test_failures_are_listed(photos: Path, tmp_path: Path) -> None:
    for name in ("0/000.png", "1/013.png", "2/038.png"):
        (photos / name).write_bytes(b"broken")
    report = pack(photos, tmp_path / "out", size=24, per_shard=10, workers=0)
    assert report.images == 37 and len(report.shards) == 4
    lines = (tmp_path / "out" / FAILURES).read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == [name for name, _ in report.failures]
    assert lines[0].startswith(f"{photos}/0/000.png\tnot an image")
    assert [m["images"] for m in json.loads((tmp_path / "out" / MANIFEST).read_text())["shards"]]


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
def test_failures_with_names_that_are_no_text(photos: Path, tmp_path: Path) -> None:
    (photos / os.fsdecode(b"bad\xff.png")).write_bytes(b"broken")
    for written in (40, 0):
        report = pack(photos, tmp_path / "out", size=24, workers=0)
        assert report.written == written
        assert [name for name, _ in report.failures] == [f"{photos}/bad\\xff.png"]
        assert "bad\\xff.png\t" in (tmp_path / "out" / FAILURES).read_text("utf-8")


def test_pipes_are_failures(photos: Path, tmp_path: Path) -> None:
    os.mkfifo(photos / "pipe.png")
    report = pack(photos, tmp_path / "out", size=24, workers=0)
    assert report.images == 40
    assert [(Path(name).name, reason[:6]) for name, reason in report.failures] == [
        ("pipe.png", "a pipe")
    ]


def test_an_outage_stops_instead_of_dropping_everything(tmp_path: Path) -> None:
    photos = make_folder(tmp_path / "photos", 300, 8, 8)
    source = open_source(photos)
    hidden = [Path(source.name(i)) for i in range(120, 300)]
    data = {path: path.read_bytes() for path in hidden}
    for path in hidden:
        path.unlink()
    out = tmp_path / "out"
    with pytest.raises(DataError, match="100 images"):
        pack(source, out, size=8, per_shard=50, workers=0)
    for path, bytes_ in data.items():
        path.write_bytes(bytes_)
    assert len(list(out.glob("*.tar"))) == 2 and not list(out.glob(".*"))
    report = pack(source, out, size=8, per_shard=50, workers=0)
    assert report.images == 300 and report.written == 200 and not report.failures


def test_an_empty_path_is_refused(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputError, match="''"):
        pack(photos, "", workers=0)
    assert not list((tmp_path / "here").iterdir())


def test_nothing_readable(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"a\.png"):
        pack(tmp_path / "photos", tmp_path / "out", workers=0)
    assert not list((tmp_path / "out").glob("*.tar"))


def test_a_folder_in_use_or_unwritable_is_refused(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(OutputError, match="File exists"):
        pack(photos, tmp_path / "file", workers=0)
    script = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", script, str(out / ".pack.lock")], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(OutputError, match="process"):
            pack(photos, out, size=24, workers=0)
        other.kill()
    assert pack(photos, out, size=24, workers=0).images == 40


def test_a_full_disk_keeps_what_is_packed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from veca.data import packing

    real = packing._ShardWriter._write

    def full(self: packing._ShardWriter, data: bytes) -> None:
        if self.path.name == "shard-000002.tar":
            raise OSError(28, "No space left on device")
        real(self, data)

    monkeypatch.setattr(packing._ShardWriter, "_write", full)
    with pytest.raises(OutputError, match="No space left"):
        pack(photos, tmp_path / "out", size=24, per_shard=10, workers=0)
    monkeypatch.undo()
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2 and not list(
        (tmp_path / "out").glob(".*")
    )
    assert pack(photos, tmp_path / "out", size=24, per_shard=10, workers=0).written == 20


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"size": 0}, r"\bsize\b"),
        ({"mode": "crop"}, "'crop'"),
        ({"format": "jpg"}, "'jpg'"),
        ({"quality": 0}, "quality"),
        ({"shard_size": "many"}, "'many'"),
        ({"per_shard": 0}, "per_shard"),
    ],
)
def test_bad_options_are_refused(photos: Path, tmp_path: Path, options: dict, noun: str) -> None:
    with pytest.raises(DataError, match=noun):
        pack(photos, tmp_path / "out", workers=0, **options)
    assert not (tmp_path / "out").exists()


def test_sizes_in_bytes() -> None:
    sizes = [parse_bytes(text) for text in (512, "1k", "64MiB", "1.5 GB", "2gib")]
    assert sizes == [512, 1000, 64 * 2**20, 1_500_000_000, 2 * 2**30]
    for text in ("", "-1", "MiB", "0", "1 parsec"):
        with pytest.raises(DataError, match=f"'{text}'"):
            parse_bytes(text, DataError)


def test_failures_of_a_shard_that_is_done_again_are_listed_once(tmp_path: Path) -> None:
    photos = make_folder(tmp_path / "photos", 30)
    for i in (4, 25):
        Path(open_source(photos).name(i)).write_bytes(b"no image")
    first = pack(photos, tmp_path / "out", size=24, per_shard=10, workers=0)
    first.shards[-1].unlink()
    again = pack(photos, tmp_path / "out", size=24, per_shard=10, workers=0)
    assert again.failures == first.failures and len(again.failures) == 2
    assert len((tmp_path / "out" / FAILURES).read_text().splitlines()) == 2


def test_failures_that_are_not_in_a_row_stop_nothing(tmp_path: Path) -> None:
    photos = make_folder(tmp_path / "photos", 150, 8, 8)
    source = open_source(photos)
    for i in range(150):
        if i % 75:
            Path(source.name(i)).write_bytes(b"no image")
    report = pack(source, tmp_path / "out", size=8, workers=0)
    assert report.images == 2 and len(report.failures) == 148


def test_long_names_are_shortened_to_what_a_tar_takes(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / f"{'x' * 200}.png").write_bytes(encoded(picture(0)))
    report = pack(tmp_path / "photos", tmp_path / "out", size=24, workers=0)
    assert report.images == 1
    assert Path(open_source(tmp_path / "out").name(0)).name == f"00000000_{'x' * 64}.jpg"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("next", lambda m: m.update(next=10**400)),
        ("next", lambda m: m.update(next="3")),
        ("next", lambda m: m.update(next=99)),
        ("next", lambda m: m.update(shards=[])),  # four images, in no shard
        ("shards", lambda m: m.update(shards={})),
        (r"shards\.1", lambda m: m["shards"].__setitem__(1, None)),
        (r"shards\.0.*bytes", lambda m: m["shards"][0].update(bytes=None)),
        (r"shards\.0.*first", lambda m: m["shards"][0].pop("first")),
        ("follow", lambda m: m["shards"][0].update(stop=-1)),
        ("failures", lambda m: m.pop("failures")),
        (r"failures\.0", lambda m: m.update(failures=[{"index": "0"}])),
        ("settings", lambda m: m.update(settings=None)),
        ("complete", lambda m: m.update(complete=3)),
    ],
)
def test_an_odd_manifest_is_named_with_its_field(tmp_path: Path, field: str, change) -> None:
    photos = make_folder(tmp_path / "photos", 4)
    pack(photos, tmp_path / "out", size=24, per_shard=2, workers=0)
    path = tmp_path / "out" / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=field) as caught:
        pack(photos, tmp_path / "out", size=24, per_shard=2, workers=0)
    assert MANIFEST in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"next": NaN}', '{"next": 1e999}', "[]"])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    photos = make_folder(tmp_path / "photos", 2)
    pack(photos, tmp_path / "out", size=24, workers=0)
    (tmp_path / "out" / MANIFEST).write_text(text)
    with pytest.raises(DataError, match=MANIFEST):
        pack(photos, tmp_path / "out", size=24, workers=0)
