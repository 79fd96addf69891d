"""What happens at which step: learning rate, image size, batch, budgets. Pure functions.

Stage 1 is one phase with one size; stage 2 is phases that draw a size each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from veca.distill.draws import size_number, weighted_choice
from veca.distill.nested import BudgetSampler
from veca.errors import DistillError


def learning_rate(
    step: int, *, steps: int, warmup: int, lr: float, lr_min: float, cooldown: int = 0
) -> float:
    """The learning rate of a step (0 is the first): a line from `lr_min` up to `lr` in `warmup`
    steps, then half a cosine down to `lr_min` at step `steps`; or, with `cooldown`, `lr` until so
    many steps before the end and a line down from there.
    """
    if step < warmup:
        return lr_min + (lr - lr_min) * step / warmup
    if cooldown:
        return lr_min + (lr - lr_min) * min(1.0, max(0, steps - step) / cooldown)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return lr_min + (lr - lr_min) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Phase:
    """A stretch of steps in which sizes are drawn alike."""

    draw: Mapping[int, float]
    """Image side in pixels -> how often, in any unit."""
    until: int | None = None
    """The first step after it; None for the last phase."""


class SizeSchedule:
    """The image size of each step and the global batch at that size.

    Args:
        phases: in order; every phase but the last says `until` when.
        batch: images a step, over all processes together.
        batch_by_size: other numbers for some sizes, since large images need more memory.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        batch: int,
        batch_by_size: Mapping[int, int] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        if not phases:
            raise DistillError("a schedule needs at least one phase with an image size.")
        ends = [phase.until for phase in phases[:-1]]
        if any(end is None for end in ends) or ends != sorted(set(ends)):  # type: ignore[type-var]
            raise DistillError(
                f"every phase but the last must say 'until' which step, in order; got {ends}."
            )
        for phase in phases:
            weights = list(phase.draw.values())
            if not weights or min(weights) < 0 or not any(weights):
                raise DistillError(
                    "a phase draws sizes with weights of at least 0, not all 0, such as "
                    f"{{256 = 0.5, 384 = 0.5}}; got {dict(phase.draw)}."
                )
        self.phases, self.seed = tuple(phases), seed
        self.batches = {size: (batch_by_size or {}).get(size, batch) for size in self.sizes}
        if unknown := set(batch_by_size or {}) - set(self.sizes):
            raise DistillError(
                f"a batch is given for sizes that no phase draws: {sorted(unknown)}; the phases "
                f"draw {list(self.sizes)}."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size that can come, increasing."""
        return tuple(
            sorted({s for phase in self.phases for s, weight in phase.draw.items() if weight})
        )

    def phase(self, step: int) -> Phase:
        """The phase a step belongs to."""
        for phase in self.phases[:-1]:
            if step < phase.until:  # type: ignore[operator]
                return phase
        return self.phases[-1]

    def size(self, step: int) -> int:
        draw = self.phase(step).draw
        if len(draw) == 1:
            return next(iter(draw))
        number = size_number(self.seed, step)
        items = sorted(draw)  # not the order of the file: a reordered table draws the same
        return weighted_choice(number, items, [draw[size] for size in items])

    def batch(self, step: int) -> int:
        return self.batches[self.size(step)]


class Step(NamedTuple):
    """Everything that is decided about a step before it runs."""

    number: int
    """0 for the first."""
    size: int
    """Image side in pixels."""
    batch: int
    """Images, over all processes."""
    budgets: tuple[int, ...]
    lr: float


class Plan:
    """All steps of a run."""

    def __init__(
        self,
        sizes: SizeSchedule,
        budgets: BudgetSampler,
        *,
        steps: int,
        warmup: int,
        lr: float,
        lr_min: float,
        cooldown: int = 0,
    ) -> None:
        if cooldown and (warmup + cooldown > steps or cooldown == steps):
            raise DistillError(
                f"a warm-up of {warmup} steps and a cool-down of {cooldown} do not fit into "
                f"{steps} steps."
            )
        self.sizes, self.budgets = sizes, budgets
        self.steps, self.warmup, self.cooldown = steps, warmup, cooldown
        self.lr, self.lr_min = lr, lr_min

    def step(self, number: int) -> Step:
        lr = learning_rate(
            number,
            steps=self.steps,
            warmup=self.warmup,
            lr=self.lr,
            lr_min=self.lr_min,
            cooldown=self.cooldown,
        )
        size = self.sizes.size(number)
        return Step(number, size, self.sizes.batches[size], self.budgets.draw(number), lr)

    def from_step(self, number: int) -> Iterator[Step]:
        return map(self.step, range(number, self.steps))
