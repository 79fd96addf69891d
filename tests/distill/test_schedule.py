"""Learning rate, sizes, batches and budgets of each step, by seed and step alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from veca.distill.schedule import (
    BudgetSampler,
    Phase,
    SizeSchedule,
    TrainingPlan,
    learning_rate,
    seed_torch,
    training_budgets,
)
from veca.errors import DistillError

PUBLISHED = (
    Phase({256: 0.35, 384: 0.35, 512: 0.30}, until=7000),
    Phase({256: 0.15, 384: 0.25, 512: 0.30, 768: 0.30}),
)


def test_learning_rate_warms_up_and_comes_down() -> None:
    def lr(step: int) -> float:
        return learning_rate(step, steps=110, warmup=10, lr=1.0, lr_min=0.1)

    assert lr(0) == pytest.approx(0.1)
    assert lr(5) == pytest.approx(0.55)
    assert lr(10) == pytest.approx(1.0)
    assert lr(60) == pytest.approx(0.55)
    assert lr(110) == pytest.approx(0.1)
    falling = [lr(step) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


def test_with_a_cool_down_it_stays_up_and_comes_down_in_a_line() -> None:
    def lr(step: int) -> float:
        return learning_rate(step, steps=100, warmup=10, lr=1.0, lr_min=0.2, cooldown=20)

    assert lr(5) == pytest.approx(0.6)
    assert {lr(step) for step in range(10, 81)} == {1.0}
    assert lr(90) == pytest.approx(0.6)
    assert lr(100) == lr(120) == pytest.approx(0.2)


def test_a_cool_down_has_to_fit() -> None:
    sizes, budgets = SizeSchedule([Phase({256: 1.0})], 8), BudgetSampler(64)
    for warmup, cooldown in ((10, 95), (0, 100)):  # the last leaves nothing to go on from
        with pytest.raises(DistillError, match=f"cool-down of {cooldown}"):
            TrainingPlan(
                sizes, budgets, steps=100, warmup=warmup, lr=1.0, lr_min=0.1, cooldown=cooldown
            )


def test_no_warm_up_starts_at_the_top() -> None:
    assert learning_rate(0, steps=10, warmup=0, lr=1.0, lr_min=0.1) == 1.0


def test_one_size_is_always_that_size() -> None:
    schedule = SizeSchedule([Phase({256: 1.0})], 128)
    assert {schedule.size(step) for step in range(20)} == {256}
    assert schedule.batch(0) == 128


def test_phases_draw_as_often_as_they_say() -> None:
    schedule = SizeSchedule(PUBLISHED, 128, {768: 32})
    first = Counter(schedule.size(step) for step in range(7000))
    later = Counter(schedule.size(step) for step in range(7000, 27000))
    assert set(first) == {256, 384, 512}
    for counts, draw, total in (
        (first, PUBLISHED[0].draw, 7000),
        (later, PUBLISHED[1].draw, 20000),
    ):
        for size, share in draw.items():
            assert abs(counts[size] / total - share) < 5 * (share * (1 - share) / total) ** 0.5
    assert {schedule.batch(s) for s in range(7000, 7100) if schedule.size(s) == 768} == {32}
    assert schedule.sizes == (256, 384, 512, 768)


def test_a_size_depends_on_seed_and_step_alone() -> None:
    reordered = [
        Phase(dict(reversed(phase.draw.items())), until=phase.until) for phase in PUBLISHED
    ]
    a, b = SizeSchedule(PUBLISHED, 8, seed=1), SizeSchedule(reordered, 8, seed=1)
    assert [a.size(s) for s in range(6900, 7100)] == [b.size(s) for s in range(6900, 7100)]


@pytest.mark.parametrize(
    ("phases", "noun"),
    [
        ([], "one phase"),
        ([Phase({256: 1.0}), Phase({384: 1.0})], r"\[None\]"),
        ([Phase({256: 1.0}, until=9), Phase({384: 1.0}, until=5), Phase({8: 1.0})], r"\[9, 5\]"),
        ([Phase({256: 0.0})], r"\{256: 0\.0\}"),
    ],
)
def test_phases_that_make_no_sense_are_refused(phases: list, noun: str) -> None:
    with pytest.raises(DistillError, match=noun):
        SizeSchedule(phases, 8)


def test_a_batch_for_a_size_that_never_comes_is_refused() -> None:
    with pytest.raises(DistillError, match=r"\[384\]"):
        SizeSchedule([Phase({256: 1.0})], 8, {384: 4})


def test_plan_joins_everything() -> None:
    plan = TrainingPlan(
        SizeSchedule(PUBLISHED, 128, seed=5),
        BudgetSampler(64, seed=5),
        steps=10,
        warmup=2,
        lr=1.0,
        lr_min=0.0,
    )
    steps = list(plan.from_step(4))
    assert [step.number for step in steps] == [4, 5, 6, 7, 8, 9]
    assert steps[0] == plan.step(4)


def test_a_phase_ends_before_the_step_it_names():
    sizes = SizeSchedule([Phase({32: 1.0}, until=3), Phase({64: 1.0})], 8)
    assert [sizes.size(step) for step in range(5)] == [32, 32, 32, 64, 64]


def test_a_size_of_weight_zero_never_comes():
    sizes = SizeSchedule([Phase({32: 1.0, 64: 0.0})], 8)
    assert sizes.sizes == (32,) and {sizes.size(step) for step in range(50)} == {32}


# ------------------------------------------------------------------------------------ budgets


def test_defaults_are_published() -> None:
    sampler = BudgetSampler(64)
    assert sampler.budgets == (8, 16, 24, 32, 40, 48, 56, 64)
    assert sampler.weights == (1, 1, 2, 2, 3, 3, 4, 4)


def test_defaults_for_another_bank() -> None:
    assert BudgetSampler(16).budgets == (2, 4, 6, 8, 10, 12, 14, 16)
    assert BudgetSampler(3).budgets == (1, 2, 3)
    assert BudgetSampler(3).weights == (1, 1, 1)


def test_a_step_always_draws_the_same() -> None:
    forwards = [BudgetSampler(64, seed=3).draw(step) for step in range(50)]
    sampler = BudgetSampler(64, seed=3)
    backwards = [sampler.draw(step) for step in reversed(range(50))][::-1]
    assert forwards == backwards
    assert forwards != [BudgetSampler(64, seed=4).draw(step) for step in range(50)]


def test_draws_follow_the_weights() -> None:
    count = 20_000
    sampler = BudgetSampler(64)
    drawn = Counter(sampler.draw(step)[0] for step in range(count))
    for budget, weight in zip(sampler.budgets, sampler.weights, strict=True):
        share = weight / 20
        deviation = (share * (1 - share) / count) ** 0.5
        assert abs(drawn[budget] / count - share) < 5 * deviation


def test_several_budgets_of_a_step_differ() -> None:
    sampler = BudgetSampler(64, per_step=3)
    for step in range(100):
        assert len(set(sampler.draw(step))) == 3


def test_weight_zero_is_never_drawn() -> None:
    sampler = BudgetSampler(64, (8, 16, 64), (0, 1, 1), per_step=2)
    assert {budget for step in range(200) for budget in sampler.draw(step)} == {16, 64}


def test_some_are_trained_in_every_step_beside_what_is_drawn() -> None:
    sampler = BudgetSampler(64, weights=(1, 1, 0, 1, 0, 0, 0, 5), per_step=2, always=(64,), seed=2)
    steps = [sampler.draw(step) for step in range(600)]
    assert {first for first, _ in steps} == {64}
    drawn = Counter(second for _, second in steps)
    assert set(drawn) == {8, 16, 32}  # 64 once a step, whatever its weight
    assert max(drawn.values()) - min(drawn.values()) < 120
    assert steps == [sampler.draw(step) for step in range(600)]


def test_every_step_may_train_fixed_budgets_alone() -> None:
    sampler = BudgetSampler(64, per_step=2, always=(64, 8))
    assert {sampler.draw(step) for step in range(20)} == {(64, 8)}


@pytest.mark.parametrize(
    ("arguments", "noun"),
    [
        ({"budgets": (8, 80)}, r"\[8, 80\]"),
        ({"budgets": (16, 8)}, r"\[16, 8\]"),
        ({"budgets": (0, 8)}, r"\[0, 8\]"),
        ({"budgets": (8, 16), "weights": (1,)}, r"weights.*\[1\.0\]"),
        ({"budgets": (8, 16), "weights": (0, 0)}, r"weights.*\[0\.0, 0\.0\]"),
        ({"budgets": (8, 16), "per_step": 3}, "per step.*3"),
        ({"always": (8, 16)}, "per step.*2 to 8"),
        ({"always": (12,), "per_step": 2}, r"\[12\]"),
        ({"always": (8, 8), "per_step": 2}, r"\[8, 8\]"),
        (
            {"budgets": (8, 16), "weights": (0, 1), "always": (16,), "per_step": 2},
            "per step.*1 to 1",
        ),
    ],
)
def test_budgets_that_make_no_sense_are_refused(arguments: dict, noun: str) -> None:
    with pytest.raises(DistillError, match=noun):
        BudgetSampler(64, **arguments)


def test_training_budgets_are_eighths_rounded_up():
    assert training_budgets(12) == (2, 3, 5, 6, 8, 9, 11, 12)


def test_torch_draws_by_seed_step_and_pass():
    def drawn(*where: int) -> float:
        seed_torch(*where)
        return torch.rand(1).item()

    places = [(seed, step, number) for seed in (0, 1) for step in (0, 7) for number in (0, 1)]
    found = [drawn(*place) for place in places]
    assert len(set(found)) == len(places) and found == [drawn(*place) for place in places]
