"""Intervals against what they stand for: scores of sets of images that were drawn again."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from probe import sets
from probe.test_backbone import teacher
from probe.test_run import SETS
from veca.probe import TeacherBackbone, run_probe
from veca.probe.data import Data
from veca.probe.intervals import DRAWS, Resampling, interval, iou_sums, kept, mean_sums
from veca.probe.metrics import Confusion
from veca.probe.record import Run
from veca.probe.run import resampling_of
from veca.probe.schedule import generator
from veca.probe.table import cells, csv_text, header, markdown


def every(sums):
    """The score of each image counted once."""
    return float(sums.score(sums.images.sum(axis=0, keepdims=True))[0])


def all_counts(resampling):
    return np.concatenate(list(resampling.counts()))


class TestSums:
    def test_a_mean(self):
        sums = mean_sums([True, None, False, True])
        assert every(sums) == pytest.approx(2 / 3)
        assert sums.score(np.zeros((1, 2))).tolist() == pytest.approx([math.nan], nan_ok=True)

    def test_mean_iou_of_any_draw_is_that_of_a_set_with_these_images(self):
        random = np.random.default_rng(0)
        images = [
            (random.integers(0, 5, (6, 7)).astype(np.uint8), random.integers(0, 4, (6, 7)))
            for _ in range(5)
        ]
        once = Confusion(6)  # class 4 is never predicted, class 5 does not occur
        for labels, guesses in images:
            once.add(labels, guesses)
        sums = iou_sums(once.images)
        assert every(sums) == once.metrics()["miou"]
        for counts in random.integers(0, 4, (6, 5)):
            again = Confusion(6)
            for (labels, guesses), count in zip(images, counts, strict=True):
                for _ in range(count):
                    again.add(labels, guesses)
            found = sums.score(counts[None].astype(float) @ sums.images)
            assert found[0] == pytest.approx(again.metrics()["miou"], rel=1e-12)


class TestResampling:
    def test_images_alone(self):
        counts = all_counts(Resampling(30))
        assert counts.shape == (DRAWS, 30) and (counts.sum(axis=1) == 30).all()
        assert counts.mean(axis=0) == pytest.approx(1.0, abs=0.1)
        assert counts.var() == pytest.approx(29 / 30, rel=0.05)  # binomial

    def test_groups_stay_together(self):
        groups = [7, 3, 7, 3, 3, 9]
        counts = all_counts(Resampling(6, groups=groups))
        assert (counts[:, 0] == counts[:, 2]).all() and (counts[:, 1] == counts[:, 3]).all()
        assert (counts[:, 1] == counts[:, 4]).all()
        assert (counts[:, [0, 1, 5]].sum(axis=1) == 3).all()

    def test_time_is_drawn_in_blocks(self):
        resampling = Resampling(14, groups=[0] * 14, in_time=True, seed=5)
        found = all_counts(resampling)
        assert resampling.block == 4
        starts = generator(5, "resample").integers(0, 14, (DRAWS, 4))  # 4 blocks for 14 images
        expected = np.zeros((DRAWS, 14))
        for draw, chosen in enumerate(starts):
            for start in chosen:
                for i in range(4):
                    expected[draw, (start + i) % 14] += 1
        assert (found == expected).all()

    @pytest.mark.parametrize(
        ("groups", "in_time", "drawn", "units"),
        [
            (None, False, "images", 3),
            ((0, 4, 4, 5), False, "groups", 2),
            ((0,) * 4, True, "blocks", 3),
        ],
    )
    def test_as_the_dataset_says(self, groups, in_time, drawn, units):
        test = SimpleNamespace(groups=groups, in_time=in_time)
        made = resampling_of(Data(None, test, [], [1, 2, 3]), seed=0).describe()
        assert (made["drawn"], made["units"]) == (drawn, units)

    def test_parts_of_the_draws_do_not_matter(self, monkeypatch):
        whole = all_counts(Resampling(20, seed=3))
        monkeypatch.setattr("veca.probe.intervals._AT_ONCE", 20 * 7)
        parts = list(Resampling(20, seed=3).counts())
        assert len(parts) > 200 and (np.concatenate(parts) == whole).all()
        assert (all_counts(Resampling(20, seed=4)) != whole).any()

    def test_other_images_are_refused(self):
        with pytest.raises(ValueError, match="sums of 2 images, expected 3"):
            Resampling(3).scores(mean_sums([1.0, 2.0]))


class TestInterval:
    def test_of_a_share_as_the_binomial_has_it(self):
        right = np.arange(400) < 300
        low, high = interval(Resampling(400).scores(mean_sums(right.tolist())))
        half = 1.96 * math.sqrt(0.75 * 0.25 / 400)
        assert (low, high) == pytest.approx((0.75 - half, 0.75 + half), abs=0.1 * half)

    def test_neighbours_in_time_that_are_alike_say_less(self):
        random = np.random.default_rng(0)
        slow = np.repeat(random.normal(size=10), 10)  # ten scenes of ten frames each
        sums = mean_sums((5 + slow).tolist())
        alone, blocks = (interval(Resampling(100, in_time=t).scores(sums)) for t in (False, True))
        assert blocks[1] - blocks[0] > 2 * (alone[1] - alone[0])

    def test_the_same_draws_tell_a_small_difference(self):
        random = np.random.default_rng(0)
        errors = random.uniform(1, 3, 100)
        resampling = Resampling(100)
        ours, theirs = (
            resampling.scores(mean_sums(values.tolist()))
            for values in (errors + random.uniform(0.03, 0.05, 100), errors)
        )
        assert interval(ours)[0] < interval(theirs)[1]  # by themselves they overlap
        low, high = kept(ours, theirs, "rmse")
        assert 0.95 < low < high < 1  # a larger error keeps less
        assert kept(theirs, theirs, "rmse") == (1, 1)
        low, high = kept(ours, theirs, "top1")
        assert 1 < low < high < 1.05

    def test_none_where_a_draw_has_no_score(self):
        assert interval(Resampling(3).scores(mean_sums([1.0, None, None]))) is None
        alone = Resampling(3, groups=[5, 5, 5])  # one scene: nothing is known of others
        assert interval(alone.scores(mean_sums([1.0, 2.0, 3.0]))) is None
        zero = Resampling(3).scores(mean_sums([0.0, 0.0, 0.0]))
        assert kept(zero, zero, "top1") is None


@pytest.fixture
def probe(tmp_path):
    def run(task):
        name, write = SETS[task]
        write(tmp_path / name)
        backbones = [TeacherBackbone(teacher(16)), *sets.backbone().at([2, 8])]
        protocol = sets.protocol()
        return run_probe(
            task, backbones, dataset=name, data=tmp_path / name, protocol=protocol, cache=None
        )

    return run


@pytest.mark.parametrize("task", SETS)
def test_of_every_task(probe, task):
    run = probe(task)
    assert run.resampling["drawn"] == "images"
    assert run.resampling["units"] == run.dataset["test"]["used"]
    for row in run.rows:
        low, high = row.interval
        assert low <= run.score(row) <= high
        low, high = row.interval_teacher
        assert low <= row.retention_teacher <= high
    assert run.rows[0].interval_teacher == (1, 1) and run.rows[0].interval_full is None
    low, high = run.rows[1].interval_full
    assert low <= run.rows[1].retention_full <= high
    assert run.rows[2].interval_full == (1, 1)


def test_kept_and_shown(probe):
    run = probe("depth")
    again = Run.from_dict(json.loads(json.dumps(run.to_dict())))
    assert again == run
    shown = dict(zip(header(run), cells(run, run.rows[1]), strict=True))
    low, high = run.rows[1].interval
    assert shown["95 %"] == f"±{(high - low) / 2:.3f}" and " % ±" in shown["of full"]
    assert "±" not in dict(zip(header(run), cells(run, run.rows[2]), strict=True))["of full"]
    assert f"when the {run.resampling['units']} test images are drawn again" in markdown(run)
    line = csv_text(run).splitlines()[2].split(",")
    names = csv_text(run).splitlines()[0].split(",")
    assert float(line[names.index("low")]) == pytest.approx(low, rel=1e-5)
    assert float(line[names.index("full_high")]) == pytest.approx(
        run.rows[1].interval_full[1], rel=1e-5
    )


def test_records_of_before_have_none(probe):
    table = probe("knn").to_dict()
    del table["resampling"]
    for row in table["rows"]:
        del row["interval"], row["interval_teacher"], row["interval_full"]
    run = Run.from_dict(table)
    assert run.resampling == {} and run.rows[0].interval is None
    assert "±" not in markdown(run)
    assert dict(zip(header(run), cells(run, run.rows[1]), strict=True))["95 %"] == ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"drawn": "groups", "units": 4}, "4 groups of test images that belong together"),
        (
            {"drawn": "blocks", "units": 101, "block": 11},
            "101 test images in blocks of 11 that follow each other in time",
        ),
    ],
)
def test_what_was_drawn_in_words(probe, how, words):
    run = probe("knn")
    made = dataclasses.replace(run, resampling={**run.resampling, **how})
    assert words in markdown(made)
