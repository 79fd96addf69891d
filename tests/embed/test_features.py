"""Features on disk: the right numbers, whole files only, resuming, refusing, skipping."""

from __future__ import annotations

import json
import os
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import veca
from veca import VecaConfig
from veca.embed.features import _Image
from veca.embed.pipeline import batch_by_shape, read_ahead
from veca.embed.writers.files import NamedImage, write_features
from veca.errors import ImageError, InputError, OutputError, SourceError
from veca.features import extract, read_features
from veca.images import find_images
from veca.precision import in_precision

SMALL = VecaConfig(depth=2, width=64, heads=2, num_cores=8)
FORMATS = ("npz", "safetensors")


@pytest.fixture
def model():
    return veca.create_model(SMALL).eval()


@pytest.fixture
def photos(tmp_path):
    """Two sizes, and names that collide without their folder or suffix."""
    for name, size in {
        "x.jpg": (40, 32), "x.png": (32, 32), "a/x.jpg": (40, 32), "b/x.jpg": (32, 32),
        "b/c/y.webp": (40, 32),
    }.items():  # fmt: skip
        save_image(tmp_path / "photos" / name, size)
    return tmp_path / "photos"


def save_image(path: Path, size: tuple[int, int] = (32, 32)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = sum(map(ord, str(path)))
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def files_in(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def listed(folder: Path) -> list[str]:
    """The images in the list of failures."""
    path = folder / "failures.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["path"] for line in lines]


@pytest.fixture
def two_threads(monkeypatch):
    """A machine on which torch uses two threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Spy:
    """Counts the images a model sees, and their batches; may fail at the n-th batch."""

    def __init__(self, model, fail_at: int | None = None, error: BaseException | None = None):
        self.batches: list[tuple[int, ...]] = []
        original = model.walk

        def walk(images, *options, **more):
            self.batches.append(tuple(images.shape))
            if len(self.batches) == fail_at:
                raise error
            return original(images, *options, **more)

        model.walk = walk

    @property
    def images(self) -> int:
        return sum(shape[0] for shape in self.batches)


class TestContent:
    @pytest.mark.parametrize("format", FORMATS)
    def test_numbers_are_the_models(self, model, photos, tmp_path, format):
        out = tmp_path / "out"
        extract(model, photos, out, cores=3, size=64, format=format, dtype="float32")
        for name, size in (("a/x.jpg", (32, 40)), ("b/x.jpg", (32, 32))):
            batch = veca.preprocess(photos / name, 64)
            with torch.inference_mode():
                expected = model(batch.pixels, cores=3)
            got = read_features(out / f"{name}.{format}")
            h, w = expected.grid
            assert got["patches"].shape == (h, w, 64)
            np.testing.assert_allclose(got["cls"], expected.cls[0], atol=1e-5)
            np.testing.assert_allclose(
                got["patches"].reshape(h * w, 64), expected.patches[0], atol=1e-5
            )
            assert got["grid"].tolist() == [h, w]
            assert got["cores"] == 3
            assert got["original_size"].tolist() == list(size)
            assert got["input_size"].tolist() == [16 * h, 16 * w]
            assert got["valid_size"].tolist() == [16 * h, 16 * w]
            assert got["image"] == name

    def test_every_image_has_a_file_of_its_own(self, model, photos, tmp_path):
        summary = extract(model, photos, tmp_path / "out", size=32)
        names = ["a/x.jpg", "b/c/y.webp", "b/x.jpg", "x.jpg", "x.png"]
        assert files_in(tmp_path / "out") == sorted(
            [f"{name}.npz" for name in names] + ["features.json"]
        )
        assert (summary.images, summary.computed, summary.reused, summary.failed) == (5, 5, 0, ())
        assert summary.images_per_second > 0

    def test_one_image_named_twice_is_one_image(self, model, photos, tmp_path):
        sources = [photos / "x.jpg", photos / "a" / ".." / "x.jpg", str(photos / "x.j*")]
        assert extract(model, sources, tmp_path / "out", size=32).images == 1

    @pytest.mark.parametrize("what", ["cls", "patches"])
    def test_only_what_was_asked_for(self, model, photos, tmp_path, what):
        extract(model, photos / "x.jpg", tmp_path, size=32, what=[what])
        got = read_features(tmp_path / "x.jpg.npz")
        assert {"cls", "patches"} & set(got) == {what}
        assert got[what].dtype == np.float16

    def test_padding_is_told(self, model, photos, tmp_path):
        extract(model, photos / "x.jpg", tmp_path, size=None, fit="pad")
        got = read_features(tmp_path / "x.jpg.npz")
        assert got["valid_size"].tolist() == [32, 40]
        assert got["input_size"].tolist() == [32, 48]
        assert got["crop_box"].tolist() == [0, 0, 40, 32]

    def test_features_too_large_for_float16_are_refused(self, model, photos, tmp_path):
        with torch.no_grad():
            model.norm.weight.fill_(1e6)
        with pytest.raises(InputError, match=r"float16.*float32"):
            extract(model, photos, tmp_path / "out", size=32)
        assert not (tmp_path / "out").exists()
        extract(model, photos, tmp_path / "out", size=32, dtype="float32")

    @pytest.mark.parametrize("size", [np.int64(32), (np.int32(32), 48), [32, 48]])
    def test_sizes_of_any_kind_of_whole_number(self, model, photos, tmp_path, size):
        extract(model, photos / "x.png", tmp_path / "out", size=size)
        plain = [32, 48] if isinstance(size, (tuple, list)) else 32
        assert json.loads((tmp_path / "out" / "features.json").read_text())["size"] == plain

    def test_a_wrapped_model_is_refused(self, model, photos, tmp_path):
        wrapped = torch.nn.DataParallel(model)
        with pytest.raises(InputError, match="DataParallel"):
            extract(wrapped, photos, tmp_path / "out", size=32)

    def test_the_models_mode_is_put_back(self, model, photos, tmp_path):
        model.train()
        extract(model, photos, tmp_path / "out", size=32)
        assert model.training


class TestBatches:
    def test_images_of_one_size_go_together(self, model, photos, tmp_path):
        spy = Spy(model)
        calls = []
        extract(
            model, photos, tmp_path / "out", size=None, batch_size=2, what=["cls"],
            progress=lambda *counts: calls.append(counts),
        )  # fmt: skip
        assert sorted(spy.batches) == [(1, 3, 32, 48), (2, 3, 32, 32), (2, 3, 32, 48)]
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        assert calls[-1] == (5, 5)

    def test_batches_are_computed_side_by_side(self, model, photos, tmp_path, two_threads):
        meeting, threads, forward = threading.Barrier(2, timeout=20), [], model.forward

        def meet(images, cores=None):
            threads.append(torch.get_num_threads())
            if len(threads) <= 2:
                meeting.wait()  # for another batch that is computed right now
            return forward(images, cores=cores)

        model.forward = meet
        summary = extract(model, photos, tmp_path / "out", size=32, batch_size=1)
        assert summary.computed == 5 and threads == [1] * 5
        assert torch.get_num_threads() == 2

    def test_what_is_computed_before_an_error_is_kept(self, model, photos, tmp_path, two_threads):
        (photos / "zz-bad.jpg").write_bytes(b"not an image")
        with pytest.raises(ImageError, match=r"zz-bad\.jpg"):
            extract(model, photos, tmp_path / "out", size=32, batch_size=1, on_error="raise")
        assert len(list((tmp_path / "out").rglob("*.npz"))) == 5

    def test_autocast_of_the_caller_holds(self, model, photos, tmp_path, two_threads):
        seen, forward = [], model.forward

        def note(images, cores=None):
            seen.append(torch.is_autocast_enabled("cpu"))
            return forward(images, cores=cores)

        model.forward = note
        for out, enabled in (("plain", False), ("half", True)):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                extract(model, photos, tmp_path / out, size=32, batch_size=1)
        assert seen == [False] * 5 + [True] * 5

    def test_a_lost_record_of_the_settings_comes_back(self, model, photos, tmp_path):
        extract(model, photos, tmp_path / "out", size=32)
        (tmp_path / "out" / "features.json").unlink()
        assert extract(model, photos, tmp_path / "out", size=32).reused == 5
        assert (tmp_path / "out" / "features.json").is_file()
        with pytest.raises(InputError):
            extract(model, photos, tmp_path / "out", size=48)

    def test_threads_change_no_number(self, model, photos, tmp_path, two_threads):
        for out, threads in (("one", 1), ("two", 2)):
            torch.set_num_threads(threads)
            extract(model, photos, tmp_path / out, size=32, batch_size=2)
        for name in files_in(tmp_path / "one"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()

    def test_a_batch_alone_has_all_threads(self, model, photos, tmp_path, two_threads):
        threads, forward = [], model.forward

        def count(images, cores=None):
            threads.append(torch.get_num_threads())
            return forward(images, cores=cores)

        model.forward = count
        extract(model, photos / "x.jpg", tmp_path / "out", size=32)
        assert threads == [2]

    def test_gathering_gives_every_image_once_and_holds_few(self):
        taken = 0

        def images():
            nonlocal taken
            for i in range(200):
                taken += 1
                side = 16 * (1 + i % 25)
                pixels = np.zeros((side, 16, 3), dtype=np.uint8)
                yield _Image(NamedImage(i, Path(), str(i)), veca.preprocess(pixels, size=None))

        given: list[int] = []
        for batch in batch_by_shape(images(), 4):
            assert 1 <= len(batch) <= 4
            assert len({one.image.pixels.shape for one in batch}) == 1
            given += [one.item.place for one in batch]
            assert taken - len(given) <= 16
        assert sorted(given) == list(range(200))

    def test_reading_ahead_keeps_the_order_and_a_bound(self):
        started, release = [], threading.Event()

        def read(place: int) -> str:
            started.append(place)
            release.wait(5)
            return str(place)

        reading = read_ahead(read, range(30), workers=3, ahead=5)
        release.set()
        for taken, result in enumerate(reading, start=1):
            assert result == str(taken - 1)
            assert len(started) <= taken + 5
        assert taken == 30

    def test_an_error_waits_for_its_turn(self):
        def read(place: int) -> int:
            return 1 // (5 - place)

        reading = read_ahead(read, range(10), workers=2, ahead=8)
        assert [next(reading) for _ in range(5)] == [0, 0, 0, 0, 1]
        with pytest.raises(ZeroDivisionError):
            next(reading)

    def test_closing_stops_reading(self):
        started = []
        reading = read_ahead(started.append, range(100), workers=2, ahead=4)
        next(reading)
        reading.close()
        assert len(started) <= 5

    def test_out_of_memory_says_what_to_do(self, model, photos, tmp_path):
        Spy(model, fail_at=1, error=RuntimeError("DefaultCPUAllocator: can't allocate memory"))
        with pytest.raises(InputError, match=r"32 x 48.*batch"):
            extract(model, [photos / "x.jpg", photos / "a"], tmp_path / "o", size=None)


class TestResuming:
    def test_nothing_is_done_twice(self, model, photos, tmp_path):
        out = tmp_path / "out"
        extract(model, photos, out, size=32)
        before = {name: (out / name).stat().st_mtime_ns for name in files_in(out)}
        spy = Spy(model)
        summary = extract(model, photos, out, size=32)
        assert (summary.computed, summary.reused, spy.images) == (0, 5, 0)
        assert {name: (out / name).stat().st_mtime_ns for name in files_in(out)} == before

    @pytest.mark.parametrize("format", FORMATS)
    def test_missing_stale_and_damaged_files_are_made_again(self, model, photos, tmp_path, format):
        out = tmp_path / "out"
        extract(model, photos, out, size=32, format=format)
        whole = {name: read_features(out / name) for name in files_in(out) if format in name}
        (out / f"x.png.{format}").unlink()
        damaged = out / f"x.jpg.{format}"
        damaged.write_bytes(damaged.read_bytes()[:100])
        np.savez(out / "foreign.npz", x=1)
        later = (out / f"a/x.jpg.{format}").stat().st_mtime_ns + 10**9
        os.utime(photos / "a" / "x.jpg", ns=(later, later))
        spy = Spy(model)
        summary = extract(model, photos, out, size=32, format=format)
        assert (summary.computed, summary.reused, spy.images) == (3, 2, 3)
        for name, content in whole.items():
            np.testing.assert_allclose(read_features(out / name)["cls"], content["cls"], atol=2e-3)

    @pytest.mark.parametrize("format", FORMATS)
    def test_an_image_replaced_by_an_older_one_is_done_again(self, model, photos, tmp_path, format):
        out = tmp_path / "out"
        extract(model, photos, out, size=32, format=format)
        before = read_features(out / f"x.jpg.{format}")["cls"]
        state = (photos / "x.jpg").stat()
        stored = read_features(out / f"x.jpg.{format}")["image_stat"].tolist()
        assert stored == [state.st_size, state.st_mtime_ns]
        (photos / "x.jpg").write_bytes((photos / "b" / "x.jpg").read_bytes())
        os.utime(photos / "x.jpg", ns=(10**18, 10**18))
        summary = extract(model, photos, out, size=32, format=format)
        assert (summary.computed, summary.reused) == (1, 4)
        assert not np.array_equal(read_features(out / f"x.jpg.{format}")["cls"], before)

    @pytest.mark.parametrize("format", FORMATS)
    def test_a_file_of_an_earlier_version_is_kept_while_it_is_newer(
        self, model, photos, tmp_path, format
    ):
        out, image = tmp_path / "out", photos / "x.jpg"
        extract(model, image, out, size=32, format=format)
        content = read_features(out / f"x.jpg.{format}")
        text = {name: content.pop(name) for name in ("image", "settings")}
        del content["image_stat"]
        write_features(out / f"x.jpg.{format}", content, text)
        assert extract(model, image, out, size=32, format=format).reused == 1
        later = (out / f"x.jpg.{format}").stat().st_mtime_ns + 10**9
        os.utime(image, ns=(later, later))
        assert extract(model, image, out, size=32, format=format).computed == 1

    @pytest.mark.parametrize("format", FORMATS)
    def test_images_that_are_no_files_are_done_once(self, model, photos, tmp_path, format):
        class Records:
            """Images of a database, say."""

            def __len__(self):
                return 3

            def read(self, index):
                return (photos / "x.jpg").read_bytes() if index else b"not an image"

            def name(self, index):
                return f"record/{index}"

            def fingerprint(self):
                return "records"

        for counts in ((2, 0), (0, 2)):
            summary = extract(model, Records(), tmp_path / "out", size=32, format=format)
            assert (summary.computed, summary.reused, len(summary.failed)) == (*counts, 1)

    def test_a_removed_image_is_a_failure_though_its_features_are_there(
        self, model, photos, tmp_path
    ):
        extract(model, photos, tmp_path / "out", size=32)
        (photos / "x.jpg").unlink()
        sources = [photos / "x.jpg", photos / "x.png"]
        summary = extract(model, sources, tmp_path / "out", size=32)
        assert (summary.reused, len(summary.failed)) == (1, 1)

    def test_a_stopped_run_leaves_whole_files_and_goes_on(self, model, photos, tmp_path):
        extract(model, photos, tmp_path / "once", size=32, batch_size=1, dtype="float32")
        out = tmp_path / "out"
        stopped = veca.create_model(SMALL).eval()
        stopped.load_state_dict(model.state_dict())
        Spy(stopped, fail_at=4, error=KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            extract(stopped, photos, out, size=32, batch_size=1, dtype="float32")
        written = [name for name in files_in(out) if name.endswith(".npz")]
        assert len(written) == 3
        assert len(files_in(out)) == 4  # and features.json; no temporary file
        summary = extract(model, photos, out, size=32, batch_size=1, dtype="float32")
        assert (summary.computed, summary.reused) == (2, 3)
        assert files_in(out) == files_in(tmp_path / "once")
        for name in files_in(out)[1:]:
            if name.endswith(".npz"):
                one, two = read_features(out / name), read_features(tmp_path / "once" / name)
                np.testing.assert_array_equal(one["patches"], two["patches"])

    def test_a_write_that_fails_half_way_leaves_nothing(self, model, photos, tmp_path, monkeypatch):
        def half(file, **arrays):
            file.write(b"PK half a file")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(np, "savez", half)
        with pytest.raises(OutputError, match="No space left"):
            extract(model, photos, tmp_path / "out", size=32)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("change", "noun"),
        [
            ({"cores": 4}, "cores: 8"),
            ({"size": 48}, "size: 32.*48"),
            ({"size": (32, 32)}, r"size: 32.*\[32, 32\]"),
            ({"fit": "pad"}, 'fit: "resize"'),
            ({"what": ["cls"]}, "what: "),
            ({"dtype": "float32"}, "dtype: "),
            ({"format": "safetensors"}, "format: "),
            ({"root": "."}, "root: "),
        ],
    )
    def test_other_settings_are_refused(self, model, photos, tmp_path, change, noun):
        out = tmp_path / "out"
        extract(model, photos, out, size=32)
        before = {name: (out / name).read_bytes() for name in files_in(out)}
        with pytest.raises(InputError, match=noun):
            extract(model, photos, out, **{"size": 32, **change})
        assert {name: (out / name).read_bytes() for name in files_in(out)} == before

    def test_other_weights_are_refused(self, model, photos, tmp_path):
        extract(model, photos, tmp_path / "out", size=32)
        with torch.no_grad():
            model.bank.tokens[0, 0] += 1
        with pytest.raises(InputError, match="weights: "):
            extract(model, photos, tmp_path / "out", size=32)

    @pytest.mark.parametrize("of_0_1", [False, True])
    def test_another_precision_is_refused_by_its_name(self, model, photos, tmp_path, of_0_1):
        out, manifest = tmp_path / "out", tmp_path / "out" / "features.json"
        extract(model, photos, out, size=32)
        content = json.loads(manifest.read_text())
        assert content["precision"] == "float32"
        if of_0_1:
            del content["precision"]
            manifest.write_text(json.dumps(content))
        assert extract(model, photos, out, size=32).reused == 5
        said = r'\(precision: "float32" there, "bfloat16" now\)'
        with pytest.raises(InputError, match=said):
            extract(model.bfloat16(), photos, out, size=32)

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
    def test_a_stopped_run_of_a_precision_goes_on_to_equal_bytes(
        self, model, photos, tmp_path, precision
    ):
        out, ours = tmp_path / "out", in_precision(model, precision)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            extract(ours, photos, out, size=32, batch_size=2)
            whole = {path: path.read_bytes() for path in sorted(out.rglob("*.npz"))}
            for path in list(whole)[::2]:
                path.unlink()
            torch.set_num_threads(2)
            summary = extract(ours, photos, out, size=32, batch_size=1)
        finally:
            torch.set_num_threads(before)
        assert (summary.computed, summary.reused) == (3, 2)
        assert {path: path.read_bytes() for path in sorted(out.rglob("*.npz"))} == whole

    def test_a_folder_of_0_1_in_another_precision_goes_on(self, model, photos, tmp_path):
        out, manifest = tmp_path / "out", tmp_path / "out" / "features.json"
        extract(model.bfloat16(), photos, out, size=32)
        content = json.loads(manifest.read_text())
        del content["precision"]
        manifest.write_text(json.dumps(content))
        assert extract(model, photos, out, size=32).reused == 5

    def test_overwrite_starts_over_and_spares_what_is_not_ours(self, model, photos, tmp_path):
        out = tmp_path / "out"
        extract(model, photos, out, size=32)
        np.savez(out / "foreign.npz", x=1)
        (out / "note.txt").write_text("keep me")
        summary = extract(model, photos / "a", out, size=32, cores=4, overwrite=True)
        assert (summary.computed, summary.reused) == (1, 0)
        assert files_in(out) == ["features.json", "foreign.npz", "note.txt", "x.jpg.npz"]
        assert read_features(out / "x.jpg.npz")["cores"] == 4
        assert json.loads((out / "features.json").read_text())["cores"] == 4

    def test_names_keep_their_root_from_run_to_run(self, model, photos, tmp_path):
        out = tmp_path / "out"
        extract(model, photos, out, size=32)
        save_image(photos / "a" / "new.png")
        summary = extract(model, photos / "a", out, size=32)
        assert (summary.computed, summary.reused) == (1, 1)
        assert (out / "a" / "new.png.npz").exists()
        save_image(tmp_path / "elsewhere.png")
        with pytest.raises(InputError, match=r"elsewhere\.png"):
            extract(model, tmp_path / "elsewhere.png", out, size=32)

    def test_a_manifest_of_something_else_is_not_overwritten(self, model, photos, tmp_path):
        (tmp_path / "features.json").write_text('{"mine": 1}')
        with pytest.raises(OutputError, match=r"features\.json"):
            extract(model, photos, tmp_path, size=32, overwrite=True)
        assert (tmp_path / "features.json").read_text() == '{"mine": 1}'


class TestBadImages:
    def test_they_are_skipped_counted_and_named(self, model, photos, tmp_path):
        (photos / "bad.jpg").write_bytes(b"not an image")
        (photos / "a" / "cut.jpg").write_bytes((photos / "x.jpg").read_bytes()[:200])
        out = tmp_path / "out"
        summary = extract(model, photos, out, size=32)
        assert (summary.images, summary.computed) == (7, 5)
        names = {str(photos / "bad.jpg"), str(photos / "a" / "cut.jpg")}
        assert {name for name, _ in summary.failed} == names
        assert summary.failures_file == out / "failures.jsonl"
        lines = [json.loads(line) for line in (out / "failures.jsonl").read_text().splitlines()]
        assert {line["path"] for line in lines} == names and all(line["reason"] for line in lines)

        save_image(photos / "bad.jpg")
        save_image(photos / "a" / "cut.jpg")
        summary = extract(model, photos, out, size=32)
        assert (summary.computed, summary.reused, summary.failed) == (2, 5, ())
        assert not (out / "failures.jsonl").exists()

    def test_reasons_do_not_repeat_the_path(self, model, photos, tmp_path):
        (photos / "bad.jpg").write_bytes(b"not an image")
        path = str(photos / "bad.jpg")
        reasons = set()
        for name in (path, f"{photos}/a/../bad.jpg", f"{photos}/./bad.jpg", f"{photos}/a/../b*"):
            summary = extract(model, [photos / "x.jpg", name], tmp_path / "out", size=32)
            assert [failed for failed, _ in summary.failed] == [path]
            reasons.add(summary.failed[0][1])
        assert len(reasons) == 1 and "bad.jpg" not in reasons.pop()

    def test_the_list_is_about_all_runs(self, model, photos, tmp_path):
        out = tmp_path / "out"
        for name in ("a/bad.jpg", "a/worse.jpg", "b/bad.jpg"):
            (photos / name).write_bytes(b"not an image")
        extract(model, photos / "a", out, size=32, root=photos)
        assert listed(out) == [str(photos / "a" / name) for name in ("bad.jpg", "worse.jpg")]
        summary = extract(model, photos / "b", out, size=32)
        assert [name for name, _ in summary.failed] == [str(photos / "b/bad.jpg")]
        assert listed(out) == [
            str(photos / name) for name in ("a/bad.jpg", "a/worse.jpg", "b/bad.jpg")
        ]
        save_image(photos / "a/bad.jpg")
        (photos / "a/worse.jpg").unlink()
        extract(model, photos / "a", out, size=32)
        assert listed(out) == [str(photos / "b/bad.jpg")]
        save_image(photos / "b/bad.jpg")
        assert extract(model, photos, out, size=32).failures_file is None
        assert listed(out) == []

    @pytest.mark.parametrize("on_error", ["skip", "raise"])
    def test_the_list_is_true_after_a_stop(self, model, photos, tmp_path, on_error):
        def stop(done, total):
            if done == 2:
                raise KeyboardInterrupt

        out = tmp_path / "out"
        for name in ("b/bad.jpg", "c/bad.jpg"):
            save_image(photos / name)
            (photos / name).write_bytes(b"not an image")
        extract(model, [photos / "x.png", photos / "b"], out, size=32, root=photos)
        assert listed(out) == [str(photos / "b/bad.jpg")]
        (photos / "a/bad.jpg").write_bytes(b"not an image")
        with pytest.raises((KeyboardInterrupt, ImageError)):
            extract(model, photos, out, size=32, batch_size=1, progress=stop, on_error=on_error)
        assert sorted(listed(out)) == [str(photos / name) for name in ("a/bad.jpg", "b/bad.jpg")]
        extract(model, photos, out, size=32)
        assert len(listed(out)) == 3
        extract(model, photos / "x.png", out, size=32, overwrite=True)
        assert listed(out) == []

    def test_raise_stops_at_the_first(self, model, photos, tmp_path):
        (photos / "bad.jpg").write_bytes(b"not an image")
        with pytest.raises(ImageError, match=r"bad\.jpg"):
            extract(model, photos, tmp_path / "out", size=32, on_error="raise")
        assert not (tmp_path / "out").exists()
        extract(model, photos / "x.jpg", tmp_path / "out", size=32, root=photos)
        with pytest.raises(ImageError, match=r"bad\.jpg"):
            extract(model, photos, tmp_path / "out", size=32, on_error="raise")
        assert {"features.json", "x.jpg.npz"} <= set(files_in(tmp_path / "out"))

    def test_links_that_lead_nowhere_and_pipes(self, model, photos, tmp_path):
        (photos / "broken.jpg").symlink_to("nowhere")
        os.mkfifo(photos / "pipe.jpg")
        for sources in (photos, find_images(photos)):
            summary = extract(model, sources, tmp_path / "out", size=32)
            assert summary.computed + summary.reused == 5
            said = {Path(name).name: message for name, message in summary.failed}
            assert said.keys() == {"broken.jpg", "pipe.jpg"}
            assert "no such file" in said["broken.jpg"] and "a pipe" in said["pipe.jpg"]

    @pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
    @pytest.mark.parametrize("format", FORMATS)
    def test_names_that_are_no_text(self, model, tmp_path, format):
        folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/photos\xfe"))
        save_image(folder / "good.png")
        (folder / "good.png").rename(folder / os.fsdecode(b"good\xff.png"))
        (folder / os.fsdecode(b"bad\xff.png")).write_bytes(b"no image")
        for counts in ((1, 0), (0, 1)):
            summary = extract(model, folder, tmp_path / "out", size=32, format=format)
            assert (summary.computed, summary.reused) == counts
            assert summary.failed[0][0] == str(folder / os.fsdecode(b"bad\xff.png"))
            line = json.loads((tmp_path / "out" / "failures.jsonl").read_text("utf-8"))
            assert line["path"] == f"{tmp_path}/photos\\xfe/bad\\xff.png"
        got = read_features(tmp_path / "out" / os.fsdecode(b"good\xff.png." + format.encode()))
        assert os.fsencode(got["image"]) == b"good\xff.png"

    @pytest.mark.parametrize("folder", [".", "inner"])
    def test_names_as_long_as_they_can_be(self, model, tmp_path, folder):
        longest = os.pathconf(tmp_path, "PC_NAME_MAX")
        fits, too_long = (f"{'a' * (longest - 4 - n)}.jpg" for n in (4, 3))  # with .npz, or not
        for name in (fits, too_long):
            save_image(tmp_path / "photos" / folder / name)
        photos, out = tmp_path / "photos", tmp_path / "out"
        summary = extract(model, photos, out, size=32, root=photos)
        assert (summary.computed, len(summary.failed)) == (1, 1)
        assert (out / folder / f"{fits}.npz").exists()
        name, message = summary.failed[0]
        assert name.endswith(too_long) and "too long" in message

    def test_no_image_that_can_be_read_is_an_error(self, model, tmp_path):
        (tmp_path / "bad.jpg").write_bytes(b"")
        for out in (tmp_path / "out", tmp_path / "all.npz"):
            with pytest.raises(ImageError, match=r"failures\.jsonl"):
                extract(model, tmp_path / "bad.jpg", out, size=32)
        assert not (tmp_path / "all.npz").exists()


class TestSingleFile:
    @pytest.mark.parametrize("format", FORMATS)
    def test_all_images_in_order(self, model, photos, tmp_path, format):
        (photos / "bad.jpg").write_bytes(b"not an image")
        out = tmp_path / f"all.{format}"
        summary = extract(model, photos, out, size=(32, 48), batch_size=2, dtype="float32")
        got = read_features(out)
        paths = [path for path in find_images(photos) if path.name != "bad.jpg"]
        assert got["images"] == [path.relative_to(photos).as_posix() for path in paths]
        batch = veca.preprocess(paths, (32, 48))
        with torch.inference_mode():
            expected = model(batch.pixels)
        np.testing.assert_allclose(got["cls"], expected.cls, atol=1e-5)
        np.testing.assert_allclose(got["patches"].reshape(5, 6, 64), expected.patches, atol=1e-5)
        assert got["patches"].shape == (5, 2, 3, 64)
        assert got["original_size"].tolist() == [list(size) for size in batch.original_sizes]
        assert got["cores"] == 8
        assert (summary.computed, len(summary.failed)) == (5, 1)
        assert "bad.jpg" in (tmp_path / f"all.{format}.failures.jsonl").read_text()

    def test_order_is_kept_when_sizes_are_mixed(self, model, photos, tmp_path):
        out = tmp_path / "all.npz"
        extract(model, photos, out, size=None, batch_size=2, what=["cls"], dtype="float32")
        got = read_features(out)
        assert got["images"] == [p.relative_to(photos).as_posix() for p in find_images(photos)]
        for name, cls in zip(got["images"], got["cls"], strict=True):
            with torch.inference_mode():
                expected = model(veca.preprocess(photos / name, size=None).pixels).cls[0]
            np.testing.assert_allclose(cls, expected, atol=1e-5)

    def test_patches_of_several_grids_are_refused(self, model, photos, tmp_path):
        with pytest.raises(InputError, match="grids"):
            extract(model, photos, tmp_path / "all.npz", size=None)
        assert files_in(tmp_path) == [f"photos/{name}" for name in files_in(photos)]

    def test_an_existing_file_is_kept_unless_told(self, model, photos, tmp_path):
        out = tmp_path / "all.npz"
        out.write_text("precious")
        with pytest.raises(OutputError, match="--overwrite"):
            extract(model, photos, out, size=32, what=["cls"])
        assert out.read_text() == "precious"
        extract(model, photos, out, size=32, what=["cls"], overwrite=True)
        assert len(read_features(out)["images"]) == 5


@pytest.mark.parametrize(
    ("change", "error", "noun"),
    [
        ({"cores": 9}, InputError, "cores"),
        ({"what": []}, InputError, "both"),
        ({"what": ["patch"]}, InputError, "'patches'"),
        ({"dtype": "int8"}, InputError, "'int8'"),
        ({"fit": "stretch"}, InputError, "'stretch'"),
        ({"format": "hdf5"}, InputError, "'hdf5'"),
        ({"batch_size": 0}, InputError, "batch_size"),
        ({"workers": 0}, InputError, "workers"),
        ({"on_error": "ignore"}, InputError, "on_error"),
        ({"size": 8}, ImageError, "size=8"),
        ({"sources": "nowhere"}, SourceError, "nowhere"),
        ({"out": "all.npz", "format": "safetensors"}, InputError, r"all\.npz"),
        ({"out": ""}, OutputError, "empty"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    model, photos, tmp_path, monkeypatch, change, error, noun
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(error, match=noun):
        extract(model, **{"sources": photos, "out": "out", "size": 32, **change})
    assert files_in(tmp_path / "here") == []


def test_a_small_file_of_features_that_unpacks_to_gigabytes(tmp_path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("cls.npy", bytes(200 * 2**20))
    assert (tmp_path / "x.npz").stat().st_size < 2**20
    with pytest.raises(InputError, match="unpack"):
        read_features(tmp_path / "x.npz")
    np.savez_compressed(tmp_path / "y.npz", cls=np.zeros(10), settings="x")  # an honest one
    assert read_features(tmp_path / "y.npz")["settings"] == "x"
