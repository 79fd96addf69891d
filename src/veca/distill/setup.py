"""From settings to the parts of a run: images, teachers, student, plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from veca._util.cache import cache_folder
from veca.config import VecaConfig
from veca.data import (
    AugmentConfig,
    BatchPlan,
    DataError,
    InMemoryImages,
    Loader,
    hold_out,
    open_source,
)
from veca.data.faults import OnBad
from veca.data.mixing import check_pairs
from veca.dense import DenseVit
from veca.distill import samples
from veca.distill.config import DataConfig, DistillConfig, StudentConfig, TeacherConfig
from veca.distill.nested import BudgetSampler
from veca.distill.parallel import World
from veca.distill.schedule import Plan, SizeSchedule
from veca.distill.standardise import (
    FILE as TARGETS,
)
from veca.distill.standardise import RunningMoments, TargetStatistics, find_targets
from veca.distill.student import (
    Student,
    load_backbone,
    load_heads,
    student_config,
    take_patch_embedding,
)
from veca.distill.teaching import Lesson, Teaching
from veca.errors import DistillError, suggest
from veca.model import Veca, create_model
from veca.teachers import read_dense_vit
from veca.teachers.base import Teacher
from veca.weights import read_provenance

Images = Any
"""Whatever `veca.data.open_source` takes, or `InMemoryImages`."""

TRAINING_FIELDS = ("rope_shift", "rope_jitter", "rope_rescale")
"""Fields of `VecaConfig` that matter in training alone, so that stored weights can change them."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# --------------------------------------------------------------------------------------- images


@dataclass
class Data:
    """Training images, and others that are never trained on."""

    source: Images
    subset: Sequence[int] | None
    """Places of the training images; None for all."""
    validation: Images | None
    validation_subset: Sequence[int] | None
    split: str
    """The split in words."""

    @property
    def images(self) -> int:
        """How many are trained on."""
        return len(self.source if self.subset is None else self.subset)


def open_data(
    config: DataConfig, world: World, *, source: Images = None, validation: Images = None
) -> Data:
    """The images of the settings, or those given, split into training and validation."""
    given = source if source is not None else config.source
    if isinstance(given, str) and not given:
        raise DistillError("no images to train on; give a folder with --data or data.source.")
    images = _open(given, config, world)
    other = validation if validation is not None else (config.validation or None)
    if other is not None:
        return Data(images, None, _open(other, config, world), None, "a set of its own")
    if not config.hold_out:
        return Data(images, None, None, None, "none")
    try:
        train, held = hold_out(len(images), config.hold_out, seed=config.split_seed)
    except DataError as error:  # it knows the numbers, not where they were set
        raise DataError(
            f"data.hold_out: {error} Give more images, or hold out fewer (--set data.hold_out=N)."
        ) from error
    split = f"{len(held)} of {len(images)} images held out, drawn with seed {config.split_seed}"
    return Data(images, train, images, held, split)


def _open(given: Images, config: DataConfig, world: World) -> Images:
    if isinstance(given, InMemoryImages):
        return given.to(world.device)
    if isinstance(given, str) and given.startswith(samples.PHOTOS):
        return samples.photo_crops(given, config.memory_size).to(world.device)
    source = open_source(given)
    if not config.in_memory:
        return source

    def build() -> InMemoryImages:
        return InMemoryImages.build(
            source,
            size=config.memory_size,
            mode=config.memory_mode,
            device=world.device,
            cache=cache_folder("images"),
            workers=_workers(config),
            bad_limit=config.bad_limit,
        )

    # One rank decodes; the others then map what it wrote.
    built = build() if world.is_first else None
    world.barrier()
    return build() if built is None else built


def _workers(config: DataConfig) -> int | None:
    return None if config.workers < 0 else config.workers


def training_loader(
    config: DistillConfig,
    data: Data,
    plan: Plan,
    teacher_size: Callable[[int], tuple[int, int]],
    world: World,
    on_bad: OnBad | None = None,
) -> Loader:
    """Batches of the plan's sizes; `teacher_size` is what the teachers see at a student's size."""

    def batch_plan(number: int) -> BatchPlan:
        size = plan.sizes.size(number)
        return BatchPlan(size, teacher_size(size), plan.sizes.batches[size])

    first = plan.step(0)
    return Loader(
        data.source,
        batch_size=first.batch,
        size=first.size,
        augment=config.data.augment,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        subset=data.subset,
        plan=batch_plan,
        workers=_workers(config.data),
        bad_limit=config.data.bad_limit,
        on_bad=on_bad,
    )


