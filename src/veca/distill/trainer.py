"""The students of a run: networks, optimisers, averages, and all a checkpoint holds of them.

Nearly always it is one. Several (`siblings` in the settings) share the images, the augmentation
and the teachers' passes, and nothing else: each has its own weights, gradients and optimiser, and
learns what it would have learnt alone. `step` is what they do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from veca._util.numbers import count
from veca.distill.config import DistillConfig, StudentConfig
from veca.distill.graphs import PassGraphs
from veca.distill.losses import DistillLoss
from veca.distill.optim import Optimizers, WeightAverage
from veca.distill.parallel import World, shard
from veca.distill.schedule import TrainingPlan
from veca.distill.standardise import from_tensors, to_tensors
from veca.distill.student import InitialStudent, build_student, compile_blocks
from veca.distill.teachers import Teachers
from veca.errors import CheckpointError, DistillError

MAIN = ""
"""The name of the settings' own student, beside its siblings'."""


class StudentTrainer:
    """One student with its optimisers and its average, as one thing to save and load.

    Nothing here knows how many processes there are, or writes a file.

    Args:
        settings: the student's, where it is not `config.student`.
    """

    def __init__(
        self,
        config: DistillConfig,
        teachers: Teachers,
        world: World,
        settings: StudentConfig | None = None,
    ) -> None:
        self.config, self.world = config, world
        self.settings = config.student if settings is None else settings
        self.initial: InitialStudent = build_student(self.settings, teachers, config.seed)
        self.student = self.initial.student.to(world.device).train()
        self.architecture = self.student.backbone.config
        precision = config.precision
        if precision == "auto":
            precision = "bfloat16" if world.device.type == "cuda" else "float32"
        self.half = precision == "bfloat16"
        mean, std = self.architecture.image_mean, self.architecture.image_std
        self._mean = torch.tensor(mean, device=world.device).view(1, 3, 1, 1)
        self._std = torch.tensor(std, device=world.device).view(1, 3, 1, 1)

    @property
    def dense(self) -> bool:
        """Whether the student is a dense ViT, which has no budget."""
        return self.settings.dense

    def prepare(self, plan: TrainingPlan) -> None:
        """Compile, spread over the processes and make the optimisers."""
        o = self.config.optimizer
        if self.settings.compile:
            # Before the first merge all shares are alike; each merge makes tokens fewer.
            merges = len(self.architecture.merge_blocks)
            shapes = 1 + len(plan.keep.merging) * merges
            variants = len(plan.budgets.budgets) * len(plan.sizes.sizes) * shapes
            compile_blocks(self.student, variants)
        self.wrapped = self.world.wrap(self.student, self.student.blocks())
        self.parameters = list(self.student.parameters())
        self.optimizers = Optimizers(
            self.student,
            name=o.name,
            lr=o.lr,
            weight_decay=o.weight_decay,
            mu=o.mu,
            beta2=o.beta2,
            nesterov=o.nesterov,
            cautious=o.cautious,
            betas=o.betas,
            eps=o.eps,
        )
        self.ema = WeightAverage(self.student, self.config.ema) if self.config.ema else None
        self.graphs: PassGraphs | None = None
        if self.settings.graphs:
            if self.world.device.type != "cuda" or self.world.kind != "none":
                processes = count(self.world.size, "process", "processes")
                raise DistillError(
                    f"graphs records a student's passes on one CUDA GPU, this is {processes} on "
                    f"{self.world.device}; set student.graphs to false, and that of "
                    "siblings too."
                )
            self.graphs = PassGraphs(self.parameters)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels in 0..1 -> what the student expects."""
        return (pixels - self._mean) / self._std

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.half:
            return contextlib.nullcontext()
        # No copies of weights kept from one pass for the next: a recorded pass makes its own.
        return torch.autocast(
            self.world.device.type, dtype=torch.bfloat16, cache_enabled=not self.settings.graphs
        )

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the student has its averaged weights, if an average is kept."""
        if self.ema is None:
            yield
            return
        self.world.weights_changed(self.student)
        with self.ema.applied():
            yield
            self.world.weights_changed(self.student)

    # --------------------------------------------------------------------------------- its state

    def state(self, *, optimizer: bool = True) -> dict[str, dict[str, Tensor]]:
        """Whole tensors on the host of the first rank, by section and name. All ranks call it."""
        sections: dict[str, Mapping[str, Tensor]] = {
            "student": dict(self.student.named_parameters())
        }
        if optimizer:
            sections["optimizer"] = self.optimizers.state_tensors()
        if self.ema is not None:
            sections["ema"] = self.ema.tensors
        return {name: self.world.gather(tensors) for name, tensors in sections.items()}

    def load_state(self, sections: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `state` gave, on any number of processes; all ranks pass the same."""
        if "student" not in sections or "optimizer" not in sections:
            raise CheckpointError("the checkpoint lacks the sections of this run's students.")
        self._load_student(sections["student"])
        self.optimizers.load_state_tensors(dict(sections.get("optimizer", {})), shard)
        if self.ema is not None:
            # An average that is asked for only now starts from the weights as they are.
            stored = sections.get("ema", sections["student"])
            _check_shapes(self.ema.parameters, stored)
            pieces = {name: shard(stored[name], p) for name, p in self.ema.parameters.items()}
            self.ema.load(pieces)

    @torch.no_grad()
    def _load_student(self, stored: Mapping[str, Tensor]) -> None:
        mine = dict(self.student.named_parameters())
        _check_shapes(mine, stored)
        for name, p in mine.items():
            p.copy_(shard(stored[name].to(p.dtype), p))


