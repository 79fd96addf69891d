"""Training with merging: a share of patch tokens for each step, and what it is good for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from distill.small import TABLE, curve, run, settings
from veca.distill import DistillError, KeepSampler, distill, read_metrics
from veca.distill import step as steps
from veca.distill.data import open_data
from veca.distill.dry_run import describe
from veca.distill.parallel import World
from veca.distill.schedule import build_plan
from veca.distill.student import Student
from veca.distill.teachers import open_teachers
from veca.distill.trainer import StudentGroup
from veca.weights import read_provenance

LARGER = {
    "data": {"memory_size": 64},
    "schedule": {"size": 64},
    "nested": {"keep": [1.0, 0.5, 0.35]},
}
"""16 patches, of which 2 x 2 merge."""


def test_shares_come_as_often_as_they_say() -> None:
    sampler = KeepSampler([1.0, 0.5, 0.35], [2, 1, 1], seed=3)
    drawn = [sampler.draw(step) for step in range(4000)]
    counts = Counter(drawn)
    for share, wanted in ((1.0, 0.5), (0.5, 0.25), (0.35, 0.25)):
        assert counts[share] / 4000 == pytest.approx(wanted, abs=0.04)
    assert [KeepSampler([0.35, 1.0, 0.5], [1, 2, 1], seed=3).draw(s) for s in range(99)] == (
        drawn[:99]
    )
    assert [KeepSampler([1.0, 0.5, 0.35], [2, 1, 1], seed=4).draw(s) for s in range(99)] != (
        drawn[:99]
    )
    assert KeepSampler().draw(7) == 1.0 and KeepSampler().merging == ()
    assert KeepSampler([0.5, 1.0, 0.2], [1, 1, 0]).merging == (0.5,)


@pytest.mark.parametrize(
    ("nested", "noun"),
    [
        ({"keep": [0.0]}, "keep"),
        ({"keep": [1.5]}, "keep"),
        ({"keep": [0.5, 0.5]}, "different"),
        ({"keep": [0.5], "keep_weights": [1, 1]}, "keep_weights"),
        ({"keep": [0.5, 1.0], "keep_weights": [0, 0]}, "keep_weights"),
        ({"keep_weights": [float("nan")]}, "keep_weights"),
    ],
)
def test_shares_that_cannot_be(tmp_path, nested, noun: str) -> None:
    with pytest.raises(DistillError, match=noun):
        distill(settings(nested=nested), tmp_path / "run")
    with pytest.raises(DistillError, match=r"validation\.keep"):
        distill(settings(validation={"keep": [2.0]}), tmp_path / "run")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("keep") / "run"
    changes = {
        **LARGER,
        "schedule": {"size": 64, "steps": 8},
        "data": {"memory_size": 64, "hold_out": 5},
        "validation": {"keep": [1.0, 0.35], "budgets": [8], "batch": 4},
        "checkpoint": {"every": 2},
        "max_minutes": 0.0,
    }
    return out, changes, run(out, **changes)


def test_each_step_says_its_share(finished) -> None:
    out, _, records = finished
    plan = KeepSampler(LARGER["nested"]["keep"])
    assert [r.get("keep", 1.0) for r in records] == [plan.draw(s) for s in range(8)]
    assert len({r.get("keep", 1.0) for r in records}) > 1
    grid = read_metrics(out, "validation")[-1]["grid"]
    assert [row.get("keep", 1.0) for row in grid] == [1.0, 0.35]
    assert grid[0]["loss"] != grid[1]["loss"]
    told = read_provenance(out / "final")
    assert told["keep"] == [1.0, 0.5, 0.35] and len(told["keep_weights"]) == 3


def test_stopped_it_goes_on_exactly(finished, tmp_path) -> None:
    _, changes, whole = finished
    results = []
    while not results or results[-1].stopped != "done":
        config = settings(**{**changes, "max_minutes": 1e-9})
        results.append(distill(config, tmp_path / "run", resume=True))
        assert len(results) < 9
    assert len(results) > 2
    assert curve(read_metrics(tmp_path / "run")) == curve(whole)


def test_passes_are_told_the_share(tmp_path, monkeypatch) -> None:
    """The student's, and those that a graph would record: they differ by budget and share."""
    kinds = []
    real = steps.one_pass

    def one_pass(trainer, loss, images, targets, cores, keep, share):
        kinds.append((cores, keep))
        return real(trainer, loss, images, targets, cores, keep, share)

    seen = []
    forward = Student.forward
    monkeypatch.setattr(steps, "one_pass", one_pass)
    monkeypatch.setattr(
        Student,
        "forward",
        lambda self, images, cores=None, keep=None: (
            seen.append((cores, keep)) or forward(self, images, cores, keep)
        ),
    )
    nested = {"budgets": [2, 8], "keep": [0.5], "per_step": 2}
    run(tmp_path, **{**LARGER, "nested": nested, "optimizer": {"accumulate": 2}})
    assert seen == kinds and set(kinds) == {(2, 0.5), (8, 0.5)}


