"""One training step: its parts, passes and update."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from distill.small import DENSE, curve, run, settings
from veca.distill import distill, read_metrics
from veca.distill import step as steps
from veca.teachers import CallableTeacher


def test_in_parts_is_the_same(tmp_path) -> None:
    whole = run(tmp_path / "a")
    parts = run(tmp_path / "b", optimizer={"accumulate": 3})
    teachers = [
        {"name": "filters", "standardise": True, "standardise_images": 16, "micro_batch": 1}
    ]
    micro = run(tmp_path / "c", teachers=teachers)
    for other in (parts, micro):
        for a, b in zip(whole, other, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)


def test_several_budgets_on_one_pass_of_the_teacher(tmp_path) -> None:
    calls = []

    class Counts(nn.Module):
        def forward(self, images):
            calls.append(len(images))
            return nn.functional.avg_pool2d(images, 16)

    teacher = CallableTeacher(Counts(), width=3, stride=16, name="counts")
    config = settings(teachers=[], nested={"per_step": 3})
    distill(config, tmp_path, teachers=[teacher])
    assert calls == [4] * 6
    assert all(len(set(r["cores"])) == 3 for r in read_metrics(tmp_path))


def test_clipping(tmp_path) -> None:
    free = run(tmp_path / "a")
    clipped = run(tmp_path / "b", optimizer={"clip": 1e-3})
    assert free[0]["grad_norm"] == pytest.approx(clipped[0]["grad_norm"])  # as it was before
    assert curve(free)[2:] != curve(clipped)[2:]


def test_large_images_come_in_more_parts(tmp_path, monkeypatch) -> None:
    seen = []
    plain = steps.forward_backward

    def note(trainer, loss, pixels, *rest, **more):
        seen.append((pixels.shape[-1], len(pixels)))
        return plain(trainer, loss, pixels, *rest, **more)

    monkeypatch.setattr(steps, "forward_backward", note)
    phases = [{"draw": {"32": 1.0}, "until": 1}, {"draw": {"48": 1.0}}]
    changes = {
        "optimizer": {"accumulate": 2, "accumulate_by_size": {"48": 4}},
        "schedule": {"steps": 2, "warmup": 0, "batch": 4, "size": 0, "phases": phases},
    }
    distill(settings(**changes), tmp_path)
    assert seen == [(32, 2)] * 2 + [(48, 1)] * 4


def test_every_pass_of_a_step_has_random_numbers_of_its_own(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("veca.distill.step.seed_torch", lambda *where: seen.append(where))
    nested = {"budgets": [2, 4, 8], "per_step": 2}
    distill(settings(seed=5, schedule={"steps": 3}, nested=nested), tmp_path)
    assert seen == [(5, step, number) for step in range(3) for number in range(2)]


def test_a_dense_student_makes_one_pass_beside_several_budgets(tmp_path, monkeypatch) -> None:
    passes = []
    plain = steps.one_pass

    def count(trainer, loss, images, targets, cores, keep, share):
        passes.append((trainer.dense, cores, share))
        return plain(trainer, loss, images, targets, cores, keep, share)

    monkeypatch.setattr(steps, "one_pass", count)
    nested = {"budgets": [2, 8], "per_step": 2}
    records = run(tmp_path / "two", siblings={"dense": DENSE}, nested=nested)
    done = len(records)
    assert [x for x in passes if x[0]] == [(True, 0, 1.0)] * done
    assert Counter(x[1:] for x in passes if not x[0]) == {(2, 0.5): done, (8, 0.5): done}
    # What it learns does not depend on how many budgets the others train.
    once = run(tmp_path / "one", siblings={"dense": DENSE}, nested={"budgets": [2, 8]})
    assert [r["dense:loss"] for r in records] == [r["dense:loss"] for r in once]
