"""Features come from one decode an image, for every backbone, budget and size."""

from __future__ import annotations

import dataclasses
import os
import shutil
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from probe import sets
from probe.test_backbone import teacher
from veca.errors import ImageError, OutputError
from veca.model import Veca
from veca.probe import ProbeError, TeacherBackbone
from veca.probe.cache import Entry
from veca.probe.datasets import open_dataset
from veca.probe.extract import CLS, DENSE, GLOBAL, PART_SIZE, ExtractionSummary, Want, _key, extract
from veca.probe.live import batch_features, global_features
from veca.probe.protocol import CropView, WindowView
from veca.probe.tasks.shared import square_wants
from veca.probe.views import FrameView, SquareView


@pytest.fixture
def dataset(tmp_path):
    return open_dataset("folder", sets.class_folders(tmp_path / "data"), "train")


@pytest.fixture
def stack():
    with ExitStack() as opened:
        yield opened


def square(size: int = 32) -> SquareView:
    return SquareView(CropView(size, 1.0, "bicubic"), 16)


def run(dataset, wants, cache, stack, indices=None, **options):
    summary = ExtractionSummary()
    found = extract(
        dataset,
        list(range(len(dataset))) if indices is None else indices,
        wants,
        settings=sets.protocol().extract,
        cache=cache,
        stack=stack,
        summary=summary,
        **options,
    )
    return found, summary


def counted(dataset, monkeypatch) -> list[int]:
    """The images that were decoded."""
    seen: list[int] = []
    image = dataset.image
    monkeypatch.setattr(dataset, "image", lambda i: (seen.append(i), image(i))[1])
    return seen


def test_equal_to_the_model_alone(dataset, tmp_path, stack):
    backbone = sets.backbone(4)
    (stored,), _ = run(dataset, [Want(backbone, square(), GLOBAL)], tmp_path / "c", stack)
    for i in (0, 5, len(dataset) - 1):
        pixels = square().show(dataset.image(i)).pixels[0][None].float() / 255
        out = backbone.features(pixels, (2, 2))
        torch.testing.assert_close(stored.matrix("cls")[i], out.cls[0])
        torch.testing.assert_close(stored.matrix("mean")[i], out.patches[0].mean(dim=0))
    both = stored.matrix("cls+mean")
    assert both.shape == (len(dataset), 64)
    assert torch.equal(both[:, :32], stored.matrix("cls"))
    assert stored.sizes().tolist() == [[40, 52]] * len(dataset)


def test_cls_alone_runs_no_patches(dataset, tmp_path, stack, monkeypatch):
    backbone = sets.backbone(4)
    both, alone = (Want(backbone, square(), kind) for kind in (GLOBAL, CLS))
    (wanted,), _ = run(dataset, [both], tmp_path / "c", stack)
    monkeypatch.setattr(Veca, "forward", None)
    (found,), summary = run(dataset, [alone], tmp_path / "c", stack)
    assert summary.reused == 0 and summary.computed > 0
    torch.testing.assert_close(found.matrix("cls"), wanted.matrix("cls"), atol=1e-5, rtol=1e-5)
    pixels = [square().show(dataset.image(i)).pixels[0] for i in range(2)]
    drawn = batch_features(alone, pixels, 16, 2)
    torch.testing.assert_close(
        global_features(drawn, "cls"), wanted.matrix("cls")[:2], atol=1e-5, rtol=1e-5
    )
    assert drawn.patches.shape[1] == 0


@pytest.mark.parametrize(("features", "kind"), [("cls", CLS), ("cls+mean", GLOBAL)])
def test_what_a_protocol_wants_is_what_is_computed(dataset, features, kind):
    rows = [(sets.backbone(4), 32)]
    setup = SimpleNamespace(sizes=[32], cell=16, rows=rows)
    assert [w.kind for w in square_wants(setup, CropView(32, 1.0, "bicubic"), features)] == [kind]


def test_one_decode_for_all_budgets_and_sizes(dataset, tmp_path, stack, monkeypatch):
    seen = counted(dataset, monkeypatch)
    wants = [
        Want(backbone, square(size), GLOBAL)
        for size in (32, 48)
        for backbone in sets.backbone().at([1, 2, 3, 4, 5, 6, 7, 8])
    ]
    found, summary = run(dataset, wants, tmp_path / "c", stack)
    assert sorted(seen) == list(range(len(dataset))) and summary.decoded == len(dataset)
    matrices = [stored.matrix("cls") for stored in found]
    for i in range(1, len(matrices)):
        assert not torch.equal(matrices[0], matrices[i])


def test_the_second_time_no_image_is_touched(dataset, tmp_path, stack, monkeypatch):
    wants = [Want(b, square(), GLOBAL) for b in sets.backbone().at([2, 8])]
    first, _ = run(dataset, wants, tmp_path / "c", stack)

    def refuse(i):
        raise AssertionError("an image was read")

    monkeypatch.setattr(dataset, "image", refuse)
    again = [Want(b, square(), GLOBAL) for b in sets.backbone().at([2, 8])]
    second, summary = run(dataset, again, tmp_path / "c", stack)
    assert summary.decoded == 0 and summary.computed == 0 and summary.reused == 2
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.matrix("cls+mean"), b.matrix("cls+mean"))


