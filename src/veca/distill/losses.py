"""What the student is judged by, as published: cosine for the global feature, cosine and mean
squared error for the dense ones, all in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from veca.distill.student import Prediction
from veca.distill.teachers import Teachers, TeacherTargets

EPS = 1e-6
"""Lengths below this count as this much, so that a zero vector has cosine 0 and a gradient."""


class Losses(NamedTuple):
    """One teacher's terms, float32 scalars. Cosine terms are mean(1 - cos), from 0 to 2."""

    total: Tensor
    cls: Tensor
    dense_cos: Tensor
    dense_mse: Tensor
    kl: Tensor


class DistillLoss:
    """The loss of a student's predictions over all teachers."""

    def __init__(self, teachers: Teachers) -> None:
        self.teachers = teachers
        self._loss = distillation_loss

    def compile(self) -> None:
        """Compile it: its many passes over large tensors become a few."""
        self._loss = torch.compile(distillation_loss, dynamic=False)

    def __call__(
        self, predictions: Sequence[Prediction], targets: Sequence[TeacherTargets]
    ) -> list[Losses]:
        """The terms for each teacher; `total` of all is what is minimised."""
        weights, losses = self.teachers.loss, []
        for teacher, said, target in zip(self.teachers, predictions, targets, strict=True):
            one = self._loss(
                *said, target.cls, target.patches, dense=weights.dense, mse=weights.mse
            )
            if target.logits is not None:
                kl = classifier_kl(teacher.classify(said.cls), target.logits).mean()
                one = one._replace(kl=kl, total=one.total + teacher.settings.kl * kl)
            losses.append(one)
        return losses

    def total(self, losses: Sequence[Losses]) -> Tensor:
        """The weighted sum over the teachers."""
        return sum(  # type: ignore[return-value]
            teacher.settings.weight * one.total
            for teacher, one in zip(self.teachers, losses, strict=True)
        )

    def terms(self, losses: Sequence[Losses]) -> Tensor:
        """What is written down about a step: the total, then each teacher's terms. [1 + 4 T]."""
        with torch.no_grad():
            parts = [part for one in losses for part in one[1:]]
            return torch.stack([self.total(losses), *parts]).detach()

    @property
    def term_names(self) -> list[str]:
        """The names of `terms`; with several teachers, each with its teacher's."""
        several = len(self.teachers) > 1
        return ["loss"] + [
            f"{part}/{teacher.name}" if several else part
            for teacher in self.teachers
            for part in Losses._fields[1:]
        ]


def distillation_loss(
    cls: Tensor,
    patches: Tensor,
    target_cls: Tensor,
    target_patches: Tensor,
    *,
    dense: float = 1.0,
    mse: float = 1.0,
) -> Losses:
    """L = L_cls + dense * L_dense, with L_dense = mean(1 - cos) + mse * MSE over the patches.

    Args:
        cls, target_cls: [B, D] the student's and the teacher's global features.
        patches, target_patches: [B, N, D'] their dense features.
        dense: the paper's lambda.
        mse: weight of the squared error, which keeps the lengths that a cosine does not see.
    """
    loss_cls = cosine_distance(cls, target_cls).mean()
    patches, target_patches = patches.float(), target_patches.float()
    dense_cos = cosine_distance(patches, target_patches).mean()
    dense_mse = F.mse_loss(patches, target_patches)
    total = loss_cls + dense * (dense_cos + mse * dense_mse)
    return Losses(total, loss_cls, dense_cos, dense_mse, torch.zeros_like(total))


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cos over the last axis, float32: [...]."""
    return 1.0 - F.cosine_similarity(student.float(), teacher.float(), dim=-1, eps=EPS)


def classifier_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(teacher || student) of class probabilities, [B, K] logits each -> [B].

    Both logits come from the teacher's own classifier, so it asks whether the student's global
    feature means the same to it, whichever way it differs.
    """
    return F.kl_div(
        student_logits.float().log_softmax(dim=-1),
        teacher_logits.float().log_softmax(dim=-1),
        reduction="none",
        log_target=True,
    ).sum(dim=-1)
