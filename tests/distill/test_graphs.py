"""Recorded passes: the same steps as launched one by one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from distill.small import TABLE, run, settings
from veca.distill import DistillError, distill
from veca.distill.data import open_data
from veca.distill.dry_run import estimate_memory
from veca.distill.optim import Optimizers
from veca.distill.parallel import World
from veca.distill.schedule import build_plan
from veca.distill.teachers import open_teachers
from veca.distill.trainer import StudentGroup

GRAPHS = {**TABLE["student"], "graphs": True}


def test_without_a_gpu_it_says_so(tmp_path) -> None:
    with pytest.raises(DistillError, match=r"student\.graphs"):
        distill(settings(student=GRAPHS), tmp_path / "run")


def test_memory_of_recorded_passes_is_counted_for_each_student() -> None:
    launched, recorded = (
        _estimate({**TABLE["student"], "graphs": graphs}) for graphs in (False, True)
    )
    assert recorded.student == 2 * launched.student  # two students alike, one after the other
    assert recorded.targets > launched.targets and recorded.weights == launched.weights


def _estimate(student):
    config, world = settings(student=student, siblings={"twin": student}), World()
    data, teachers = open_data(config.data, world), open_teachers(config, world)
    group = StudentGroup(config, teachers, world)
    plan = build_plan(config, group.main.architecture, data.images, world)
    return estimate_memory(config, plan, group, data.source)


def test_gradients_can_keep_their_place() -> None:
    layer = torch.nn.Linear(3, 2)
    optimizers = Optimizers(layer)
    layer(torch.ones(1, 3)).sum().backward()
    places = [p.grad.data_ptr() for p in layer.parameters()]
    optimizers.zero_grad(keep=True)
    assert [p.grad.data_ptr() for p in layer.parameters()] == places
    assert not any(p.grad.any() for p in layer.parameters())
    optimizers.zero_grad()
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bfloat16"},
        {"nested": {"per_step": 2}},
        {"nested": {"keep": [1.0, 0.5]}},
        {"optimizer": {"accumulate": 2, "clip": 0.5}},
        {"schedule": {"steps": 12, "size": 0, "phases": [{"draw": {"32": 0.5, "48": 0.5}}]}},
        {"siblings": {"smaller": {**GRAPHS, "config": {**GRAPHS["config"], "depth": 1}}}},
        {"ema": 0.9, "data": {"hold_out": 4}, "validation": {"every": 3}},
    ],
    ids=["plain", "bfloat16", "budgets", "keep", "parts", "sizes", "siblings", "validated"],
)
def test_recorded_steps_are_the_launched_ones(tmp_path, changes) -> None:
    here = {"device": "cuda", "precision": "float32", "schedule": {"steps": 12}, **changes}
    plain = {name: {**one, "graphs": False} for name, one in here.get("siblings", {}).items()}
    without = {**here, "student": {**GRAPHS, "graphs": False}, "siblings": plain}
    launched, again = (run(tmp_path / name, **without) for name in ("launched", "again"))
    recorded = run(tmp_path / "recorded", **{**here, "student": GRAPHS})
    kinds = Counter((r["size"], budget) for r in recorded for budget in r["cores"])
    assert len(kinds) > 1 and max(kinds.values()) > 1  # several recordings, and some replayed
    assert len(launched) == len(recorded)
    # Sums on a GPU may run in another order from one launch to the next, and training makes more
    # of a difference with every step: two launched runs tell how much.
    tolerance = 5e-3 if changes.get("precision") == "bfloat16" else 1e-4
    for one, twin, other in zip(launched, again, recorded, strict=True):
        for name in ("loss", "grad_norm", "smaller:loss"):
            if name in one:
                tolerance = max(tolerance, 4 * abs(twin[name] / one[name] - 1))
                assert other[name] == pytest.approx(one[name], rel=tolerance), (one["step"], name)
