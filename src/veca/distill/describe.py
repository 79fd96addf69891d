"""A run in words: what it will do, and the memory it will take."""

from __future__ import annotations

from dataclasses import dataclass

from veca.cost import cost
from veca.distill.cohort import Cohort
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
    config: DistillConfig, plan: Plan, cohort: Cohort, data: Data, world: World, done: int = 0
) -> list[str]:
    """The run in words, one fact a line; `done` steps of it were done before."""
    teaching = cohort.teaching
    sizes = ", ".join(f"{size} px x {plan.sizes.batches[size]}" for size in plan.sizes.sizes)
    budgets = ", ".join(map(str, plan.budgets.budgets))
    budgets += f"; {plan.budgets.per_step} a step"
    if plan.budgets.always:
        budgets += f", {', '.join(map(str, plan.budgets.always))} in each"
    o = config.optimizer
    samples = sum(plan.sizes.batch(step) for step in range(min(plan.steps, 1000)))
    samples = round(samples * plan.steps / max(1, min(plan.steps, 1000)))
    precision = "bfloat16 autocast" if cohort.main.half else "float32"
    cooling = f", {plan.cooldown:,} of cool-down" if plan.cooldown else ""
    return [
        *(_student_line(name, trainer, done) for name, trainer in cohort.trainers.items()),
        *(_teacher_line(teaching, i) for i in range(len(teaching.lessons))),
        f"images: {data.images:,} to train on; validation: {data.split}",
        f"steps: {plan.steps:,} ({plan.warmup:,} of warm-up{cooling}), about {samples:,} samples, "
        f"{samples / data.images:.1f} passes; a step is {sizes}",
        *([f"budgets: {budgets}"] if cohort.elastic else []),
        f"optimiser: {o.name}, learning rate {o.lr:g} to {o.lr_min:g}, weight decay "
        f"{o.weight_decay:g}",
        f"device: {world.device}, {world.size} process(es), {world.kind}, {precision}",
    ]


def _student_line(name: str, trainer: Trainer, done: int) -> str:
    c = trainer.architecture
    start = f"from {trainer.settings.init}" if trainer.settings.init else "fresh"
    if trainer.start.patch_from:
        start += f", patch convolution of {trainer.start.patch_from}"
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


def _teacher_line(teaching: Teaching, place: int) -> str:
    lesson = teaching.lessons[place]
    t = lesson.teacher
    parts = [f"width {t.width}", f"stride {t.stride}", f"licence {t.licence}"]
    parts += ["standardised"] if lesson.settings.standardise else []
    parts += [f"global feature at {lesson.global_size} px"] if lesson.global_size else []
    parts += [f"KL x {lesson.settings.kl:g}"] if lesson.settings.kl else []
    parts += [f"weight {lesson.settings.weight:g}"] if len(teaching.lessons) > 1 else []
    return f"teacher: {lesson.name}, {', '.join(parts)}"


def estimate_memory(
    config: DistillConfig, plan: Plan, cohort: Cohort, source: Images
) -> MemoryEstimate:
    """Bytes on one process's device at the largest step."""
    world, teaching = cohort.world, cohort.teaching
    copies = 2 + _STATES[config.optimizer.name] + bool(config.ema)
    shards = world.size if world.kind == "fsdp" else 1
    weights = 0
    for trainer in cohort.trainers.values():
        parameters = sum(p.numel() for p in trainer.start.student.parameters())
        weights += parameters * 4 * copies // shards
    for lesson in teaching.lessons:
        weights += sum(p.numel() * p.element_size() for p in lesson.teacher.parameters())

    targets = images = places = 0
    activations = dict.fromkeys(cohort.trainers, 0)
    recorded = [name for name, trainer in cohort.trainers.items() if trainer.settings.graphs]
    number = 2 if cohort.main.half else 4
    patch = cohort.main.architecture.patch_size
    dense = sum(lesson.teacher.dense_width for lesson in teaching.lessons)
    for size in plan.sizes.sizes:
        batch = plan.sizes.batches[size] // world.size
        o = config.optimizer
        part = -(-batch // o.accumulate_by_size.get(size, o.accumulate))
        for name, trainer in cohort.trainers.items():
            activations[name] = max(activations[name], part * _kept(trainer, size, plan, number))
        # Where recorded passes read their images and targets.
        places += len(recorded) * part * (3 * size * size + (size // patch) ** 2 * dense) * 4
        # The prediction, its float32 copy and gradient, the target, and its standardised copy.
        targets = max(targets, part * (size // patch) ** 2 * dense * (number + 4 * 4))
        height, width = cohort.teacher_size(size)
        pixels = size * size + (height * width if (height, width) != (size, size) else 0)
        images = max(images, batch * 3 * pixels * 4 * 2)
    stored = getattr(source, "images", None)
    if stored is not None and stored.device.type != "cpu":
        images += stored.numel()
    # Students learn one after the other and keep nothing, but for the memory of recorded passes.
    passing = max((kept for name, kept in activations.items() if name not in recorded), default=0)
    student = sum(activations[name] for name in recorded) + passing
    return MemoryEstimate(weights, student, targets + places, images)


def _kept(trainer: Trainer, size: int, plan: Plan, number: int) -> int:
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