def test_only_what_is_new_is_computed(dataset, tmp_path, stack):
    rows = sets.backbone().at([2, 8])
    run(dataset, [Want(rows[0], square(), GLOBAL)], tmp_path / "c", stack)
    _, summary = run(dataset, [Want(b, square(), GLOBAL) for b in rows], tmp_path / "c", stack)
    assert (summary.computed, summary.reused) == (1, 1)


CHANGES = ["image", "bytes", "copy", "label", "subset", "view", "weights", "dtype"]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_numbers_changes_the_entry(dataset, tmp_path, stack, change):
    path = dataset.root / dataset.ids[0]
    path.write_bytes(path.read_bytes() + b"\0")  # behind the image, where readers do not look
    run(dataset, [Want(sets.backbone(), square(), GLOBAL)], tmp_path / "c", stack)
    backbone, view, indices = sets.backbone(), square(), None
    if change == "image":
        sets.photo(dataset.root / dataset.ids[0], np.zeros((30, 30, 3), dtype=np.uint8))
    if change == "bytes":  # another file of the same length, no newer than the first
        there = path.stat()
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
        os.utime(path, ns=(there.st_atime_ns, there.st_mtime_ns - 10**9))
    if change == "copy":  # perhaps a distorted one
        shutil.copytree(dataset.root, tmp_path / "copy")
    if change == "label":
        (dataset.root / dataset.ids[0]).rename(dataset.root / "train/red/new.png")
    if change == "subset":
        indices = list(range(len(dataset) - 1))
    if change == "view":
        view = SquareView(CropView(32, 0.9, "bicubic"), 16)
    if change == "weights":
        backbone = sets.backbone(seed=1)
    if change == "dtype":
        backbone.model.to(torch.float64)
    if change in ("image", "bytes", "copy", "label"):
        root = tmp_path / "copy" if change == "copy" else dataset.root
        dataset = open_dataset("folder", root, "train")
    _, summary = run(
        dataset, [Want(backbone, view, GLOBAL)], tmp_path / "c", stack, indices=indices
    )
    assert summary.computed == 1 and summary.reused == 0


def test_weights_that_were_trained_on_are_noticed(dataset, tmp_path, stack):
    rows = sets.backbone().at([2, 8])
    wants = [Want(row, square(), GLOBAL) for row in rows]
    first, _ = run(dataset, wants, tmp_path / "c", stack)
    before = [stored.matrix("cls") for stored in first]
    with torch.no_grad():
        rows[0].model.norm.weight += 0.5
    second, summary = run(dataset, wants, tmp_path / "c", stack)
    assert summary.computed == 2
    assert not torch.allclose(before[1], second[1].matrix("cls"))


def test_damage_is_computed_again_with_the_same_result(dataset, tmp_path, stack):
    wants = [Want(sets.backbone(), square(), GLOBAL)]
    (first,), _ = run(dataset, wants, tmp_path / "c", stack)
    expected = first.matrix("cls").clone()
    path = first.entry.path(0)
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)
    (second,), summary = run(dataset, wants, tmp_path / "c", stack)
    assert len(summary.damaged) == 1 and summary.decoded == len(dataset)
    assert torch.equal(second.matrix("cls"), expected)


def test_a_stopped_run_goes_on_where_it_stopped(dataset, tmp_path, stack, monkeypatch):
    monkeypatch.setitem(PART_SIZE, GLOBAL, 8)
    image = dataset.image

    def stop(i):
        if i == 20:
            raise KeyboardInterrupt
        return image(i)

    monkeypatch.setattr(dataset, "image", stop)
    wants = [Want(sets.backbone(), square(), GLOBAL)]
    with pytest.raises(KeyboardInterrupt):
        run(dataset, wants, tmp_path / "c", stack, workers=1)
    monkeypatch.setattr(dataset, "image", image)
    seen = counted(dataset, monkeypatch)
    _, summary = run(dataset, wants, tmp_path / "c", stack)
    assert summary.reused == 2 and sorted(seen) == list(range(16, 24))


def test_dense_features(tmp_path, stack):
    dataset = open_dataset("images-masks", sets.images_masks(tmp_path / "data"), "train")
    backbone = sets.backbone(4)
    view = FrameView(WindowView(48, 0, 0, "bicubic"), 16)
    (stored,), _ = run(dataset, [Want(backbone, view, DENSE)], tmp_path / "c", stack)
    for i in range(len(dataset)):
        shown = view.show(dataset.image(i))
        out = backbone.features(shown.pixels[0][None].float() / 255, _grid(shown.frame))
        sample = stored.dense(i)
        assert sample.size == shown.size and sample.frame == shown.frame
        assert sample.tiles == shown.tiles
        expected = out.patches[0].half().unflatten(0, out.grid)
        torch.testing.assert_close(sample.maps[0], expected, rtol=2e-3, atol=2e-3)
        assert sample.nbytes == 2 * expected.numel()


