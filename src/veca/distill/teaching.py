"""The teachers of a run: what they say about a batch, and how far the student is from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veca.distill.config import LossConfig, TeacherConfig
from veca.distill.losses import Losses, classifier_kl, distillation_loss
from veca.distill.standardise import TargetStatistics
from veca.distill.student import Prediction
from veca.errors import DistillError
from veca.teachers.base import Teacher, TeacherFeatures


class Target(NamedTuple):
    """What the student is to learn from one teacher, float32."""

    cls: Tensor
    """[B, D], standardised if so asked."""
    patches: Tensor
    """[B, N, D']."""
    logits: Tensor | None
    """[B, K] of the teacher's own classifier, where the loss wants them."""


@dataclass
class Lesson:
    """One teacher, its settings and the scale of its features."""

    teacher: Teacher
    settings: TeacherConfig
    statistics: TargetStatistics | None = None

    @property
    def name(self) -> str:
        return self.teacher.name

    @property
    def widths(self) -> tuple[int, int]:
        """Of its global and its dense features."""
        return self.teacher.width, self.teacher.dense_width

    def classify(self, said: Tensor) -> Tensor:
        """What the teacher's classifier makes of a student's global feature [B, D]: logits."""
        cls = said.float()
        if self.statistics is not None:
            cls = self.statistics.cls.unstandardise(cls)
        logits = self.teacher.classify(cls)
        assert logits is not None  # asked for only where `Teaching` found a classifier
        return logits

    def global_grid(self, grid: tuple[int, int]) -> tuple[int, int]:
        """The grid of the pass that gives the global feature, for a student's `grid`."""
        size = self.settings.global_size
        return self.teacher.grid_for(size) if size else grid

    @property
    def global_size(self) -> int:
        """The height in pixels at which the global feature is really taken; 0: the dense ones'."""
        if not self.settings.global_size:
            return 0
        return self.teacher.input_size(self.global_grid((1, 1)))[0]

    def global_size_of(self, provenance: Mapping[str, Any]) -> int | None:
        """The same of the run that some weights came from; None where that is not known."""
        return provenance.get("targets", {}).get(self.name, {}).get("global_size")


class Teaching:
    """All teachers of a run and the loss."""

    def __init__(self, lessons: Sequence[Lesson], loss: LossConfig) -> None:
        self.lessons, self.loss = list(lessons), loss
        self._loss = distillation_loss
        self.smallest_cells: int | None = None
        """Cells of the smallest grid to come, at which micro-batches are as large as set."""
        names = [lesson.name for lesson in lessons]
        if len(set(names)) < len(names):
            raise DistillError(f"the teachers need different names, got {', '.join(names)}.")
        for lesson in lessons:
            if lesson.settings.kl:
                # One look, before hours of training: not every teacher has a classifier.
                probe = torch.zeros(1, lesson.teacher.width, device=lesson.teacher.device)
                if lesson.teacher.classify(probe) is None:
                    raise DistillError(
                        f"teacher {lesson.name} has no classifier of its own; set its kl to 0."
                    )

    def compile(self) -> None:
        """Compile the loss: its many passes over large tensors become a few."""
        self._loss = torch.compile(distillation_loss, dynamic=False)

    def image_size(self, grid: tuple[int, int]) -> tuple[int, int]:
        """The pixels (H, W) the teachers should be shown for a student's grid: the largest wanted.

        The others resize it down themselves.
        """
        sizes = [
            lesson.teacher.input_size(wanted)
            for lesson in self.lessons
            for wanted in (grid, lesson.global_grid(grid))
        ]
        return max(size[0] for size in sizes), max(size[1] for size in sizes)

    @torch.no_grad()
    def features(self, lesson: Lesson, pixels: Tensor, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """A teacher's own (global, dense) features, a micro-batch at a time."""
        teacher, global_grid = lesson.teacher, lesson.global_grid(grid)
        dense = self._runs(lesson, pixels, grid)
        # One pass serves both where it is of the same pixels.
        same = teacher.input_size(global_grid) == teacher.input_size(grid)
        whole = dense if same else self._runs(lesson, pixels, global_grid)
        cls, patches = [part.cls for part in whole], [part.patches for part in dense]
        return _joined(cls).float(), _joined(patches).float()

    def _runs(self, lesson: Lesson, pixels: Tensor, grid: tuple[int, int]) -> list[TeacherFeatures]:
        step = len(pixels)
        if lesson.settings.micro_batch:
            cells = grid[0] * grid[1]
            step = lesson.settings.micro_batch * (self.smallest_cells or cells) // cells or 1
        return [lesson.teacher.features(part, grid) for part in pixels.split(step)]

    @torch.no_grad()
    def targets(self, pixels: Tensor, grid: tuple[int, int]) -> list[Target]:
        """What the student is to learn about `pixels` [B, 3, H, W], 0..1, on its patch grid."""
        targets = []
        for lesson in self.lessons:
            cls, patches = self.features(lesson, pixels, grid)
            logits = lesson.teacher.classify(cls) if lesson.settings.kl else None
            if lesson.statistics is not None:
                cls = lesson.statistics.cls.standardise(cls)
                patches = lesson.statistics.dense.standardise(patches)
            targets.append(Target(cls, patches, logits))
        return targets

    def judge(self, predictions: Sequence[Prediction], targets: Sequence[Target]) -> list[Losses]:
        """The loss terms for each teacher; `total` of all is what is minimised."""
        losses = []
        for lesson, said, target in zip(self.lessons, predictions, targets, strict=True):
            one = self._loss(
                *said, target.cls, target.patches, dense=self.loss.dense, mse=self.loss.mse
            )
            if target.logits is not None:
                kl = classifier_kl(lesson.classify(said.cls), target.logits).mean()
                one = one._replace(kl=kl, total=one.total + lesson.settings.kl * kl)
            losses.append(one)
        return losses

    def total(self, losses: Sequence[Losses]) -> Tensor:
        """The weighted sum over the teachers."""
        return sum(  # type: ignore[return-value]
            lesson.settings.weight * one.total
            for lesson, one in zip(self.lessons, losses, strict=True)
        )

    def terms(self, losses: Sequence[Losses]) -> Tensor:
        """What is written down about a step: the total, then each teacher's terms. [1 + 4 T]."""
        with torch.no_grad():
            parts = [part for one in losses for part in one[1:]]
            return torch.stack([self.total(losses), *parts]).detach()

    @property
    def term_names(self) -> list[str]:
        """The names of `terms`; with several teachers, each with its teacher's."""
        several = len(self.lessons) > 1
        return ["loss"] + [
            f"{part}/{lesson.name}" if several else part
            for lesson in self.lessons
            for part in Losses._fields[1:]
        ]

    def statistics(self) -> dict[str, TargetStatistics]:
        return {x.name: x.statistics for x in self.lessons if x.statistics is not None}

    def set_statistics(self, known: Mapping[str, TargetStatistics], device: torch.device) -> None:
        for lesson in self.lessons:
            if lesson.name in known:
                lesson.statistics = known[lesson.name].to(device)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
