"""Budgets: published by default, drawn as often as their weights say, by seed and step alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from distill.small import settings
from veca.distill import distill
from veca.distill.draws import seed_torch
from veca.distill.nested import BudgetSampler, default_budgets
from veca.errors import DistillError


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
    ("arguments", "words"),
    [
        ({"budgets": (8, 80)}, "from 1 to 64"),
        ({"budgets": (16, 8)}, "increasing"),
        ({"budgets": (0, 8)}, "from 1 to 64"),
        ({"budgets": (8, 16), "weights": (1,)}, "2 numbers"),
        ({"budgets": (8, 16), "weights": (0, 0)}, "not all 0"),
        ({"budgets": (8, 16), "per_step": 3}, "from 1 to 2"),
        ({"always": (8, 16)}, "from 2 to 8"),
        ({"always": (12,), "per_step": 2}, "different ones of"),
        ({"always": (8, 8), "per_step": 2}, "different ones of"),
        ({"budgets": (8, 16), "weights": (0, 1), "always": (16,), "per_step": 2}, "from 1 to 1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict, words: str) -> None:
    with pytest.raises(DistillError, match=words):
        BudgetSampler(64, **arguments)


def test_default_budgets_are_eighths_rounded_up():
    assert default_budgets(12) == (2, 3, 5, 6, 8, 9, 11, 12)


def test_torch_draws_by_seed_step_and_pass():
    def drawn(*where: int) -> float:
        seed_torch(*where)
        return torch.rand(1).item()

    places = [(seed, step, number) for seed in (0, 1) for step in (0, 7) for number in (0, 1)]
    found = [drawn(*place) for place in places]
    assert len(set(found)) == len(places) and found == [drawn(*place) for place in places]


def test_every_pass_of_a_step_has_random_numbers_of_its_own(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("veca.distill.trainer.seed_torch", lambda *where: seen.append(where))
    nested = {"budgets": [2, 4, 8], "per_step": 2}
    distill(settings(seed=5, schedule={"steps": 3}, nested=nested), tmp_path)
    assert seen == [(5, step, number) for step in range(3) for number in range(2)]
