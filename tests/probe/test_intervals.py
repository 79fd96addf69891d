"""Intervals against what they stand for: scores of sets of images that were drawn again."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from probe import sets
from probe.test_backbone import teacher
from probe.test_run import SETS
from veca.probe import ElasticBackbone, TeacherBackbone, run_probe, write_report, write_tables
from veca.probe.data import ProbeData
from veca.probe.intervals import DRAWS, Resampling, _student, iou_sums, mean_sums
from veca.probe.metrics import PRIMARY, Confusion
from veca.probe.record import Run
from veca.probe.run import resampling_of
from veca.probe.schedule import generator
from veca.probe.table import cells, csv_text, header, markdown, rich_table, show_interval
from veca.probe.tasks import make_task


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
        resampling = Resampling(26, groups=[0] * 26, in_time=True, seed=5)
        found = all_counts(resampling)
        assert resampling.block == 6
        starts = generator(5, "resample").integers(0, 26, (DRAWS, 4))  # 4 blocks, 24 of 26 images
        expected = np.zeros((DRAWS, 26))
        for draw, chosen in enumerate(starts):
            for start in chosen:
                for i in range(6):
                    expected[draw, (start + i) % 26] += 1
        assert (found == expected).all()

    @pytest.mark.parametrize(
        ("groups", "in_time", "expected"),
        [
            (None, False, {"drawn": "images", "of": 3}),
            ((0, 4, 4, 5), False, {"drawn": "groups", "of": 2}),
            ((0,) * 4, True, {"drawn": "blocks", "of": 2, "block": 2}),
        ],
    )
    def test_as_the_dataset_says(self, groups, in_time, expected):
        test = SimpleNamespace(groups=groups, in_time=in_time)
        made = resampling_of(ProbeData(None, test, [], [1, 2, 3]), seed=7)
        assert made.describe() == {"share": 0.95, "draws": DRAWS, **expected}
        assert made.seed == 7

    def test_parts_of_the_draws_do_not_matter(self, monkeypatch):
        whole = all_counts(Resampling(20, seed=3))
        monkeypatch.setattr("veca.probe.intervals._AT_ONCE", 20 * 7)
        parts = list(Resampling(20, seed=3).counts())
        assert len(parts) > 200 and (np.concatenate(parts) == whole).all()
        assert (all_counts(Resampling(20, seed=4)) != whole).any()

    def test_other_images_are_refused(self):
        with pytest.raises(ValueError, match="2 images"):
            Resampling(3).scores([mean_sums([1.0, 2.0])])


class TestInterval:
    def test_of_a_share_as_the_binomial_has_it(self):
        right = np.arange(400) < 300
        resampling = Resampling(400)
        found = resampling.interval(*resampling.scores([mean_sums(right.tolist())]))
        half = 1.96 * math.sqrt(0.75 * 0.25 / 400)
        assert found == pytest.approx((0.75 - half, 0.75 + half), abs=0.1 * half)

    def test_of_few_groups_as_student_has_it(self):
        """As wide as the t-interval of the groups' means."""
        means = np.array([1.0, 2.0, 4.0, 5.0, 7.0, 9.0])
        resampling = Resampling(18, groups=np.repeat(np.arange(6), 3).tolist())
        sums = mean_sums(np.repeat(means, 3).tolist())
        low, high = resampling.interval(*resampling.scores([sums]))
        half = 2.571 * means.std(ddof=1) / math.sqrt(6)
        assert (high - low) / 2 == pytest.approx(half, rel=0.06)
        assert (high + low) / 2 == pytest.approx(means.mean(), abs=0.1 * half)

    @pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.776), (9, 2.262), (100, 1.984)])
    def test_quantiles_of_student(self, freedom, quantile):
        assert _student(freedom) == pytest.approx(quantile, rel=0.003)

    def test_neighbours_in_time_that_are_alike_say_less(self):
        random = np.random.default_rng(0)
        slow = np.repeat(random.normal(size=10), 10)  # ten scenes of ten frames each
        widths = []
        for in_time in (False, True):
            resampling = Resampling(100, in_time=in_time)
            low, high = resampling.interval(*resampling.scores([mean_sums((5 + slow).tolist())]))
            widths.append(high - low)
        assert widths[1] > 2 * widths[0]

    def test_the_same_draws_tell_a_small_difference(self):
        random = np.random.default_rng(0)
        errors = random.uniform(1, 3, 100)
        resampling = Resampling(100)
        worse = errors + random.uniform(0.03, 0.05, 100)
        ours, theirs = resampling.scores([mean_sums(x.tolist()) for x in (worse, errors)])
        # By themselves they overlap.
        assert resampling.interval(ours)[0] < resampling.interval(theirs)[1]
        low, high = resampling.share_interval(ours, theirs, "rmse")
        assert 0.95 < low < high < 1  # a larger error keeps less
        assert resampling.share_interval(theirs, theirs, "rmse") == (1, 1)
        low, high = resampling.share_interval(ours, theirs, "top1")
        assert 1 < low < high < 1.05

    def test_no_further_than_a_score_can_go(self):
        good = Resampling(12)
        (drawn,) = good.scores([mean_sums([True] * 11 + [False])])
        assert good.interval(drawn)[1] > 1  # stretched for so few images
        low, high = good.score_interval(drawn, "top1")
        assert low < 11 / 12 < high == 1.0
        assert good.score_interval(2 * drawn, "rmse")[1] > 1
        (drawn,) = good.scores([mean_sums([False] * 11 + [True])])
        assert good.score_interval(drawn, "top1")[0] == 0.0

    def test_none_where_all_images_are_alike(self):
        alike = Resampling(30)
        (drawn,) = alike.scores([mean_sums([True] * 30)])
        assert alike.score_interval(drawn, "top1") is None

    def test_none_where_a_draw_has_no_score(self):
        resampling = Resampling(6)
        rare, zero = resampling.scores([mean_sums([1.0, *[None] * 5]), mean_sums([0.0] * 6)])
        assert resampling.interval(rare) is None
        assert resampling.interval(zero) == (0, 0)
        assert resampling.share_interval(zero, zero, "top1") is None

    @pytest.mark.parametrize(
        "few",
        [
            Resampling(4),
            Resampling(9, groups=[0, 0, 0, 1, 1, 2, 2, 3, 3]),
            Resampling(2, in_time=True),
            Resampling(20, in_time=True),
            Resampling(0),
        ],
        ids=["images", "groups", "two frames", "four blocks", "nothing"],
    )
    def test_none_of_too_few(self, few):
        assert few.interval(*few.scores([mean_sums([1.0] * few.images)])) is None