def _check_shapes(mine: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of these parameters."""
    shapes = {name: tuple(p.shape) for name, p in mine.items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if shapes != theirs:
        name = next(n for n in [*shapes, *theirs] if shapes.get(n) != theirs.get(n))
        raise CheckpointError(
            f"the checkpoint belongs to another architecture: {name} is "
            f"{_shape(theirs.get(name))} there and {_shape(shapes.get(name))} here; resume "
            "with the settings it was made with, or choose another --out."
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


class StudentGroup:
    """All students: a trainer for each, by name, and the loss they share."""

    def __init__(self, config: DistillConfig, teachers: Teachers, world: World) -> None:
        self.config, self.teachers, self.world = config, teachers, world
        self.loss = DistillLoss(teachers)
        self.trainers = {MAIN: StudentTrainer(config, teachers, world)}
        for name, settings in config.siblings.items():
            self.trainers[name] = StudentTrainer(config, teachers, world, settings)
            theirs, ours = (self.trainers[which].architecture.patch_size for which in (name, MAIN))
            if theirs != ours:
                raise DistillError(
                    f"sibling {name} has patches of {theirs} pixels and the student of {ours}; "
                    "students that share a teacher's answers need the same grid."
                )

    @property
    def main(self) -> StudentTrainer:
        return self.trainers[MAIN]

    @property
    def elastic(self) -> bool:
        """Whether any student has budgets; a dense ViT has none."""
        return not all(trainer.dense for trainer in self.trainers.values())

    def prepare(self, plan: TrainingPlan) -> None:
        """Compile, spread over the processes and make the optimisers."""
        for name, trainer in self.trainers.items():
            most, wanted = trainer.architecture.num_cores, plan.budgets.budgets[-1]
            if wanted > most and not trainer.dense:
                raise DistillError(
                    f"budgets go up to {wanted}, but sibling {name} has {most} cores; set "
                    "nested.budgets to what all students have."
                )
            trainer.prepare(plan)
        if any(trainer.settings.compile for trainer in self.trainers.values()):
            self.loss.compile()
        self.teachers.smallest_cells = math.prod(self.grid(plan.sizes.sizes[0]))

    @property
    def term_names(self) -> list[str]:
        """Names of what a training step returns, one after the other."""
        return [
            f"{name}:{term}" if name else term
            for terms in (self.loss.term_names, ["grad_norm"])
            for name in self.trainers
            for term in terms
        ]

    def grid(self, size: int) -> tuple[int, int]:
        """Patches of an image of `size` pixels, (rows, columns)."""
        cells = size // self.main.architecture.patch_size
        return cells, cells

    def teacher_size(self, size: int) -> tuple[int, int]:
        """The pixels the teachers see when the students see `size`."""
        return self.teachers.image_size(self.grid(size))

    # --------------------------------------------------------------------------------- its state

    def state(self, *, optimizer: bool = True) -> dict[str, dict[str, Tensor]]:
        """Whole tensors on the host of the first rank, by section and name. All ranks call it.

        A sibling's sections begin with its name and a colon.
        """
        sections = {}
        for name, trainer in self.trainers.items():
            for section, tensors in trainer.state(optimizer=optimizer).items():
                sections[section_name(name, section)] = tensors
        if statistics := self.teachers.statistics():
            sections["targets"] = self.world.gather(to_tensors(statistics))
        return sections

    def load_state(self, sections: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `state` gave, on any number of processes; all ranks pass the same."""
        for name, trainer in self.trainers.items():
            trainer.load_state(sections_of(sections, name))
        if "targets" in sections:
            self.teachers.set_statistics(from_tensors(sections["targets"]), self.world.device)


def section_name(student: str, section: str) -> str:
    return f"{student}:{section}" if student else section


def sections_of(
    sections: Mapping[str, Mapping[str, Tensor]], student: str
) -> dict[str, Mapping[str, Tensor]]:
    """One student's sections, without its name; what all share is kept."""
    own = f"{student}:" if student else ""
    return {
        section.removeprefix(own): tensors
        for section, tensors in sections.items()
        if section == "targets" or (section.startswith(own) and (own or ":" not in section))
    }
