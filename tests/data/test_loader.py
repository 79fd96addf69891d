"""Batches: the same for any number of ranks, from memory or disk, and after any interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from data.pictures import encoded, make_folder, picture
from veca.data import (
    Augmentation,
    AugmentConfig,
    Batch,
    BatchPlan,
    DataError,
    InMemoryImages,
    Loader,
    TooManyBadError,
    hold_out,
    open_source,
    sample_keys,
)
from veca.data.faults import Faults
from veca.data.order import SampleOrder
from veca.data.reader import CropReader, ReadJob

JITTER = AugmentConfig("rrc")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", 22, 40, 40)


def loader(source: object, **options: object) -> Loader:
    settings = {"batch_size": 8, "size": 16, "workers": 0, **options}
    return Loader(source, **settings)


def same(a: Batch, b: Batch) -> None:
    assert torch.equal(a.indices, b.indices) and (a.epoch, a.step) == (b.epoch, b.step)
    assert torch.equal(a.pixels, b.pixels)
    assert (a.teacher_pixels is None) == (b.teacher_pixels is None)
    if a.teacher_pixels is not None:
        assert torch.equal(a.teacher_pixels, b.teacher_pixels)


# ------------------------------------------------------------------------------------------ order


def test_every_image_once_per_epoch(photos: Path) -> None:
    made = loader(photos, seed=4)
    seen = torch.cat([made.batch(step).indices for step in range(11)])  # 88 = 4 epochs of 22
    for epoch in range(4):
        part = seen[22 * epoch : 22 * (epoch + 1)].tolist()
        assert sorted(part) == list(range(22))
    assert made.position == 88 and made.step == 11 and made.epoch == 4
    assert [made.batch_indices(step).epochs[0] for step in (0, 2, 3, 5, 6)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("kind", ["paper", "rrc"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_out_the_batch_of_one_process(photos: Path, kind: str, world: int) -> None:
    options = {"augment": AugmentConfig(kind), "seed": 1, "teacher_size": 24}
    alone = loader(photos, **options)
    ranks = [loader(photos, rank=r, world_size=world, **options) for r in range(world)]
    for step in range(4):
        whole = alone.batch(step)
        parts = [rank.batch(step) for rank in ranks]
        assert all(len(part.indices) == 8 // world for part in parts)
        assert torch.equal(torch.cat([part.indices for part in parts]), whole.indices)
        for name in ("pixels", "teacher_pixels"):
            together = torch.cat([getattr(part, name) for part in parts])
            torch.testing.assert_close(together, getattr(whole, name), rtol=0, atol=1e-6)


def test_batch_indices_is_a_pure_function(photos: Path) -> None:
    used, fresh = loader(photos, seed=2), loader(photos, seed=2)
    for step in range(5):
        used.batch(step)
    for step in (7, 0, 3):
        wanted = fresh.batch_indices(step)
        assert used.batch_indices(step).indices.tolist() == wanted.indices.tolist()
        assert loader(photos, seed=2).batch(step).indices.tolist() == wanted.indices.tolist()
    assert fresh.step == 0


def test_views_are_those_of_the_augmentation(photos: Path) -> None:
    made = loader(photos, seed=3, augment=JITTER, teacher_size=(24, 24))
    batch = made.batch(1)
    memory = InMemoryImages.build(open_source(photos), size=40, workers=0)
    keys = sample_keys(3, 0, batch.indices.numpy())
    views = Augmentation(JITTER)(memory.images[batch.indices], keys, 16, 24)
    assert torch.equal(views.student, batch.pixels)
    assert torch.equal(views.teacher, batch.teacher_pixels)


@pytest.mark.parametrize("kind", ["paper", "rrc", "none"])
def test_memory_and_disk_give_the_same_pixels(photos: Path, kind: str) -> None:
    source = open_source(photos)
    memory = InMemoryImages.build(source, size=40, workers=0)
    options = {"augment": AugmentConfig(kind), "seed": 5, "teacher_size": 32}
    disk, quick = loader(source, **options), loader(memory, **options)
    for step in range(4):
        same(disk.batch(step), quick.batch(step))


def test_a_teacher_of_the_same_size_gets_no_pixels_of_its_own(photos: Path) -> None:
    assert loader(photos, teacher_size=16).batch().teacher_pixels is None
    assert loader(photos).batch().teacher_pixels is None
    assert loader(photos).batch(size=(16, 32), teacher_size=(32, 64)).pixels.shape[2:] == (16, 32)


# ----------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_in_mid_epoch_is_exact(photos: Path, world: int) -> None:
    made = loader(photos, seed=6, augment=JITTER)
    before = [made.batch(step) for step in range(2)]
    state = json.loads(json.dumps(made.state_dict()))
    after = [made.batch(step) for step in range(2, 5)]
    assert before[0].epoch == before[1].epoch == after[0].epoch == 0
    ranks = [loader(photos, seed=6, augment=JITTER, rank=r, world_size=world) for r in range(world)]
    for rank in ranks:
        rank.load_state_dict(state)
        assert rank.step == 2 and rank.position == 16
    for step, wanted in enumerate(after, start=2):
        parts = [rank.batch(step) for rank in ranks]
        assert torch.equal(torch.cat([p.indices for p in parts]), wanted.indices)
        pixels = torch.cat([p.pixels for p in parts])
        torch.testing.assert_close(pixels, wanted.pixels, rtol=0, atol=1e-6)


def test_batches_of_varying_size_resume_by_sample(photos: Path) -> None:
    plan = [(16, 8), (24, 4), (16, 10), (32, 2), (24, 6), (16, 8)]
    made = loader(photos, seed=7)
    all_batches = [
        made.batch(step, size=size, batch_size=count) for step, (size, count) in enumerate(plan)
    ]
    seen = torch.cat([batch.indices for batch in all_batches])
    assert sorted(seen[:22].tolist()) == list(range(22)) and len(seen) == 38
    again = loader(photos, seed=7)
    for step, (size, count) in enumerate(plan):
        fresh = loader(photos, seed=7)
        fresh.load_state_dict(again.state_dict())
        same(fresh.batch(step, size=size, batch_size=count), all_batches[step])
        same(again.batch(step, size=size, batch_size=count), all_batches[step])
        same(again.batch(step, size=size, batch_size=count), all_batches[step])  # asked twice
    with pytest.raises(DataError, match="step 2"):
        made.batch(2)


def test_a_plan_makes_every_step_reachable(photos: Path) -> None:
    def plan(step: int) -> BatchPlan:
        return BatchPlan(size=16 + 8 * (step % 2), batch_size=4 + 2 * (step % 3))

    made = loader(photos, seed=8, plan=plan)
    batches = [batch for batch, _ in zip(made, range(7), strict=False)]
    assert [len(b.indices) for b in batches] == [4, 6, 8, 4, 6, 8, 4]
    assert [b.pixels.shape[-1] for b in batches] == [16, 24, 16, 24, 16, 24, 16]
    other = loader(photos, seed=8, plan=plan)
    for step in (5, 2, 6):
        same(other.batch(step), batches[step])


@pytest.mark.parametrize("change", ["seed", "samples", "files"])
def test_the_state_of_other_data_is_refused(photos: Path, tmp_path: Path, change: str) -> None:
    state = loader(photos, seed=1).state_dict()
    if change == "seed":
        other = loader(photos, seed=2)
    elif change == "samples":
        other = loader(photos, seed=1, subset=range(5))
    else:
        (photos / "0" / "000.png").write_bytes(encoded(picture(99)))
        other = loader(photos, seed=1)
    with pytest.raises(DataError, match={"files": "fingerprint"}.get(change, change)):
        other.load_state_dict(state)
    other.load_state_dict({**state, "step": 3, "position": 24}, strict=False)
    assert other.step == 3
    with pytest.raises(DataError, match="state_dict"):
        other.load_state_dict({"step": 1})


# ---------------------------------------------------------------------------------------- workers


def test_workers_change_nothing(photos: Path) -> None:
    def plan(step: int) -> BatchPlan:
        return BatchPlan(size=16 + 8 * (step % 2), teacher_size=32, batch_size=6 + 2 * (step % 2))

    alone = loader(photos, seed=9, plan=plan, augment=JITTER)
    helped = loader(photos, seed=9, plan=plan, augment=JITTER, workers=2)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for step in range(6):
        same(alone.batch(step), helped.batch(step))
    same(alone.batch(2), helped.batch(2))  # back: what was read ahead is dropped
    same(alone.batch(3), helped.batch(3))
    # Not as planned, and then on as planned:
    same(alone.batch(4, size=32, batch_size=4), helped.batch(4, size=32, batch_size=4))
    same(alone.batch(5), helped.batch(5))
    assert torch.equal(torch.get_rng_state(), state)  # the run's own random state stays
    assert helped.waited_s > 0 and 0 < helped.waited_share <= 1
    helped.close()
    same(alone.batch(6), helped.batch(6))
    helped.close()


FORGOTTEN = """
import sys
from veca.data import Loader