@pytest.fixture
def probe(tmp_path):
    def run(task, backbones=None, make=True, **options):
        name, write = SETS[task]
        if make:
            write(tmp_path / name, test=6)
        return run_probe(
            task,
            backbones or [TeacherBackbone(teacher(16)), *sets.backbone().at([2, 8])],
            dataset=name,
            data=tmp_path / name,
            protocol=sets.protocol(),
            cache=None,
            **options,
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("task", SETS)
def test_of_every_task(probe, task):
    run = probe(task)
    assert run.resampling["drawn"] == "images"
    assert run.resampling["of"] == run.dataset["test"]["used"]
    for row in run.rows:
        if run.score(row) == 1:
            assert row.interval is None  # without a miss, how many there might be cannot be drawn
        else:
            low, high = row.interval
            assert low <= run.score(row) <= high
        low, high = row.interval_teacher
        assert low <= row.retention_teacher <= high
    assert run.rows[0].interval_teacher == (1, 1) and run.rows[0].interval_full is None
    low, high = run.rows[1].interval_full
    assert low <= run.rows[1].retention_full <= high
    assert run.rows[2].interval_full == (1, 1)
    assert any(row.interval for row in run.rows)


@pytest.fixture
def outcomes(monkeypatch):
    """What the task of a run has found, filled in by the run."""
    found = []

    def keep(*words):
        task = make_task(*words)
        score = task.outcomes
        task.outcomes = lambda features: found.extend(score(features)) or found
        return task

    monkeypatch.setattr("veca.probe.run.make_task", keep)
    return found


@pytest.mark.parametrize("task", SETS)
def test_the_sums_are_those_of_the_score(probe, outcomes, task):
    """Of every task and row; of k-NN those of the k that is reported."""
    probe(task)
    assert len(outcomes) == 3
    for outcome in outcomes:
        assert every(outcome.sums) == outcome.metrics[PRIMARY[task]]


def test_images_without_depth_do_not_count(probe, outcomes, tmp_path):
    name, write = SETS["depth"]
    root = write(tmp_path / name, test=7)
    empty = sorted((root / "depth" / "test").iterdir())[2]
    Image.fromarray(np.zeros_like(np.asarray(Image.open(empty)))).save(empty)
    assert probe("depth", make=False).rows[0].details["skipped"] == 1
    for outcome in outcomes:
        assert every(outcome.sums) == outcome.metrics["rmse"]


def test_only_students_keep_a_share_of_their_full_budget(probe):
    students = sets.backbone().at([2])
    (other,) = ElasticBackbone(sets.model(), role="baseline").at([8])
    small, full = probe("knn", [*students, other]).rows
    assert small.retention_full is not None and small.interval_full is not None
    assert full.retention_full is None and full.interval_full is None


def test_kept_and_shown(probe):
    run = probe("depth")
    again = Run.from_dict(json.loads(json.dumps(run.to_dict())))
    assert again == run
    shown = dict(zip(header(run), cells(run, run.rows[1]), strict=True))
    low, high = run.rows[1].interval
    assert shown["95 %"] == f"±{(high - low) / 2:.3f}" and " % ±" in shown["of full"]
    assert "±" not in dict(zip(header(run), cells(run, run.rows[2]), strict=True))["of full"]
    assert f"for which the {run.resampling['of']} test images are drawn again" in markdown(run)
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
        ({"drawn": "groups", "of": 7}, "the 7 groups of test images that belong together are"),
        (
            {"drawn": "blocks", "of": 9, "block": 11},
            "the test images, in 9 blocks of 11 that follow each other in time, are drawn again",
        ),
    ],
)
def test_what_was_drawn_in_words(probe, how, words):
    run = probe("knn")
    made = dataclasses.replace(run, resampling={**run.resampling, **how})
    assert words in markdown(made)


def test_no_words_about_intervals_that_are_not_there(probe):
    run = probe("knn")
    rows = [dataclasses.replace(row, interval=None) for row in run.rows]
    assert "±:" not in markdown(dataclasses.replace(run, rows=rows))


def test_a_page_of_old_and_new_records_explains_itself(probe, tmp_path):
    run = probe("knn")
    for folder, how in (("a-old", {}), ("b-new", run.resampling)):
        write_tables(dataclasses.replace(run, resampling=how), tmp_path / "runs" / folder)
    page = write_report(tmp_path / "runs").page.read_text(encoding="utf-8")
    assert page.count("are drawn again") == 1


def test_the_terminal_shows_that_of_the_score(probe):
    run = probe("depth")
    large = {"size": 0, "input": (480, 640), "interactions": 1_052_676, "ms": 1234.5}
    made = dataclasses.replace(run, rows=[dataclasses.replace(r, **large) for r in run.rows])
    out = Console(file=io.StringIO(), width=80)
    out.print(rich_table(made))
    text = out.file.getvalue()
    parts = ("480x640", "1,052,676", "1234.5", show_interval("rmse", run.rows[1].interval))
    assert all(part in text for part in parts)
    assert text.count("±") == 3  # none of what is kept, for which there is no room
