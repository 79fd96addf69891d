"""A run in words, before it begins: what it will do, the memory it will take, and whether one batch
works. Writes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from veca._util.memory import peak_tensor_memory
from veca._util.numbers import count
from veca.cost import cost
from veca.distill.config import DistillConfig
from veca.distill.data import Images, ImageSplit, open_data, training_loader
from veca.distill.parallel import World, launch, own_torch_state
from veca.distill.schedule import TrainingPlan, build_plan
from veca.distill.step import training_step
from veca.distill.teachers import Teachers, open_teachers, scale_targets
from veca.distill.trainer import StudentGroup, StudentTrainer
from veca.teachers.base import Teacher

# Numbers kept for each parameter beside itself and its gradient.
_STATES = {"normuon": 1, "muon": 1, "adamw": 2}


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
        frozen = open_teachers(config, world, teachers)
        group = StudentGroup(config, frozen, world)
        plan = build_plan(config, group.main.architecture, data.images, world)
        group.prepare(plan)
        loader = training_loader(config, data, plan, group.teacher_size, world)
        memory = estimate_memory(config, plan, group, data.source)
        lines = describe(config, plan, group, data, world)

        # One batch is enough to see whether it works; the real run takes as many as set.
        patch = group.main.architecture.patch_size
        scale_targets(config, frozen, loader, plan, patch, world, most=2)

        size = max(plan.sizes.sizes, key=lambda s: s * s * plan.sizes.batches[s])
        step = plan.step(0)._replace(
            size=size,
            batch=plan.sizes.batches[size],
            budgets=plan.budgets.budgets[-config.nested.per_step :],
            keep=max(plan.keep.shares),
        )
        batch = loader.batch(
            0, size=size, teacher_size=group.teacher_size(size), batch_size=step.batch
        )
        begun = time.monotonic()
        (terms, _), peak = peak_tensor_memory(
            lambda: training_step(group, step, batch), world.device
        )
        loss = float(world.mean(terms)[0])
        seconds = time.monotonic() - begun
        loader.close()
    parts = {
        "weights and optimiser": memory.weights,
        "the student's activations": memory.student,
        "targets and loss": memory.targets,
        "images": memory.images,
    }
    counted = ", ".join(f"{name} {in_bytes(taken)}" for name, taken in parts.items())
    budget = f" with {step.budgets[-1]} cores" if group.elastic else ""
    measured = f", peak {in_bytes(peak)} beside the weights" if math.isfinite(peak) else ""
    lines += [
        f"memory on a process, counted: {in_bytes(memory.total)} ({counted})",
        f"tried one batch of {step.batch} at {size} px{budget}: loss {loss:.4f}, {seconds:.1f} s "
        f"(first of its kind, so slow){measured}",
    ]
    return DryRun(lines, memory, loss, seconds, peak)


# ------------------------------------------------------------------------- in words, in bytes


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


def describe(
    config: DistillConfig,
    plan: TrainingPlan,
    group: StudentGroup,
    data: ImageSplit,
    world: World,
    done: int = 0,
) -> list[str]:
    """The run in words, one fact a line; `done` steps of it were done before."""
    teachers = group.teachers
    sizes = ", ".join(f"{size} px x {plan.sizes.batches[size]}" for size in plan.sizes.sizes)
    budgets = ", ".join(map(str, plan.budgets.budgets))
    budgets += f"; {plan.budgets.per_step} a step"
    if plan.budgets.always:
        budgets += f", {', '.join(map(str, plan.budgets.always))} in each"
    if plan.keep.merging:
        budgets += f"; keep {', '.join(map(str, plan.keep.shares))}"
    o = config.optimizer
    samples = sum(plan.sizes.batch(step) for step in range(min(plan.steps, 1000)))
    samples = round(samples * plan.steps / max(1, min(plan.steps, 1000)))
    precision = "bfloat16 autocast" if group.main.half else "float32"
    cooling = f", {plan.cooldown:,} of cool-down" if plan.cooldown else ""
    processes = count(world.size, "process", "processes")
    together = "" if world.kind == "none" else f" together by {world.kind}"
    return [
        *(_student_line(name, trainer, done) for name, trainer in group.trainers.items()),
        *(_teacher_line(teachers, i) for i in range(len(teachers))),
        f"images: {data.images:,} to train on; validation: {data.split}",
        f"steps: {plan.steps:,} ({plan.warmup:,} of warm-up{cooling}), about {samples:,} samples, "
        f"{samples / data.images:.1f} passes; a step is {sizes}",
        *([f"budgets: {budgets}"] if group.elastic else []),
        f"optimiser: {o.name}, learning rate {o.lr:g} to {o.lr_min:g}, weight decay "
        f"{o.weight_decay:g}",
        f"device: {world.device}, {processes}{together}, {precision}",
    ]


def _student_line(name: str, trainer: StudentTrainer, done: int) -> str:
    c = trainer.architecture
    start = f"from {trainer.settings.init}" if trainer.settings.init else "fresh"
    if trainer.initial.patch_from:
        start += f", patch convolution of {trainer.initial.patch_from}"
    if done:
        start = f"after {done:,} steps"
    tokens = "full attention" if trainer.dense else f"{c.num_cores} cores"
    parameters = sum(p.numel() for p in trainer.student.parameters())
    s = trainer.settings
    if (s.lr_scale, s.adamw_scale) != (1.0, 1.0):
        start += f", learning rate x {s.lr_scale:g}, of AdamW x {s.lr_scale * s.adamw_scale:g}"
    return (
        f"{f'sibling {name}' if name else 'student'}: {c.depth} layers, width {c.width}, {tokens}, "
        f"features of width {c.feature_width}, {parameters / 1e6:.1f} M parameters ({start})"
    )


def _teacher_line(teachers: Teachers, place: int) -> str:
    teacher = teachers[place]
    t = teacher.model
    parts = [f"width {t.width}", f"stride {t.stride}", f"licence {t.licence}"]
    parts += ["standardised"] if teacher.settings.standardise else []
    parts += [f"global feature at {teacher.global_size} px"] if teacher.global_size else []
    parts += [f"KL x {teacher.settings.kl:g}"] if teacher.settings.kl else []
    parts += [f"weight {teacher.settings.weight:g}"] if len(teachers) > 1 else []
    return f"teacher: {teacher.name}, {', '.join(parts)}"


def estimate_memory(
    config: DistillConfig, plan: TrainingPlan, group: StudentGroup, source: Images
) -> MemoryEstimate:
    """Bytes on one process's device at the largest step."""
    world, teachers = group.world, group.teachers
    copies = 2 + _STATES[config.optimizer.name] + bool(config.ema)
    shards = world.size if world.kind == "fsdp" else 1
    weights = 0
    for trainer in group.trainers.values():
        parameters = sum(p.numel() for p in trainer.initial.student.parameters())
        weights += parameters * 4 * copies // shards
    for teacher in teachers:
        weights += sum(p.numel() * p.element_size() for p in teacher.model.parameters())

    targets = images = places = 0
    activations = dict.fromkeys(group.trainers, 0)
    recorded = [name for name, trainer in group.trainers.items() if trainer.settings.graphs]
    number = 2 if group.main.half else 4
    patch = group.main.architecture.patch_size
    dense = sum(teacher.model.dense_width for teacher in teachers)
    for size in plan.sizes.sizes:
        batch = plan.sizes.batches[size] // world.size
        o = config.optimizer
        part = -(-batch // o.accumulate_by_size.get(size, o.accumulate))
        for name, trainer in group.trainers.items():
            activations[name] = max(activations[name], part * _kept(trainer, size, plan, number))
        # Where recorded passes read their images and targets.
        places += len(recorded) * part * (3 * size * size + (size // patch) ** 2 * dense) * 4
        # The prediction, its float32 copy and gradient, the target, and its standardised copy.
        targets = max(targets, part * (size // patch) ** 2 * dense * (number + 4 * 4))
        height, width = group.teacher_size(size)
        pixels = size * size + (height * width if (height, width) != (size, size) else 0)
        images = max(images, batch * 3 * pixels * 4 * 2)
    stored = getattr(source, "images", None)
    if stored is not None and stored.device.type != "cpu":
        images += stored.numel()
    # Students learn one after the other and keep nothing, but for the memory of recorded passes.
    passing = max((kept for name, kept in activations.items() if name not in recorded), default=0)
    student = sum(activations[name] for name in recorded) + passing
    return MemoryEstimate(weights, student, targets + places, images)


def _kept(trainer: StudentTrainer, size: int, plan: TrainingPlan, number: int) -> int:
    """Bytes of activations that one image leaves for the backward pass."""
    c = trainer.architecture
    budget = min(plan.budgets.budgets[-1], c.num_cores)
    both = cost(c, size, budget, bytes_per_number=number)
    one = both.dense if trainer.dense else both.veca
    if trainer.settings.gradient_checkpointing:
        return one.training_bytes // c.depth + c.depth * one.tokens * c.width * number
    return one.training_bytes


def in_bytes(count: float) -> str:
    """'1.5 GiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
