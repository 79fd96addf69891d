"""The teachers of a run: opened as the settings say, and what they say about a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veca.data import Loader
from veca.distill import samples
from veca.distill.config import DistillConfig, LossConfig, TeacherConfig
from veca.distill.parallel import World
from veca.distill.schedule import TrainingPlan
from veca.distill.standardise import RunningMoments, TargetStatistics, find_targets
from veca.errors import DistillError, suggest
from veca.teachers import read_dense_vit
from veca.teachers.base import Teacher, TeacherFeatures
from veca.weights import read_provenance
from veca.weights.store import TARGETS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TeacherTargets(NamedTuple):
    """What the student is to learn from one teacher, float32."""

    cls: Tensor
    """[B, D], standardised if so asked."""
    patches: Tensor
    """[B, N, D']."""
    logits: Tensor | None
    """[B, K] of the teacher's own classifier, where the loss wants them."""


@dataclass
class FrozenTeacher:
    """One teacher, its settings and the scale of its features."""

    model: Teacher
    settings: TeacherConfig
    statistics: TargetStatistics | None = None

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def widths(self) -> tuple[int, int]:
        """Of its global and its dense features."""
        return self.model.width, self.model.dense_width

    def classify(self, said: Tensor) -> Tensor:
        """What the teacher's classifier makes of a student's global feature [B, D]: logits."""
        cls = said.float()
        if self.statistics is not None:
            cls = self.statistics.cls.unstandardise(cls)
        logits = self.model.classify(cls)
        assert logits is not None  # asked for only where `Teachers` found a classifier
        return logits

    def global_grid(self, grid: tuple[int, int]) -> tuple[int, int]:
        """The grid of the pass that gives the global feature, for a student's `grid`."""
        size = self.settings.global_size
        return self.model.grid_for(size) if size else grid

    @property
    def global_size(self) -> int:
        """The height in pixels at which the global feature is really taken; 0: the dense ones'."""
        if not self.settings.global_size:
            return 0
        return self.model.input_size(self.global_grid((1, 1)))[0]

    def global_size_of(self, provenance: Mapping[str, Any]) -> int | None:
        """The same of the run that some weights came from; None where that is not known."""
        found: Any = provenance
        for part in ("targets", self.name, "global_size"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found if isinstance(found, int) else None


class Teachers:
    """All teachers of a run."""

    def __init__(self, teachers: Sequence[FrozenTeacher], loss: LossConfig) -> None:
        self._teachers = list(teachers)
        self.loss = loss
        """The weights of the loss's terms."""
        self.smallest_cells: int | None = None
        """Cells of the smallest grid to come, at which micro-batches are as large as set."""
        names = [teacher.name for teacher in teachers]
        if len(set(names)) < len(names):
            raise DistillError(f"the teachers need different names, got {', '.join(names)}.")
        for teacher in teachers:
            if teacher.settings.kl:
                # One look, before hours of training: not every teacher has a classifier.
                probe = torch.zeros(1, teacher.model.width, device=teacher.model.device)
                if teacher.model.classify(probe) is None:
                    raise DistillError(
                        f"teacher {teacher.name} has no classifier of its own; set its kl to 0."
                    )

    def __iter__(self) -> Iterator[FrozenTeacher]:
        return iter(self._teachers)

    def __len__(self) -> int:
        return len(self._teachers)

    def __getitem__(self, place: int) -> FrozenTeacher:
        return self._teachers[place]

    def image_size(self, grid: tuple[int, int]) -> tuple[int, int]:
        """The pixels (H, W) the teachers should be shown for a student's grid: the largest wanted.

        The others resize it down themselves.
        """
        sizes = [
            teacher.model.input_size(wanted)
            for teacher in self
            for wanted in (grid, teacher.global_grid(grid))
        ]
        return max(size[0] for size in sizes), max(size[1] for size in sizes)

    @torch.no_grad()
    def features(
        self, teacher: FrozenTeacher, pixels: Tensor, grid: tuple[int, int]
    ) -> tuple[Tensor, ...]:
        """A teacher's own (global, dense) features, a micro-batch at a time."""
        model, global_grid = teacher.model, teacher.global_grid(grid)
        dense = self._runs(teacher, pixels, grid)
        # One pass serves both where it is of the same pixels.
        same = model.input_size(global_grid) == model.input_size(grid)
        whole = dense if same else self._runs(teacher, pixels, global_grid)
        cls, patches = [part.cls for part in whole], [part.patches for part in dense]
        return _joined(cls).float(), _joined(patches).float()

    def _runs(
        self, teacher: FrozenTeacher, pixels: Tensor, grid: tuple[int, int]
    ) -> list[TeacherFeatures]:
        step = len(pixels)
        if teacher.settings.micro_batch:
            cells = grid[0] * grid[1]
            step = teacher.settings.micro_batch * (self.smallest_cells or cells) // cells or 1
        return [teacher.model.features(part, grid) for part in pixels.split(step)]

    @torch.no_grad()
    def targets(self, pixels: Tensor, grid: tuple[int, int]) -> list[TeacherTargets]:
        """What the student is to learn about `pixels` [B, 3, H, W], 0..1, on its patch grid."""
        targets = []
        for teacher in self:
            cls, patches = self.features(teacher, pixels, grid)
            logits = teacher.model.classify(cls) if teacher.settings.kl else None
            if teacher.statistics is not None:
                cls = teacher.statistics.cls.standardise(cls)
                patches = teacher.statistics.dense.standardise(patches)
            targets.append(TeacherTargets(cls, patches, logits))
        return targets

    def statistics(self) -> dict[str, TargetStatistics]:
        return {x.name: x.statistics for x in self if x.statistics is not None}

    def set_statistics(self, known: Mapping[str, TargetStatistics], device: torch.device) -> None:
        for teacher in self:
            if teacher.name in known:
                teacher.statistics = known[teacher.name].to(device)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


# ------------------------------------------------------------------------------------- opening


def open_teachers(
    config: DistillConfig, world: World, given: Sequence[Teacher] | None = None
) -> Teachers:
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
        frozen = [FrozenTeacher(t.to(world.device), s) for t, s in zip(given, named, strict=True)]
    else:
        if not wanted:
            raise DistillError("no teacher; name one with --teacher or in [[teachers]].")
        frozen = [FrozenTeacher(_load_teacher(settings, world), settings) for settings in wanted]
    for one in frozen:
        if one.settings.compile:
            one.model.compile()
    return Teachers(frozen, config.loss)


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


# ---------------------------------------------------------------------------- scale of targets


def scale_targets(
    config: DistillConfig,
    teachers: Teachers,
    loader: Loader,
    plan: TrainingPlan,
    patch_size: int,
    world: World,
    *,
    most: int | None = None,
) -> None:
    """Give the teachers the scale of their targets: given, stored with the first weights, or
    estimated on at most `most` images.
    """
    teachers.set_statistics(_known(config, teachers), world.device)
    estimated = _estimated(teachers, loader, plan, patch_size, world, most)
    teachers.set_statistics(estimated, world.device)


def _known(config: DistillConfig, teachers: Teachers) -> dict[str, TargetStatistics]:
    """Scales of targets that need not be estimated: given, or stored with the weights started from.

    A student that goes on must go on learning the same targets.
    """
    known: dict[str, TargetStatistics] = {}
    for teacher in teachers:
        if not teacher.settings.standardise:
            continue
        path = teacher.settings.statistics
        beside = Path(config.student.init).expanduser() / TARGETS
        if not path and config.student.init and beside.is_file():
            path = str(beside)
            _check_global_size(config, teacher)
        if path:
            known |= find_targets([teacher.name], [teacher.widths], path)
    return known


def _check_global_size(config: DistillConfig, teacher: FrozenTeacher) -> None:
    """Refuse a stored scale that is of global features at another size, as far as that is known."""
    init = config.student.init
    provenance = read_dense_vit(init)[1] if config.student.dense else read_provenance(init)
    stored = teacher.global_size_of(provenance)
    if stored is not None and stored != teacher.global_size:
        raise DistillError(
            f"{init} learnt global features of {teacher.name} at global_size {stored}, here it is "
            f"{teacher.global_size}, and the scale stored with it does not fit; use the same, or "
            "give another scale with the teacher's `statistics`."
        )


def _estimated(
    teachers: Teachers,
    loader: Loader,
    plan: TrainingPlan,
    patch_size: int,
    world: World,
    most: int | None,
) -> dict[str, TargetStatistics]:
    """Scales of the targets that are still unknown, from the first training batches.

    The loader is left where it was. All ranks get the same numbers. `most` caps the images that
    the settings ask for.
    """
    unscaled = [
        teacher
        for teacher in teachers
        if teacher.settings.standardise and teacher.statistics is None
    ]
    if not unscaled:
        return {}
    state = loader.state_dict()
    running = {x.name: (RunningMoments(), RunningMoments()) for x in unscaled}
    seen = number = 0
    wanted = {
        x.name: min(x.settings.standardise_images, most or x.settings.standardise_images)
        for x in unscaled
    }
    while seen < max(wanted.values()):
        step = plan.step(number)
        batch = loader.batch(number)
        grid = (step.size // patch_size, step.size // patch_size)
        for teacher in unscaled:
            if seen < wanted[teacher.name]:
                for moments, part in zip(
                    running[teacher.name],
                    teachers.features(teacher, batch.shown, grid),
                    strict=True,
                ):
                    moments.add(part)
        seen += step.batch
        number += 1
    loader.load_state_dict(state)
    return {
        name: TargetStatistics(*(m.moments(world.sum(m.sums)) for m in pair))  # type: ignore[arg-type]
        for name, pair in running.items()
    }
