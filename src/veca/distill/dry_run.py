"""What a run would do, what memory it would take, and whether one batch works. Writes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from veca._util.memory import peak_tensor_memory
from veca.distill.cohort import Cohort
from veca.distill.config import DistillConfig
from veca.distill.describe import MemoryEstimate, describe, estimate_memory, in_bytes
from veca.distill.parallel import launch, own_torch_state
from veca.distill.setup import (
    Images,
    build_plan,
    estimate_statistics,
    known_statistics,
    open_data,
    open_teachers,
    training_loader,
)
from veca.teachers.base import Teacher


@dataclass(frozen=True)
class DryRun:
    """What was found; `lines` says it in words."""

    lines: list[str]
    memory: MemoryEstimate
    loss: float
    """Of the one batch that was tried."""
    seconds: float
    peak_bytes: float
    """Measured while it ran; NaN where the device does not tell."""


def dry_run(
    config: DistillConfig,
    *,
    source: Images = None,
    validation: Images = None,
    teachers: Sequence[Teacher] | None = None,
) -> DryRun:
    """Set everything up, try the largest batch once, and forget it."""
    with launch(config.parallel, config.device) as world, own_torch_state(world.device):
        data = open_data(config.data, world, source=source, validation=validation)
        teaching = open_teachers(config, world, teachers)
        cohort = Cohort(config, teaching, world)
        plan = build_plan(config, cohort.main.architecture, data.images, world)
        cohort.prepare(plan)
        loader = training_loader(config, data, plan, cohort.teacher_size, world)
        memory = estimate_memory(config, plan, cohort, data.source)
        lines = describe(config, plan, cohort, data, world)

        teaching.set_statistics(known_statistics(config, teaching), world.device)
        patch = cohort.main.architecture.patch_size
        # One batch is enough to see whether it works; the real run takes as many as set.
        statistics = estimate_statistics(teaching, loader, plan, patch, world, most=2)
        teaching.set_statistics(statistics, world.device)

        size = max(plan.sizes.sizes, key=lambda s: s * s * plan.sizes.batches[s])
        step = plan.step(0)._replace(
            size=size,
            batch=plan.sizes.batches[size],
            budgets=plan.budgets.budgets[-config.nested.per_step :],
        )
        batch = loader.batch(
            0, size=size, teacher_size=cohort.teacher_size(size), batch_size=step.batch
        )
        begun = time.monotonic()
        (terms, _), peak = peak_tensor_memory(lambda: cohort.step(step, batch), world.device)
        loss = float(world.mean(terms)[0])
        seconds = time.monotonic() - begun
        loader.close()
    parts = {
        "weights and optimiser": memory.weights,
        "the student's activations": memory.student,
        "targets and loss": memory.targets,
        "images": memory.images,
    }
    counted = ", ".join(f"{name} {in_bytes(count)}" for name, count in parts.items())
    budget = f" with {step.budgets[-1]} cores" if cohort.elastic else ""
    measured = f", peak {in_bytes(peak)} beside the weights" if math.isfinite(peak) else ""
    lines += [
        f"memory on a process, counted: {in_bytes(memory.total)} ({counted})",
        f"tried one batch of {step.batch} at {size} px{budget}: loss {loss:.4f}, {seconds:.1f} s "
        f"(first of its kind, so slow){measured}",
    ]
    return DryRun(lines, memory, loss, seconds, peak)
