"""Nested dropout along the core axis: which budgets a step trains.

Each step draws a budget C, and the whole batch runs on the prefix of the first C cores. Small
budgets come less often but reach every core's neighbours, so that the order of the bank means
something: the first cores learn what matters most.
"""

from __future__ import annotations

from collections.abc import Sequence

from veca.distill.draws import budget_number, weighted_choice
from veca.errors import DistillError

PUBLISHED_BUDGETS = (8, 16, 24, 32, 40, 48, 56, 64)
PUBLISHED_WEIGHTS = (1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0)


class BudgetSampler:
    """Draws the budgets of a step, the same on every rank.

    Args:
        budgets: numbers of cores, increasing; empty for eighths of the bank (8, 16, ... 64 of
            64, as published).
        weights: how often each, in any unit; empty for the published (1, 1, 2, 2, 3, 3, 4, 4)
            where there are eight budgets, else all alike.
        per_step: how many different budgets one step trains on the same images and targets.
        always: those of them that every step trains; the others are drawn.
    """

    def __init__(
        self,
        num_cores: int,
        budgets: Sequence[int] = (),
        weights: Sequence[float] = (),
        *,
        per_step: int = 1,
        always: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self.budgets = tuple(budgets) or default_budgets(num_cores)
        even = (1.0,) * len(self.budgets)
        published = PUBLISHED_WEIGHTS if len(self.budgets) == len(PUBLISHED_WEIGHTS) else even
        self.weights = tuple(float(w) for w in weights) or published
        self.per_step, self.always, self.seed = per_step, tuple(always), seed
        self._check(num_cores)

    def _check(self, num_cores: int) -> None:
        increasing = list(self.budgets) == sorted(set(self.budgets))
        if not increasing or not 1 <= self.budgets[0] <= self.budgets[-1] <= num_cores:
            raise DistillError(
                f"budgets must be increasing whole numbers from 1 to {num_cores} (the student's "
                f"cores), got {list(self.budgets)}."
            )
        if len(self.weights) != len(self.budgets) or min(self.weights) < 0 or not any(self.weights):
            raise DistillError(
                f"budget weights must be {len(self.budgets)} numbers of at least 0 and not all 0, "
                f"one for each of {list(self.budgets)}; got {list(self.weights)}."
            )
        fixed = set(self.always)
        if len(fixed) < len(self.always) or not fixed <= set(self.budgets):
            raise DistillError(
                f"budgets that every step trains must be different ones of {list(self.budgets)}, "
                f"got {list(self.always)}."
            )
        free = zip(self.budgets, self.weights, strict=True)
        possible = len(fixed) + sum(w > 0 for budget, w in free if budget not in fixed)
        least = max(1, len(fixed))
        if not least <= self.per_step <= possible:
            raise DistillError(
                f"budgets per step must be from {least} to {possible} (how many every step trains, "
                f"and how many others have a weight above 0), got {self.per_step}."
            )

    def draw(self, step: int) -> tuple[int, ...]:
        """The budgets of one step, each at most once: those of every step, then as drawn."""
        left = dict(zip(self.budgets, self.weights, strict=True))
        for budget in self.always:
            del left[budget]
        drawn = list(self.always)
        for number in range(len(drawn), self.per_step):
            value = budget_number(self.seed, step, number)
            budget = weighted_choice(value, list(left), list(left.values()))
            drawn.append(budget)
            del left[budget]
        return tuple(drawn)


def default_budgets(num_cores: int) -> tuple[int, ...]:
    """Eighths of the bank, rounded up, without repeats: the published ones for 64 cores."""
    return tuple(sorted({-(-num_cores * eighth // 8) for eighth in range(1, 9)}))
