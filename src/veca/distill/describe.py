"""A run in words: what it will do, and the memory it will take."""

from __future__ import annotations

from dataclasses import dataclass

from veca.cost import cost
from veca.distill.config import DistillConfig
from veca.distill.parallel import World
from veca.distill.schedule import Plan
from veca.distill.setup import Data, Images
from veca.distill.teaching import Teaching
from veca.distill.trainer import Trainer

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


def describe(
    config: DistillConfig, plan: Plan, trainer: Trainer, data: Data, world: World
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
        f"images: {data.images:,} to train on; validation: {data.split}",
        f"steps: {plan.steps:,} ({plan.warmup:,} of warm-up), about {samples:,} samples, "
        f"{samples / data.images:.1f} passes; a step is {sizes}",
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
        o = config.optimizer
        part = -(-batch // o.accumulate_by_size.get(size, o.accumulate))
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


def in_bytes(count: float) -> str:
    """'1.5 GiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
