"""Nothing is lost in silence: removed folders, damaged files, leftovers, odd names, full disks."""

from __future__ import annotations

import errno
import os
import shutil
import sys

import numpy as np
import pytest
import torch

import veca
from veca._util.files import one_line, remove_leftovers, temporary_beside
from veca.data import pack, packing
from veca.embed import extract, read_embeddings, read_features
from veca.embed.writers import parquet, read_failures, write_failures
from veca.errors import InputError, OutputError


@pytest.fixture
def model(tiny):
    return tiny.eval()


def at(moment, action):
    """A `progress` that acts once so many images are done."""
    done = []

    def progress(now, total):
        if now >= moment and not done:
            done.append(now)
            action()

    return progress


class TestRemovedFolders:
    @pytest.mark.parametrize("moment", [4, 30])
    def test_of_features(self, model, images, tmp_path, moment):
        out = tmp_path / "out"
        with pytest.raises(OutputError, match="out"):
            extract(model, images, out, size=32, batch_size=4,
                    progress=at(moment, lambda: out.rename(tmp_path / "trash")))  # fmt: skip
        assert extract(model, images, out, size=32).images == 30
        assert len(list(out.rglob("*.npz"))) == 30

    def test_of_features_at_the_very_end(self, model, images, tmp_path, monkeypatch):
        (images / "0" / "bad.png").write_bytes(b"no image")
        out = tmp_path / "out"

        def write(path, failed):
            if out.exists():
                out.rename(tmp_path / "trash")
            return write_failures(path, failed)

        monkeypatch.setattr("veca.embed.writers.folder.write_failures", write)
        with pytest.raises(OutputError, match="out"):
            extract(model, images, out, size=32)

    def test_of_one_file_that_was_there_already(self, model, images, tmp_path):
        out = tmp_path / "out"
        extract(model, images, out, size=32)
        gone = next(out.rglob("*.npz"))
        with pytest.raises(OutputError, match=r"\.npz is gone \(1 of 31"):
            extract(model, images, out, size=32, progress=at(30, gone.unlink))
        assert extract(model, images, out, size=32).computed == 1

    @pytest.mark.parametrize("moment", [12, 30])
    def test_of_embeddings(self, embed, images, tmp_path, moment):
        out = tmp_path / "out"
        with pytest.raises(OutputError, match="out"):
            embed(images, out, progress=at(moment, lambda: out.rename(tmp_path / "trash")))
        assert embed(images, out).images == len(read_embeddings(out)[0]) == 30

    def test_of_packed_shards(self, images, tmp_path, monkeypatch):
        out, finish, made = tmp_path / "out", packing._ShardWriter.finish, []

        def finish_and_lose(self):
            entry = finish(self)
            made.append(entry)
            if len(made) == 2:
                (out / made[0]["file"]).unlink()
            return entry

        monkeypatch.setattr(packing._ShardWriter, "finish", finish_and_lose)
        with pytest.raises(OutputError, match="000000"):
            pack(images, out, per_shard=8, workers=0)
        monkeypatch.undo()
        report = pack(images, out, per_shard=8, workers=0)
        assert report.images == 30 and all(path.is_file() for path in report.shards)

    def test_of_a_folder_that_is_being_packed(self, images, tmp_path):
        out = tmp_path / "out"
        with pytest.raises(OutputError, match="gone"):
            pack(images, out, per_shard=4, workers=0, progress=at(16, lambda: shutil.rmtree(out)))