def test_a_dense_student_merges_nothing(tmp_path) -> None:
    dense = {**TABLE["student"], "dense": True}
    plain = run(tmp_path / "a", **{**LARGER, "nested": {}, "student": dense})
    merged = run(tmp_path / "b", **{**LARGER, "student": dense})
    assert curve(plain) == curve(merged) and not any("keep" in r for r in merged)


def test_without_shares_nothing_changes(tmp_path) -> None:
    plain = run(tmp_path / "a")
    assert curve(plain) == curve(run(tmp_path / "b", nested={"keep": [1.0]}))
    assert "keep" not in read_provenance(tmp_path / "b" / "final")


def test_compiled_students_have_room_for_every_shape() -> None:
    config = settings(**{**LARGER, "student": {**TABLE["student"], "compile": True}})
    world = World()
    teachers = open_teachers(config, world)
    group = StudentGroup(config, teachers, world)
    data = open_data(config.data, world)
    plan = build_plan(config, group.main.architecture, data.images, world)
    limits = torch._dynamo.config
    before = limits.recompile_limit
    with limits.patch(recompile_limit=before):
        group.prepare(plan)
        shapes = 1 + 2 * len(group.main.architecture.merge_blocks)
        assert limits.recompile_limit - before >= shapes * len(plan.budgets.budgets)
    assert "keep 1.0, 0.5, 0.35" in "\n".join(describe(config, plan, group, data, world))


def learn(out, keep: list[float], weights: list[float]) -> dict[float, dict[str, float]]:
    """Two hundred steps on forty images; by the share of tokens, how near they came."""
    run(
        out,
        student={
            "config": {"depth": 3, "width": 48, "heads": 2, "num_cores": 8, "merge_before": [1]}
        },
        teachers=[{"name": "filters", "standardise": True, "standardise_images": 40}],
        data={
            "source": "photos:40",
            "memory_size": 96,
            "validation": "photos:40",  # the same images: this is about learning them
            "augment": {
                "kind": "rrc",
                "area": [0.9, 1.0],
                "brightness": 0.0,
                "contrast": 0.0,
                "saturation": 0.0,
            },
        },
        optimizer={"lr": 5e-3},
        schedule={"steps": 180, "warmup": 10, "batch": 10, "size": 96},
        validation={"budgets": [8], "keep": [1.0, 0.35], "batch": 40},
        nested={"budgets": [8], "weights": [1.0], "keep": keep, "keep_weights": weights},
    )
    return {row.get("keep", 1.0): row for row in read_metrics(out, "validation")[-1]["grid"]}


@pytest.mark.slow
def test_trained_with_merging_a_student_is_better_at_it(tmp_path) -> None:
    without = learn(tmp_path / "without", [], [])
    trained = learn(tmp_path / "with", [1.0, 0.35], [1.0, 4.0])
    assert without[1.0]["cls_cos"] > 0.85  # it learned as well, with all patches
    assert without[0.35]["loss"] > without[1.0]["loss"]
    assert trained[0.35]["loss"] < without[0.35]["loss"] - 0.02
    assert trained[0.35]["cls_cos"] > without[0.35]["cls_cos"] + 0.01