def test_dense_windows_and_flips(tmp_path, stack, monkeypatch):
    monkeypatch.setitem(PART_SIZE, DENSE, 2)
    dataset = open_dataset("images-masks", sets.images_masks(tmp_path / "data"), "train")
    view = FrameView(WindowView(48, 32, 16, "bicubic"), 16, None, True)
    backbone = TeacherBackbone(teacher(16))
    (stored,), summary = run(dataset, [Want(backbone, view, DENSE)], tmp_path / "c", stack)
    assert summary.uncached == ["cells16"]  # a callable: kept for this run only
    for i in (0, 3, len(dataset) - 1):
        shown = view.show(dataset.image(i))
        sample = stored.dense(i)
        assert sample.tiles == shown.tiles and len(sample.maps) == len(shown.tiles)
        for pixels, features in zip(shown.pixels, sample.maps, strict=True):
            colours = torch.nn.functional.avg_pool2d(pixels.float() / 255, 16)
            expected = colours.permute(1, 2, 0)
            torch.testing.assert_close(features.float(), expected, rtol=1e-3, atol=1e-3)


def test_features_too_large_for_half_precision(tmp_path, stack):
    dataset = open_dataset("images-masks", sets.images_masks(tmp_path / "data"), "train")
    huge = teacher(16)
    huge.fn.scale.data.fill_(1e6)
    view = FrameView(WindowView(48, 0, 0, "bicubic"), 16)
    with pytest.raises(ProbeError, match="dense_dtype"):
        run(dataset, [Want(TeacherBackbone(huge), view, DENSE)], tmp_path / "c", stack)


def test_a_broken_image_is_named(dataset, tmp_path, stack):
    (dataset.root / dataset.ids[3]).write_bytes(b"\x89PNG nothing")
    with pytest.raises(ImageError, match=r"blue/003\.png"):
        run(dataset, [Want(sets.backbone(), square(), GLOBAL)], tmp_path / "c", stack)


def test_no_images(dataset, tmp_path, stack):
    with pytest.raises(ProbeError, match="no images"):
        run(dataset, [], tmp_path / "c", stack, indices=[])


def test_progress_ends_at_the_total(dataset, tmp_path, stack):
    seen = []
    wants = [Want(sets.backbone(), square(), GLOBAL)]
    run(dataset, wants, tmp_path / "c", stack, progress=lambda d, t: seen.append((d, t)))
    assert seen[0] == (0, 24) and seen[-1] == (24, 24) and seen == sorted(seen)


def test_without_a_cache_nothing_stays(dataset, tmp_path):
    with ExitStack() as opened:
        (stored,), _ = run(dataset, [Want(sets.backbone(), square(), GLOBAL)], None, opened)
        folder = stored.entry.folder
        assert folder.exists() and stored.matrix("cls").shape == (24, 32)
    assert not folder.exists()


def _grid(frame):
    return frame[0] // 16, frame[1] // 16


def test_together_gives_what_alone_does(dataset, tmp_path, stack):
    """Pixels are shared by all backbones; none may change them for the others."""
    rows = [
        *sets.backbone().at([2, 8]),
        TeacherBackbone(teacher(16)),
        *sets.backbone(seed=1).at([4]),
    ]
    together, _ = run(dataset, [Want(b, square(), GLOBAL) for b in rows], tmp_path / "a", stack)
    for backbone, found in zip(rows, together, strict=True):
        (alone,), _ = run(dataset, [Want(backbone, square(), GLOBAL)], tmp_path / "b", stack)
        assert torch.equal(found.matrix("cls+mean"), alone.matrix("cls+mean"))


def test_a_part_that_cannot_be_written_stops_the_run(dataset, tmp_path, stack, monkeypatch):
    def full(self, part, arrays):
        raise OutputError("the disk is full")

    monkeypatch.setattr(Entry, "write", full)
    with pytest.raises(OutputError, match="the disk is full"):
        run(dataset, [Want(sets.backbone(), square(), GLOBAL)], tmp_path / "c", stack)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (GLOBAL, {"cell": 32}),
        (GLOBAL, {"dtype": "bfloat16"}),
        (DENSE, {"dense_dtype": "float32"}),
    ],
)
def test_settings_that_change_the_numbers_change_the_entry(tmp_path, kind, change):
    dataset = open_dataset("folder", sets.class_folders(tmp_path / "data"), "train")
    want, settings = Want(sets.backbone(), square(), kind), sets.protocol().extract
    other = dataclasses.replace(settings, **change)
    assert other != settings
    assert _key(dataset, [0], want, other) != _key(dataset, [0], want, settings)