def validation_loader(config: DistillConfig, data: Data, plan: Plan, world: World) -> Loader | None:
    """The held-out images in order, cut in the middle, not recoloured."""
    if data.validation is None:
        return None
    size = plan.sizes.sizes[0]
    return Loader(
        data.validation,
        batch_size=world.size,
        size=size,
        augment=AugmentConfig(kind="none"),
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        shuffle=False,
        subset=data.validation_subset,
        workers=_workers(config.data),
        bad_limit=config.data.bad_limit,
    )


# ------------------------------------------------------------------------------------- teachers


def open_teachers(
    config: DistillConfig, world: World, given: Sequence[Teacher] | None = None
) -> Teaching:
    """The teachers of the settings, or those given with the settings' weights."""
    wanted = config.teachers
    if given is not None:
        for teacher in given:
            if not isinstance(teacher, Teacher):
                raise DistillError(
                    f"teachers are objects of veca.teachers.Teacher, got {type(teacher).__name__}; "
                    "veca.teachers.CallableTeacher makes one of a module or a function."
                )
        named = wanted or tuple(TeacherConfig(name=teacher.name) for teacher in given)
        if len(named) != len(given):
            raise DistillError(
                f"{len(given)} teachers were given but the settings describe {len(named)}."
            )
        lessons = [Lesson(t.to(world.device), s) for t, s in zip(given, named, strict=True)]
    else:
        if not wanted:
            raise DistillError("no teacher; name one with --teacher or in [[teachers]].")
        lessons = [Lesson(_load_teacher(settings, world), settings) for settings in wanted]
    for lesson in lessons:
        if lesson.settings.compile:
            lesson.teacher.compile()
    return Teaching(lessons, config.loss)


def _load_teacher(settings: TeacherConfig, world: World) -> Teacher:
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if world.device.type == "cuda" else "float32"
    if dtype not in _DTYPES:
        raise DistillError(f"unknown dtype of a teacher {suggest(dtype, [*_DTYPES, 'auto'])}")
    if settings.name == samples.FILTERS:
        return samples.filter_teacher().to(world.device)
    from veca.teachers import load_teacher

    def load() -> Teacher:
        return load_teacher(
            settings.name,
            device=world.device,
            dtype=_DTYPES[dtype],
            feature=settings.feature,
            cores=settings.cores or None,
            autocast=settings.autocast,
            allow_remote_code=settings.allow_remote_code,
        )

    # The first rank fetches what has to be fetched; the others then find it.
    teacher = load() if world.is_first else None
    world.barrier()
    return load() if teacher is None else teacher


def known_statistics(config: DistillConfig, teaching: Teaching) -> dict[str, TargetStatistics]:
    """Scales of targets that need not be estimated: given, or stored with the weights started from.

    A student that goes on must go on learning the same targets.
    """
    known: dict[str, TargetStatistics] = {}
    for lesson in teaching.lessons:
        if not lesson.settings.standardise:
            continue
        path = lesson.settings.statistics
        beside = Path(config.student.init).expanduser() / TARGETS
        if not path and config.student.init and beside.is_file():
            path = str(beside)
            _check_global_size(config, lesson)
        if path:
            known |= find_targets([lesson.name], [lesson.widths], path)
    return known


def _check_global_size(config: DistillConfig, lesson: Lesson) -> None:
    """Refuse a stored scale that is of global features at another size, as far as that is known."""
    init = config.student.init
    provenance = read_dense_vit(init)[1] if config.student.dense else read_provenance(init)
    stored = lesson.global_size_of(provenance)
    if stored is not None and stored != lesson.global_size:
        raise DistillError(
            f"{init} learnt global features of {lesson.name} at global_size {stored}, here it is "
            f"{lesson.global_size}, and the scale stored with it does not fit; use the same, or "
            "give another scale with the teacher's `statistics`."
        )