class TestDamage:
    @pytest.mark.parametrize("format", ["npz", "safetensors"])
    def test_every_flipped_byte_of_features_is_seen(self, model, images, tmp_path, format):
        photo, out = next(images.rglob("*.png")), tmp_path / "out"
        extract(model, photo, out, size=32, format=format)
        (path,) = out.rglob(f"*.{format}")
        whole, good = path.read_bytes(), read_features(path)
        rng = np.random.default_rng(0)
        for place in rng.choice(len(whole), 60, replace=False):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
            try:
                found = read_features(path)
            except InputError as error:
                assert str(path) in str(error)
            else:  # a byte that says nothing, such as the date of a member
                assert all(np.array_equal(found[name], good[name]) for name in good)

    @pytest.mark.parametrize("format", ["npz", "safetensors"])
    def test_a_damaged_file_is_not_there_already(self, model, images, tmp_path, format):
        out = tmp_path / "out"
        extract(model, images, out, size=32, format=format, dtype="float32")
        path = next(out.rglob(f"*.{format}"))
        whole = path.read_bytes()
        good = read_features(path)
        number = good["cls"][5].tobytes()
        path.write_bytes(whole.replace(number, bytes([number[0] ^ 1]) + number[1:], 1))
        assert extract(model, images, out, size=32, format=format, dtype="float32").computed == 1
        assert len(path.read_bytes()) == len(whole)
        np.testing.assert_allclose(read_features(path)["cls"], good["cls"], atol=1e-5)

    def test_files_without_a_checksum_are_read(self, tmp_path):
        from safetensors.numpy import save_file

        save_file({"cls": np.ones(3)}, tmp_path / "a.safetensors", {"image": '"a.png"'})
        assert read_features(tmp_path / "a.safetensors")["image"] == "a.png"

    def test_files_that_are_none(self, tmp_path):
        (tmp_path / "a.npz").write_bytes(b"no zip")
        np.savez(tmp_path / "b.npz", x=np.array([object()]))
        for name in ("a.npz", "b.npz", "missing.npz", "c.txt"):
            with pytest.raises(InputError, match=name):
                read_features(tmp_path / name)

    def test_a_flipped_byte_of_a_shard_is_seen(self, embed, images, tmp_path):
        embed(images, tmp_path / "out")
        path = next((tmp_path / "out" / "shards").iterdir())
        import pyarrow.parquet as pq

        column = pq.read_metadata(path).row_group(0).column(1)
        whole = path.read_bytes()
        place = column.data_page_offset + column.total_compressed_size - 20
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(InputError, match=path.name):
            read_embeddings(tmp_path / "out")

    def test_shards_of_0_1_have_no_checksums_and_are_read(self, embed, images, tmp_path):
        import pyarrow.parquet as pq

        embed(images, tmp_path / "out")
        for path in (tmp_path / "out" / "shards").iterdir():
            metadata = pq.read_metadata(path).metadata
            table = pq.read_table(path).replace_schema_metadata(metadata)
            pq.write_table(table, path, write_page_checksum=False)
        assert len(read_embeddings(tmp_path / "out")[0]) == 30
        assert embed(images, tmp_path / "out").computed == 0

    def test_manifests_nested_without_end_are_refused(self, model, embed, images, tmp_path):
        pytest.importorskip("pyarrow")
        extract(model, images, tmp_path / "a", size=32)
        embed(images, tmp_path / "b")
        (tmp_path / "a" / "features.json").write_text("[" * 100_000)
        with pytest.raises(OutputError, match=r"features\.json"):
            extract(model, images, tmp_path / "a", size=32)
        (tmp_path / "b" / parquet.MANIFEST).write_text("[" * 100_000)
        with pytest.raises(InputError, match=parquet.MANIFEST):
            read_embeddings(tmp_path / "b")


class TestLeftovers:
    def test_of_a_dead_process_go_and_of_a_running_one_stay(self, tmp_path, monkeypatch):
        with temporary_beside(tmp_path / "x.npz") as running:
            mine = running.name
            dead = mine.replace(f".{os.getpid()}-", ".999999999-")
            older = ".x.npz.999999999-0123abcd.tmp"
            elsewhere = dead.replace("-", "-00000000", 1)[: -len("00000000.tmp")] + ".tmp"
            names = {mine, dead, older, elsewhere, ".mine.tmp", "x.tmp"}
            for name in names:
                (tmp_path / name).touch()
            remove_leftovers(tmp_path.iterdir())
            left = {path.name for path in tmp_path.iterdir()}
        assert left == names - {dead, older}

    def test_of_a_run_of_features_go_with_the_next(self, model, images, tmp_path):
        extract(model, images, tmp_path / "out", size=32)
        for folder in (tmp_path / "out", tmp_path / "out" / "0"):
            (folder / ".1.png.npz.999999999-0123abcd.tmp").touch()
        extract(model, images, tmp_path / "out", size=32)
        (tmp_path / ".all.npz.999999999-0123abcd.tmp").touch()
        extract(model, images, tmp_path / "all.npz", size=32, fit="crop", what=["cls"])
        assert not list(tmp_path.rglob("*.tmp"))