made = Loader(sys.argv[1], batch_size=8, size=16, workers=2)
made.batch(0)
print("ready", flush=True)
while sys.argv[2] == "interrupted":
    made.batch(1)
if sys.argv[2] == "failed":
    raise ValueError("a mistake of the user's")
"""


@pytest.mark.parametrize(
    ("how", "status"), [("over", 0), ("failed", 1), ("interrupted", -signal.SIGINT)]
)
def test_a_process_ends_though_its_loader_was_not_closed(photos: Path, how: str, status) -> None:
    words = [sys.executable, "-c", FORGOTTEN, str(photos), how]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # nohup does not
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, preexec_fn=heed) as process:
        assert process.stdout.readline() == b"ready\n"
        if how == "interrupted":
            process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=60) == status
        finally:
            process.kill()


def test_workers_report_bad_images_and_broken_shards(tmp_path: Path, photos: Path) -> None:
    (photos / "1" / "010.png").write_bytes(b"broken")
    told: list[str] = []
    made = loader(photos, workers=1, on_bad=lambda name, reason: told.append(name))
    alone = loader(photos, on_bad=lambda name, reason: None)
    for step in range(3):
        same(made.batch(step), alone.batch(step))
    assert told == [str(photos / "1" / "010.png")]
    made.close()
    from data.test_shards import write_tar

    shard = write_tar(tmp_path / "s.tar", {f"{i}.png": encoded(picture(i)) for i in range(4)})
    broken = loader(shard, workers=1, batch_size=4)
    with shard.open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(DataError, match=r"s\.tar") as caught:
        broken.batch()
    assert "Traceback" not in str(caught.value)
    broken.close()


# ------------------------------------------------------------------------------------- bad images


def test_a_bad_image_is_replaced_alike_everywhere(photos: Path, caplog) -> None:
    bad = photos / "1" / "010.png"
    place = [Path(open_source(photos).name(i)) for i in range(22)].index(bad)
    clean = loader(photos, augment=JITTER)
    bad.write_bytes(b"broken")
    made = loader(photos, augment=JITTER)
    ranks = [loader(photos, augment=JITTER, rank=r, world_size=2) for r in range(2)]
    with caplog.at_level("WARNING", "veca.data"):
        for step in range(6):
            batch, wanted = made.batch(step), clean.batch_indices(step)
            assert batch.indices.tolist() == wanted.indices.tolist()
            halves = [rank.batch(step).pixels for rank in ranks]
            torch.testing.assert_close(torch.cat(halves), batch.pixels, rtol=0, atol=1e-6)
    assert made.bad == [(str(bad), made.bad[0][1])] and "not an image" in made.bad[0][1]
    assert place in [i for step in range(6) for i in made.batch_indices(step).indices]
    named = [record for record in caplog.records if str(bad) in record.getMessage()]
    assert 1 <= len(named) <= 3  # once for each loader that met it, not at every epoch


def test_too_many_bad_images_stop_with_the_list(tmp_path: Path) -> None:
    photos = make_folder(tmp_path / "photos", 120, 8, 8)
    broken = sorted(photos.rglob("*.png"))[5:120:30]
    for path in broken:
        path.write_bytes(b"broken")
    made = loader(photos, batch_size=20)
    with pytest.raises(TooManyBadError, match=r"0\.01") as caught:
        for _ in range(12):
            made.batch()
    assert {name for name, _ in caught.value.bad} <= {str(path) for path in broken}
    assert all(name in str(caught.value) for name, _ in caught.value.bad)
    patient = loader(photos, batch_size=20, bad_limit=0.05)
    for _ in range(12):
        patient.batch()
    assert {name for name, _ in patient.bad} == {str(path) for path in broken}


def test_nothing_readable_at_all_stops_at_once(photos: Path) -> None:
    made = loader(photos)
    for path in photos.rglob("*.png"):
        path.unlink()
    with pytest.raises(DataError, match="11 images"):
        made.batch()


def test_the_limit_allows_for_chance() -> None:
    faults = Faults(1_000_000, on_bad=lambda *bad: None)
    faults.note(99, [(f"{i}", "x") for i in range(3)])
    faults.note(1, [("one more", "x")])  # 4 of 100: three deviations above 1 %, not more
    with pytest.raises(TooManyBadError, match="6 of 101"):
        faults.note(1, [("a", "x"), ("b", "x")])
    few = Faults(1000, on_bad=lambda *bad: None)
    few.note(900, [(f"{i}", "x") for i in range(10)])
    few.note(100, [("3", "again")])  # known already: 1 % exactly
    with pytest.raises(TooManyBadError, match="11 of 1000"):
        few.note(1, [("eleventh", "x")])
    single = Faults(20, on_bad=lambda *bad: None)
    single.note(20, [("one", "x")])
    single.finish()
    assert single.bad == [("one", "x")]


# ------------------------------------------------------------------------------ subsets and sweeps


def test_subsets_keep_places_and_views(photos: Path) -> None:
    train, held = hold_out(22, 6)
    memory = InMemoryImages.build(open_source(photos), size=40, workers=0)
    for source in (photos, memory):
        made = loader(source, subset=held, batch_size=6)
        assert made.samples == 6
        batch = made.batch(0)
        assert sorted(batch.indices.tolist()) == held
        keys = sample_keys(0, 0, batch.indices.numpy())
        views = Augmentation()(memory.images[batch.indices], keys, 16)
        assert torch.equal(views.student, batch.pixels)
    assert set(loader(photos, subset=train).batch_indices(0).indices.tolist()) <= set(train)


def test_memory_with_gaps_keeps_the_sources_places(photos: Path) -> None:
    (photos / "0" / "000.png").write_bytes(b"broken")
    source = open_source(photos)
    memory = InMemoryImages.build(source, size=40, workers=0, on_bad=lambda *bad: None)
    batch = loader(memory, augment=AugmentConfig("none"), batch_size=21).batch()
    assert sorted(batch.indices.tolist()) == list(range(1, 22))
    for row in (0, 20):
        place = int(batch.indices[row])
        (alone,) = loader(
            source, augment=AugmentConfig("none"), subset=[place], batch_size=1
        ).sweep()
        assert torch.equal(alone.pixels[0], batch.pixels[row])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sweep_visits_everything_once(photos: Path, workers: int) -> None:
    options = {"augment": AugmentConfig("none"), "shuffle": False}
    made = loader(photos, workers=workers, **options)
    made.batch()
    batches = list(made.sweep(size=24))
    assert [len(b.indices) for b in batches] == [8, 8, 6]
    assert torch.cat([b.indices for b in batches]).tolist() == list(range(22))
    assert batches[0].pixels.shape == (8, 3, 24, 24)
    assert made.step == 1 and made.batch().indices.tolist() == list(range(8, 16))
    made.close()
    parts = []
    for rank in range(4):
        rows = [
            b.indices.tolist() for b in loader(photos, rank=rank, world_size=4, **options).sweep()
        ]
        parts += [i for row in rows for i in row]
    assert sorted(parts) == list(range(22))


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"batch_size": 7, "world_size": 2}, "batch of 7"),
        ({"batch_size": 0}, "batch of 0"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"size": 0}, r"\bsize\b"),
        ({"prefetch": 0}, "prefetch"),
        ({"subset": []}, "subset"),
        ({"subset": [22]}, r"subset.*22\.\.22"),
        ({"bad_limit": -1}, "share"),
    ],
)
def test_bad_settings_are_refused(photos: Path, options: dict, noun: str) -> None:
    with pytest.raises(DataError, match=noun):
        loader(photos, **options)


def test_bad_requests_are_refused(photos: Path) -> None:
    made = loader(photos, world_size=2)
    with pytest.raises(DataError, match="batch of 5"):
        made.batch(batch_size=5)
    with pytest.raises(DataError, match="steps"):
        made.batch(-1)
    assert made.step == 0


class Listed:
    """Encoded images in a list; notes which are read."""

    def __init__(self, images: list[bytes]) -> None:
        self.images, self.seen = images, []

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> bytes:
        self.seen.append(index)
        return self.images[index]

    def name(self, index: int) -> str:
        return f"{index}.png"

    def fingerprint(self) -> str:
        return "listed"


def job(indices: list[int], size: int = 32, teacher: int | None = None) -> ReadJob:
    rows = np.array(indices)
    shown = None if teacher is None else (teacher, teacher)
    return ReadJob(0, rows, sample_keys(0, 0, np.arange(len(rows))), (size, size), shown)


def test_what_stands_in_for_a_bad_image_is_in_the_subset() -> None:
    """Else a run would train on images that it holds out."""
    source = Listed([b"no image", *(encoded(picture(i)) for i in range(1, 12))])
    reader = CropReader(source, Augmentation(AugmentConfig("none")), np.array([0, 9, 11]))
    assert reader[job([0] * 20)].error is None
    assert set(source.seen) == {0, 9, 11}


def test_another_image_stands_in_at_each_try() -> None:
    source = Listed([encoded(picture(i)) if i < 6 else b"no image" for i in range(18)])
    piece = CropReader(source, Augmentation(AugmentConfig("none")))[job([17] * 10)]
    assert piece.error is None and len({name for name, _ in piece.bad}) > 3


def test_the_teachers_view_is_decoded_as_finely_as_it_needs() -> None:
    source = Listed([encoded(picture(0, 1024, 1024), "JPEG", quality=95)])
    reader = CropReader(source, Augmentation(AugmentConfig("none")))
    both, alone = reader[job([0], 32, 512)], reader[job([0], 512)]
    assert both.teacher is not None and np.array_equal(both.teacher, alone.student)


def test_the_choice_of_images_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    photos = make_folder(tmp_path / "photos", 6)
    one, other, every = (
        Loader(photos, batch_size=2, size=32, workers=0, subset=subset)
        for subset in ([0, 1, 2], [0, 1, 3], None)
    )
    assert len({loader.fingerprint() for loader in (one, other, every)}) == 3
    with pytest.raises(DataError, match="fingerprint"):
        other.load_state_dict(one.state_dict())


def test_loading_a_state_forgets_the_batch_before(tmp_path: Path) -> None:
    loader = Loader(make_folder(tmp_path / "photos", 9), batch_size=4, size=32, workers=0)
    start, wanted = loader.state_dict(), loader.batch_indices(1).indices
    loader.batch(batch_size=2)
    loader.batch()
    loader.load_state_dict(start)
    assert np.array_equal(loader.batch_indices(1).indices, wanted)


def test_few_epochs_are_kept_in_memory() -> None:
    order = SampleOrder(10)
    order.take(0, 200)
    assert len(order._cached) <= 4


def test_a_small_set_is_judged_when_all_of_it_was_read() -> None:
    faults = Faults(20)
    faults.note(10, [("a", "broken"), ("b", "broken")])
    with pytest.raises(TooManyBadError, match="3 of 20"):
        faults.note(10, [("c", "broken")])
