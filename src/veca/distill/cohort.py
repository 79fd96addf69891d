"""The students of a run: they see the same pixels and hear the same answers, step by step.

Nearly always it is one. Several (`siblings` in the settings) share the images, the augmentation
and the teachers' passes, and nothing else: each has its own weights, gradients and optimiser, and
learns what it would have learnt alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from veca.data import Batch
from veca.distill.config import DistillConfig
from veca.distill.parallel import World
from veca.distill.schedule import Plan, Step
from veca.distill.standardise import from_tensors, to_tensors
from veca.distill.teaching import Teaching
from veca.distill.trainer import Trainer
from veca.errors import DistillError

MAIN = ""
"""The name of the settings' own student, beside its siblings'."""


class Cohort:
    """A trainer for each student, by name."""

    def __init__(self, config: DistillConfig, teaching: Teaching, world: World) -> None:
        self.config, self.teaching, self.world = config, teaching, world
        self.trainers = {MAIN: Trainer(config, teaching, world)}
        for name, settings in config.siblings.items():
            self.trainers[name] = Trainer(config, teaching, world, settings)
            theirs, ours = (self.trainers[which].architecture.patch_size for which in (name, MAIN))
            if theirs != ours:
                raise DistillError(
                    f"sibling {name} has patches of {theirs} pixels and the student of {ours}; "
                    "students that share a teacher's answers need the same grid."
                )

    @property
    def main(self) -> Trainer:
        return self.trainers[MAIN]

    @property
    def elastic(self) -> bool:
        """Whether any student has budgets; a dense ViT has none."""
        return not all(trainer.dense for trainer in self.trainers.values())

    def prepare(self, plan: Plan) -> None:
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
            self.teaching.compile()
        cells = plan.sizes.sizes[0] // self.main.architecture.patch_size
        self.teaching.smallest_cells = cells * cells

    def step(self, step: Step, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run a step; returns loss terms and gradients' lengths, still on the device.

        The terms are the first student's, then its siblings' (see `term_names`).
        """
        patch = self.main.architecture.patch_size
        grid = (step.size // patch, step.size // patch)
        count = len(batch.pixels)
        o = self.config.optimizer
        part_size = -(-count // o.accumulate_by_size.get(step.size, o.accumulate))
        parts = list(zip(batch.pixels.split(part_size), batch.shown.split(part_size), strict=True))
        sums: dict[str, Tensor] = {}
        for number, (pixels, shown_pixels) in enumerate(parts):
            targets = self.teaching.targets(shown_pixels, grid)
            share, last = len(pixels) / count, number + 1 == len(parts)
            for name, trainer in self.trainers.items():
                terms = trainer.learn(pixels, targets, step, share, last=last)
                sums[name] = sums[name] + terms if name in sums else terms
        self.world.finish_backward()
        norms = [trainer.update(step) for trainer in self.trainers.values()]
        return torch.cat(list(sums.values())), torch.stack(norms)

    @property
    def term_names(self) -> list[str]:
        """Names of what `step` returns, one after the other."""
        return [
            f"{name}:{term}" if name else term
            for terms in (self.teaching.term_names, ["grad_norm"])
            for name in self.trainers
            for term in terms
        ]

    def teacher_size(self, size: int) -> tuple[int, int]:
        """The pixels the teachers see when the students see `size`."""
        cells = size // self.main.architecture.patch_size
        return self.teaching.image_size((cells, cells))

    # --------------------------------------------------------------------------------- its state

    def state(self, *, optimizer: bool = True) -> dict[str, dict[str, Tensor]]:
        """Whole tensors on the host of the first rank, by section and name. All ranks call it.

        A sibling's sections begin with its name and a colon.
        """
        sections = {}
        for name, trainer in self.trainers.items():
            for section, tensors in trainer.state(optimizer=optimizer).items():
                sections[section_name(name, section)] = tensors
        if statistics := self.teaching.statistics():
            sections["targets"] = self.world.gather(to_tensors(statistics))
        return sections

    def load_state(self, sections: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `state` gave, on any number of processes; all ranks pass the same."""
        for name, trainer in self.trainers.items():
            trainer.load_state(sections_of(sections, name))
        if "targets" in sections:
            self.teaching.set_statistics(from_tensors(sections["targets"]), self.world.device)


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