class TestNames:
    ODD = ("a\nb.png", "a\tb.png", "a\u2028b.png", "a\x85b.png")

    def test_the_list_of_failures_reads_back(self, tmp_path):
        failed = [(name, "reason\nof two lines") for name in self.ODD]
        write_failures(tmp_path / "failures.jsonl", failed)
        assert read_failures(tmp_path / "failures.jsonl") == dict(failed)

    @pytest.mark.parametrize(
        "damage",
        [
            *(b"\xff\n", b"[" * 100_000, b'"path"\n', b"[]\n"),
            b'{"path": "\\ud800", "reason": "x"}\n',
        ],
    )
    def test_a_damaged_list_is_written_anew(self, model, embed, images, tmp_path, damage):
        pytest.importorskip("pyarrow")
        (images / "0" / "bad.png").write_bytes(b"no image")
        for run in (
            lambda out: extract(model, images, out, size=32),
            lambda out: embed(images, out),
        ):
            out = tmp_path / f"out-{run.__code__.co_firstlineno}"
            run(out)
            wanted = (out / "failures.jsonl").read_text()
            (out / "failures.jsonl").write_bytes(damage)
            run(out)
            assert (out / "failures.jsonl").read_text() == wanted

    @pytest.mark.skipif(sys.platform != "linux", reason="names of any characters")
    def test_a_resumed_run_keeps_listing_them(self, model, images, tmp_path):
        for name in self.ODD:
            (images / name).write_bytes(b"no image")
        extract(model, images, tmp_path / "out", size=32)
        extract(model, images / "0", tmp_path / "out", size=32)
        listed = read_failures(tmp_path / "out" / "failures.jsonl")
        assert {name.rpartition("/")[2] for name in listed} == set(self.ODD)

    @pytest.mark.skipif(sys.platform != "linux", reason="names of any characters")
    def test_pack_has_one_line_for_each(self, images, tmp_path):
        for name in self.ODD:
            (images / name).write_bytes(b"no image")
        pack(images, tmp_path / "out", workers=0)
        lines = (tmp_path / "out" / "failures.txt").read_text().split("\n")[:-1]
        assert len(lines) == len(self.ODD) and all(line.count("\t") == 1 for line in lines)

    def test_one_line(self):
        assert one_line("a\nb\tc\u2028d\x1b[0m é") == r"a\nb\tc\u2028d\x1b[0m é"


class TestFullDisk:
    """Simulated: writing to some files fails as on a full disk."""

    @pytest.fixture
    def full(self, monkeypatch):
        def fill(is_full):
            import io

            write = io.open

            def refuse(path, mode="r", *rest, **options):
                if "w" in mode and is_full(str(path)):
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write(path, mode, *rest, **options)

            monkeypatch.setattr("builtins.open", refuse)

        return fill

    def test_features_name_the_file_that_did_not_fit(self, model, images, tmp_path, full):
        full(lambda path: "7.png.npz" in path)
        with pytest.raises(OutputError, match=r"7\.png\.npz.*space"):
            extract(model, images, tmp_path / "out", size=32)

    def test_embed_names_the_shard_that_did_not_fit(self, embed, images, tmp_path, monkeypatch):
        def refuse(self):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(parquet.ShardWriter, "_open_file", refuse)
        with pytest.raises(OutputError, match=r"part-000000\.parquet.*space"):
            embed(images, tmp_path / "out")

    def test_pack_names_the_shard_that_did_not_fit(self, images, tmp_path, monkeypatch):
        def refuse(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(packing._ShardWriter, "_write", refuse)
        with pytest.raises(OutputError, match=r"shard-000000\.tar.*space"):
            pack(images, tmp_path / "out", workers=0)


class TestHugePixels:
    @pytest.mark.parametrize("value", [1e30, -1e30, 1e19])
    def test_finite_pixels_that_become_nan_are_refused(self, model, value):
        pixels = torch.zeros(2, 3, 32, 32)
        pixels[1, 0, 3, 3] = value
        with pytest.raises(veca.errors.InputError, match=r"\[1\]"):
            model(pixels)
