"""Whether a run can go on from a checkpoint, and what will be different from then on."""

from __future__ import annotations

import contextlib
from typing import Any

from veca._util.settings import flat
from veca.distill.checkpoint import Checkpoint
from veca.distill.cohort import Cohort
from veca.distill.config import DistillConfig
from veca.distill.schedule import Plan
from veca.distill.setup import TRAINING_FIELDS
from veca.distill.teaching import Teaching
from veca.errors import DistillError

_FREE = ("follow", "max_minutes", "device", "parallel", "checkpoint", "validation")
"""Settings that no curve depends on."""


def check_resume(checkpoint: Checkpoint, config: DistillConfig, cohort: Cohort, plan: Plan) -> None:
    """Refuse to go on with another student, other teachers, another optimiser or a rate that rises.

    Raises:
        DistillError: says what differs.
    """
    about = checkpoint.about
    for student, trainer in cohort.trainers.items():
        stored = about["siblings"].get(student, {}) if student else about
        mine = {"dense": trainer.dense, **trainer.architecture.to_dict()}
        known = {"dense": stored.get("dense"), **stored.get("architecture", {})}
        different = [
            name for name in mine if known.get(name) != mine[name] and name not in TRAINING_FIELDS
        ]
        if stored and different:
            name = different[0]
            raise DistillError(
                f"{checkpoint.path} belongs to another architecture: its {name} is "
                f"{known.get(name)!r}, here it is {mine[name]!r}; resume with the settings it "
                "was made with, or choose another --out."
            )
    teaching = cohort.teaching
    for what, theirs, ours in (
        ("siblings", sorted(about["siblings"]), sorted(config.siblings)),
        ("optimizer", about["optimizer"], config.optimizer.name),
        ("teachers", about["teachers"], [lesson.name for lesson in teaching.lessons]),
        ("seed", about["seed"], config.seed),
        ("standardised teachers", about["provenance"]["standardised"], _standardised(teaching)),
        *_global_sizes(teaching, about["provenance"]),
    ):
        if theirs != ours:
            raise DistillError(
                f"{checkpoint.path} was made with {what} {theirs!r}, here it is {ours!r}; "
                "resume with the same, or choose another --out."
            )
    _check_cooldown(checkpoint, plan)


def _check_cooldown(checkpoint: Checkpoint, plan: Plan) -> None:
    """Refuse a new plan for a run that has begun to cool down: its rate would rise again."""
    about, out = checkpoint.about, str(checkpoint.path.parents[1])
    steps = int(about["provenance"]["steps_planned"])
    cooldown = int(about["config"]["schedule"].get("cooldown", 0))
    begun, same = steps - cooldown, (plan.steps, plan.cooldown) == (steps, cooldown)
    if cooldown and checkpoint.step > begun and not same:
        raise DistillError(
            f"{out} has been cooling down since step {begun} of {steps}, and {plan.steps} steps "
            f"with a cool-down of {plan.cooldown} are another plan; start a new run from that "
            f'step: veca.distill.export_checkpoint({out!r}, "trunk", which={begun}), then --set '
            "student.init=trunk --set schedule.warmup=0."
        )


def _standardised(teaching: Teaching) -> list[str]:
    """The teachers whose targets are: the student would not notice, but would learn others."""
    return sorted(lesson.name for lesson in teaching.lessons if lesson.settings.standardise)


def _global_sizes(teaching: Teaching, provenance: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Sizes of the global features there and here: with another the targets' scale is wrong."""
    return [
        (f"{lesson.name}'s global_size", stored, lesson.global_size)
        for lesson in teaching.lessons
        if (stored := lesson.global_size_of(provenance)) is not None
    ]


def changed_settings(before: dict[str, Any], config: DistillConfig) -> list[str]:
    """The settings that differ from those of a checkpoint, in words: the curve will too."""
    with contextlib.suppress(DistillError):  # settings added since had their defaults then
        before = DistillConfig.from_dict(before).to_dict()
    old, new = (flat(table) for table in (before, config.to_dict()))
    return [
        f"{name} {old.get(name)} -> {new.get(name)}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name) and name.split(".")[0] not in _FREE
    ]
