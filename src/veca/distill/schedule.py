"""What is decided about each step before it runs: learning rate, image size, batch, budgets, keep.

Random choices are pure functions of the seed and the step: every rank draws the same, and a run
that resumes draws what the uninterrupted one would have. Stage 1 is one phase with one size;
stage 2 is phases that draw a size each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from veca.checks import check_keep
from veca.config import VecaConfig
from veca.data.draws import sample_keys, uniform
from veca.data.mixing import check_pairs
from veca.distill.config import DistillConfig, Phase
from veca.distill.parallel import World
from veca.errors import DistillError, InputError

T = TypeVar("T")

PUBLISHED_WEIGHTS = (1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0)

# One number for each kind of draw, so that none tells anything about another.
_BUDGET, _SIZE, _TORCH, _KEEP = 1, 2, 3, 4


class StepPlan(NamedTuple):
    """Everything that is decided about a step before it runs."""

    number: int
    """0 for the first."""
    size: int
    """Image side in pixels."""
    batch: int
    """Images, over all processes."""
    budgets: tuple[int, ...]
    lr: float
    keep: float = 1.0
    """Share of patch tokens that go on after merging."""


class TrainingPlan:
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
        keep: KeepSampler | None = None,
    ) -> None:
        if cooldown and (warmup + cooldown > steps or cooldown == steps):
            raise DistillError(
                f"a warm-up of {warmup} steps and a cool-down of {cooldown} do not fit into "
                f"{steps} steps."
            )
        self.sizes, self.budgets, self.keep = sizes, budgets, keep or KeepSampler()
        self.steps, self.warmup, self.cooldown = steps, warmup, cooldown
        self.lr, self.lr_min = lr, lr_min

    def step(self, number: int) -> StepPlan:
        lr = learning_rate(
            number,
            steps=self.steps,
            warmup=self.warmup,
            lr=self.lr,
            lr_min=self.lr_min,
            cooldown=self.cooldown,
        )
        size = self.sizes.size(number)
        batch, budgets = self.sizes.batches[size], self.budgets.draw(number)
        return StepPlan(number, size, batch, budgets, lr, self.keep.draw(number))

    def from_step(self, number: int) -> Iterator[StepPlan]:
        return map(self.step, range(number, self.steps))


def build_plan(
    config: DistillConfig, architecture: VecaConfig, images: int, world: World
) -> TrainingPlan:
    """The plan of all steps, checked against the student, the images and the processes."""
    s, o = config.schedule, config.optimizer
    sizes = SizeSchedule(config.phases, s.batch, s.batch_by_size, seed=config.seed)
    patch = architecture.patch_size
    for size in sizes.sizes:
        if size < patch or size % patch:
            raise DistillError(
                f"image sizes must be multiples of the patch size {patch}, got {size}."
            )
        if sizes.batches[size] % world.size:
            raise DistillError(
                f"a batch of {sizes.batches[size]} images ({size} px) does not split evenly among "
                f"{world.size} processes; use a multiple of {world.size}."
            )
        if config.data.augment.mixing:
            check_pairs(sizes.batches[size], world.size)
    one = set(sizes.batches.values())
    if (s.epochs or s.warmup_epochs) and len(one) > 1:
        raise DistillError("epochs need one batch for all sizes; give steps instead.")
    batches = images / next(iter(one))
    steps = s.steps or max(1, round(s.epochs * batches))
    warmup = s.warmup or round(s.warmup_epochs * batches)
    budgets = BudgetSampler(
        architecture.num_cores,
        config.nested.budgets,
        config.nested.weights,
        per_step=config.nested.per_step,
        always=config.nested.always,
        seed=config.seed,
    )
    return TrainingPlan(
        sizes,
        budgets,
        steps=steps,
        warmup=warmup,
        lr=o.lr,
        lr_min=o.lr_min,
        cooldown=s.cooldown,
        keep=KeepSampler(config.nested.keep, config.nested.keep_weights, seed=config.seed),
    )


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


class BudgetSampler:
    """Nested dropout along the core axis: draws the budgets of a step, the same on every rank.

    The whole batch runs on the prefix of the first C cores. Small budgets come less often but
    reach every core's neighbours, so that the order of the bank means something: the first cores
    learn what matters most.

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
        self.budgets = tuple(budgets) or training_budgets(num_cores)
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


