"""What a run would do, what memory it would take, and whether one batch works. Writes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from veca.cost import cost
from veca.distill.config import DistillConfig
from veca.distill.parallel import World, launch, own_torch_state
from veca.distill.schedule import Plan
from veca.distill.setup import (
    Images,
    build_plan,
    estimate_statistics,
    known_statistics,
    open_data,
    open_teachers,
    training_loader,
)
from veca.distill.teaching import Teaching
from veca.distill.trainer import Trainer
from veca.memory import peak_tensor_memory
from veca.teachers.base import Teacher

# Numbers kept for each parameter beside itself and its gradient.
_STATES = {"normuon": 1, "muon": 1, "adamw": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one process's device at the largest step; counted, not measured."""

    weights: int
    """The student with gradients, optimiser states and average; and the teachers."""
    student: int
    """Activations the student keeps for its backward pass."""
    targets: int
    """Predictions, targets and what the loss makes of them."""
    images: int
    """Pixels of the batch, and the images kept in memory."""

    @property
    def total(self) -> int:
        return self.weights + self.student + self.targets + self.images


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
        trainer = Trainer(config, teaching, world)
        plan = build_plan(config, trainer.architecture, data.images, world)
        trainer.prepare(plan)
        loader = training_loader(config, data, plan, trainer.teacher_size, world)
        memory = estimate_memory(config, plan, trainer, data.source)
        lines = describe(config, plan, trainer, data.images, data.split, world)

        teaching.set_statistics(known_statistics(config, teaching), world.device)
        patch = trainer.architecture.patch_size
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
            0, size=size, teacher_size=trainer.teacher_size(size), batch_size=step.batch
        )
        begun = time.monotonic()
        (terms, _), peak = peak_tensor_memory(lambda: trainer.step(step, batch), world.device)
        loss = float(world.mean(terms)[0])
        seconds = time.monotonic() - begun
        loader.close()
    lines += [
        f"memory on a process, counted: {_bytes(memory.total)} (weights and optimiser "
        f"{_bytes(memory.weights)}, student's activations {_bytes(memory.student)}, targets and "
        f"loss {_bytes(memory.targets)}, images {_bytes(memory.images)}); a little more is needed",
        f"tried one batch of {step.batch} at {size} px with {step.budgets[-1]} cores: loss "
        f"{loss:.4f}, {seconds:.1f} s (first of its kind, so slow)"
        + (f", peak {_bytes(peak)} beside the weights" if peak == peak else ""),
    ]
    return DryRun(lines, memory, loss, seconds, peak)


def describe(
    config: DistillConfig, plan: Plan, trainer: Trainer, images: int, split: str, world: World
) -> list[str]:
    """The run in words, one fact a line."""
    c, teaching = trainer.architecture, trainer.teaching
    parameters = sum(p.numel() for p in trainer.student.parameters())
    sizes = ", ".join(f"{size} px x {plan.sizes.batches[size]}" for size in plan.sizes.sizes)
    budgets = ", ".join(map(str, plan.budgets.budgets))
    o = config.optimizer
    samples = sum(plan.sizes.batch(step) for step in range(min(plan.steps, 1000)))
    samples = round(samples * plan.steps / max(1, min(plan.steps, 1000)))
    start = f"from {config.student.init}" if config.student.init else "fresh"
    if trainer.start.patch_from:
        start += f", patch convolution of {trainer.start.patch_from}"
    precision = "bfloat16 autocast" if trainer.half else "float32"
    return [
        f"student: {c.depth} layers, width {c.width}, {c.num_cores} cores, features of width "
        f"{c.feature_width}, {parameters / 1e6:.1f} M parameters ({start})",
        *(_teacher_line(teaching, i) for i in range(len(teaching.lessons))),
        f"images: {images:,} to train on; validation: {split}",
        f"steps: {plan.steps:,} ({plan.warmup:,} of warm-up), about {samples:,} samples, "
        f"{samples / images:.1f} passes; a step is {sizes}",
        f"budgets: {budgets}, {config.nested.per_step} a step",
        f"optimiser: {o.name}, learning rate {o.lr:g} to {o.lr_min:g}, weight decay "
        f"{o.weight_decay:g}",
        f"device: {world.device}, {world.size} process(es), {world.kind}, {precision}",
    ]


def _teacher_line(teaching: Teaching, place: int) -> str:
    lesson = teaching.lessons[place]
    t = lesson.teacher
    parts = [f"width {t.width}", f"stride {t.stride}", f"licence {t.licence}"]
    parts += ["standardised"] if lesson.settings.standardise else []
    parts += [f"KL x {lesson.settings.kl:g}"] if lesson.settings.kl else []
    parts += [f"weight {lesson.settings.weight:g}"] if len(teaching.lessons) > 1 else []
    return f"teacher: {lesson.name}, {', '.join(parts)}"


def estimate_memory(
    config: DistillConfig, plan: Plan, trainer: Trainer, source: Images
) -> MemoryEstimate:
    """Bytes on one process's device at the largest step."""
    c, world = trainer.architecture, trainer.world
    number = 2 if trainer.half else 4
    copies = 2 + _STATES[config.optimizer.name] + bool(config.ema)
    parameters = sum(p.numel() for p in trainer.start.student.parameters())
    shards = world.size if world.kind == "fsdp" else 1
    weights = parameters * 4 * copies // shards
    for lesson in trainer.teaching.lessons:
        weights += sum(p.numel() * p.element_size() for p in lesson.teacher.parameters())

    student = targets = images = 0
    for size in plan.sizes.sizes:
        batch = plan.sizes.batches[size] // world.size
        part = -(-batch // config.optimizer.accumulate)
        cells = (size // c.patch_size) ** 2
        one = cost(c, size, plan.budgets.budgets[-1], bytes_per_number=number).veca
        kept = one.training_bytes
        if config.student.gradient_checkpointing:
            kept = kept // c.depth + c.depth * one.tokens * c.width * number
        student = max(student, part * kept)
        dense = sum(lesson.teacher.dense_width for lesson in trainer.teaching.lessons)
        # The prediction, its float32 copy and gradient, the target, and its standardised copy.
        targets = max(targets, part * cells * dense * (number + 4 * 4))
        height, width = trainer.teacher_size(size)
        pixels = size * size + (height * width if (height, width) != (size, size) else 0)
        images = max(images, batch * 3 * pixels * 4 * 2)
    stored = getattr(source, "images", None)
    if stored is not None and stored.device.type != "cpu":
        images += stored.numel()
    return MemoryEstimate(weights, student, targets, images)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