def estimate_statistics(
    teaching: Teaching,
    loader: Loader,
    plan: Plan,
    patch_size: int,
    world: World,
    *,
    most: int | None = None,
) -> dict[str, TargetStatistics]:
    """Scales of the targets that are still unknown, from the first training batches.

    The loader is left where it was. All ranks get the same numbers. `most` caps the images that
    the settings ask for.
    """
    open_lessons = [
        lesson
        for lesson in teaching.lessons
        if lesson.settings.standardise and lesson.statistics is None
    ]
    if not open_lessons:
        return {}
    state = loader.state_dict()
    running = {x.name: (RunningMoments(), RunningMoments()) for x in open_lessons}
    seen = number = 0
    wanted = {
        x.name: min(x.settings.standardise_images, most or x.settings.standardise_images)
        for x in open_lessons
    }
    while seen < max(wanted.values()):
        step = plan.step(number)
        batch = loader.batch(number)
        grid = (step.size // patch_size, step.size // patch_size)
        for lesson in open_lessons:
            if seen < wanted[lesson.name]:
                for moments, part in zip(
                    running[lesson.name], teaching.features(lesson, batch.shown, grid), strict=True
                ):
                    moments.add(part)
        seen += step.batch
        number += 1
    loader.load_state_dict(state)
    return {
        name: TargetStatistics(*(m.moments(world.sum(m.sums)) for m in pair))  # type: ignore[arg-type]
        for name, pair in running.items()
    }


# -------------------------------------------------------------------------------------- student


@dataclass
class Start:
    """Where the student's first weights come from."""

    student: Student
    patch_from: str | None = None
    """The teacher whose patch convolution was taken."""
    provenance: dict[str, Any] | None = None
    """Of the stored weights it starts from."""


def build_student(config: StudentConfig, teaching: Teaching, seed: int) -> Start:
    """Fresh or stored weights, on the host; the same on every rank."""
    widths = [lesson.widths for lesson in teaching.lessons]
    torch.manual_seed(seed)
    backbone: Veca | DenseVit
    if config.init:
        if fixed := sorted(set(config.config) - set(TRAINING_FIELDS)):
            raise DistillError(
                f"student.init takes the stored architecture, so student.config cannot change "
                f"{fixed[0]}; with stored weights only {', '.join(TRAINING_FIELDS)} can be changed."
            )
        if config.dense:
            backbone, provenance = read_dense_vit(config.init)
            backbone = backbone.float().train()
        else:
            backbone = load_backbone(config.init, backend=config.backend)
            provenance = read_provenance(config.init)
        backbone.config = backbone.config.replace(**config.config)
        start = Start(Student(backbone, widths), provenance=provenance)
        stored = load_heads(config.init) if Path(config.init).expanduser().is_dir() else {}
        for place, lesson in enumerate(teaching.lessons):
            if lesson.name in stored and str(place) in start.student.heads:
                head = stored[lesson.name].state_dict()
                start.student.heads[str(place)].load_state_dict(head)
    else:
        fields = student_config(config.preset, dict(config.config), widths[0])
        dense = config.dense
        backbone = DenseVit(fields) if dense else create_model(fields, backend=config.backend)
        start = Start(Student(backbone, widths))
        if config.patch_from_teacher:
            teachers = [lesson.teacher for lesson in teaching.lessons]
            start.patch_from = take_patch_embedding(backbone, teachers)
    if isinstance(backbone, Veca):
        backbone.set_grad_checkpointing(config.gradient_checkpointing)
    elif config.gradient_checkpointing:
        raise DistillError("student.gradient_checkpointing is for VECA, not for a dense student.")
    return start


def compile_blocks(student: Student, variants: int) -> None:
    """Compile each block on its own; `variants` is how many shapes each will see."""
    import torch._dynamo

    # A new graph for each budget, size and mode; torch would give up after a handful.
    # All students share the code of a block, so their graphs add up.
    wanted = 4 * variants + 8
    limits = torch._dynamo.config
    limits.recompile_limit += wanted
    limits.accumulated_recompile_limit += wanted * len(student.blocks())
    for block in student.blocks():
        block.compile(dynamic=False)


# ----------------------------------------------------------------------------------------- plan


def build_plan(config: DistillConfig, architecture: VecaConfig, images: int, world: World) -> Plan:
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
    return Plan(
        sizes,
        budgets,
        steps=steps,
        warmup=warmup,
        lr=o.lr,
        lr_min=o.lr_min,
        cooldown=s.cooldown,
    )