class KeepSampler:
    """Draws the share of patch tokens that go on in a step, the same on every rank.

    As with budgets, one set of weights then serves every share.

    Args:
        keep: shares from 0.2 to 1, all different; empty for 1 alone: nothing merges.
        weights: how often each, in any unit; empty for all alike.
    """

    def __init__(
        self, keep: Sequence[float] = (), weights: Sequence[float] = (), *, seed: int = 0
    ) -> None:
        self.shares = checked_keep("nested.keep", keep) or (1.0,)
        self.weights = tuple(float(w) for w in weights) or (1.0,) * len(self.shares)
        self.seed = seed
        good = all(math.isfinite(w) and w >= 0 for w in self.weights) and any(self.weights)
        if len(self.weights) != len(self.shares) or not good:
            raise DistillError(
                f"nested.keep_weights must be {len(self.shares)} numbers of at least 0 and not all "
                f"0, one for each of {list(self.shares)}; got {list(weights)}."
            )

    @property
    def merging(self) -> tuple[float, ...]:
        """The shares that can come and make windows merge."""
        pairs = zip(self.shares, self.weights, strict=True)
        return tuple(share for share, weight in pairs if weight and share < 1)

    def draw(self, step: int) -> float:
        """The share of one step."""
        if len(self.shares) == 1:
            return self.shares[0]
        # Not the order of the file: a reordered list draws the same.
        pairs = sorted(zip(self.shares, self.weights, strict=True))
        return weighted_choice(keep_number(self.seed, step), *map(list, zip(*pairs, strict=True)))


def checked_keep(where: str, keep: Sequence[float]) -> tuple[float, ...]:
    """Shares of patch tokens that a setting lists, each of them possible and there once."""
    try:
        shares = tuple(check_keep(share) for share in keep)
    except InputError as error:
        raise DistillError(f"{where}: {error}") from None
    if len(set(shares)) < len(shares):
        raise DistillError(f"{where} must be different shares, got {list(keep)}.")
    return shares


def training_budgets(num_cores: int) -> tuple[int, ...]:
    """Eighths of the bank, rounded up, without repeats: the published ones for 64 cores."""
    return tuple(sorted({-(-num_cores * eighth // 8) for eighth in range(1, 9)}))


# -------------------------------------------------------------------------------------- draws


def weighted_choice(number: float, items: Sequence[T], weights: Sequence[float]) -> T:
    """The item that `number`, uniform in [0, 1), falls on when items get room by weight."""
    target = number * sum(weights)
    for item, weight in zip(items, weights, strict=True):
        target -= weight
        if target < 0:
            return item
    return [item for item, weight in zip(items, weights, strict=True) if weight > 0][-1]


def budget_number(seed: int, step: int, draw: int) -> float:
    """Uniform in [0, 1), for the `draw`-th budget of a step."""
    return _uniform(seed, step, _BUDGET, draw)


def size_number(seed: int, step: int) -> float:
    """Uniform in [0, 1), for the image size of a step."""
    return _uniform(seed, step, _SIZE, 0)


def keep_number(seed: int, step: int) -> float:
    """Uniform in [0, 1), for the share of patch tokens of a step."""
    return _uniform(seed, step, _KEEP, 0)


def seed_torch(seed: int, step: int, draw: int = 0) -> None:
    """Put torch's generators where the `draw`-th pass of a step begins.

    The student's own random numbers follow from there: the same for every part of the batch, so
    that splitting it among ranks or in time changes nothing.
    """
    number = int(_uniform(seed, step, _TORCH, draw) * 2**53)
    torch.manual_seed(number)


def _uniform(seed: int, step: int, kind: int, draw: int) -> float:
    return float(uniform(sample_keys(seed, step, kind), draw)[0])
