"""How close students are on images they never trained on, over sizes x budgets x keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veca.data import Batch, Loader
from veca.distill.losses import classifier_kl, cosine_distance
from veca.distill.parallel import World
from veca.distill.student import Prediction, Student
from veca.distill.teachers import FrozenTeacher, Teachers, TeacherTargets
from veca.model import evaluating

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]

_NAMES = ("cls_cos", "cls_mse", "dense_cos", "dense_mse", "loss", "kl", "agree")
_OF_CLASSIFIER = ("kl", "agree")


class ValidatedStudent(NamedTuple):
    """A student to be measured, and how."""

    student: Student
    points: Sequence[tuple[int, float]]
    """(budget, share of patch tokens)."""
    normalise: Callable[[Tensor], Tensor]
    """Pixels in 0..1 -> what it expects."""
    autocast: Autocast = contextlib.nullcontext


@torch.no_grad()
def validate(
    students: Sequence[ValidatedStudent],
    teachers: Teachers,
    loader: Loader,
    *,
    sizes: Sequence[int],
    batches: dict[int, int],
    world: World,
) -> list[list[dict[str, Any]]]:
    """For each student one row for each size, budget and share of patch tokens (and teacher, where
    there are several). A row names the share where windows merge.

    `cls_cos` and `dense_cos` are mean cosines (1 is best), `cls_mse` and `dense_mse` mean squared
    errors, all between what the student gives and what it learns (standardised targets, if so
    trained); `loss` is the training loss without the classifier's term. Where the teacher's own
    classifier judges, `kl` is its divergence and `agree` the share of images to which it gives
    the same class from the student's global feature. The mean over images is exact, whatever the
    batch and the number of ranks.

    Args:
        students: students on the same patch grid; the teachers are asked once for all of them.
        batches: images at once at each size, over all ranks.
    """
    patch = students[0].student.backbone.config.patch_size
    rows: list[list[dict[str, Any]]] = [[] for _ in students]
    with contextlib.ExitStack() as stack:
        for one in students:
            stack.enter_context(evaluating(one.student))
            stack.enter_context(_uncompiled(one.student))
        for size in sizes:
            grid = (size // patch, size // patch)
            # Apple's GPUs have no float64.
            dtype = torch.float32 if world.device.type == "mps" else torch.float64
            shape = (len(teachers), len(_NAMES))
            sums = [
                torch.zeros((len(one.points), *shape), dtype=dtype, device=world.device)
                for one in students
            ]
            shown = teachers.image_size(grid)
            count = batches[size]
            sweep = loader.sweep(size=size, teacher_size=shown, batch_size=count)
            for batch in _every(sweep, -(-loader.samples // count), size, shown, world):
                real = len(batch.indices)
                targets = teachers.targets(batch.shown, grid)
                for one, mine in zip(students, sums, strict=True):
                    images = one.normalise(batch.pixels)
                    for i, (budget, keep) in enumerate(one.points):
                        with one.autocast():
                            predictions = one.student(images, cores=budget, keep=keep)
                        if real:
                            for j, teacher in enumerate(teachers):
                                mine[i, j] += _measure(
                                    predictions[j], targets[j], teachers, teacher
                                )
            for one, mine, found in zip(students, sums, rows, strict=True):
                means = (world.sum(mine) / loader.samples).tolist()
                found += [
                    _row(size, *point, teachers, j, values)
                    for point, by_teacher in zip(one.points, means, strict=True)
                    for j, values in enumerate(by_teacher)
                ]
    return rows


@contextlib.contextmanager
def _uncompiled(student: Student) -> Iterator[None]:
    """The student as it is: every budget, size and last batch would be compiled for a few runs."""
    compiled = [(block, block._compiled_call_impl) for block in student.blocks()]
    for block, _ in compiled:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, call in compiled:
            block._compiled_call_impl = call


def mean_loss(rows: Sequence[dict[str, Any]], teachers: Teachers) -> float:
    """The mean over the grid of the teachers' weighted losses: what "best" goes by."""
    weights = {teacher.name: teacher.settings.weight for teacher in teachers}
    first = teachers[0].name
    cells = len({(row["size"], row["cores"], row.get("keep", 1.0)) for row in rows})
    return sum(weights[row.get("teacher", first)] * row["loss"] for row in rows) / cells


def _every(
    sweep: Iterator[Batch], count: int, size: int, shown: tuple[int, int], world: World
) -> Iterator[Batch]:
    """The batches of a sweep, with one of no images where this rank has no part in one.

    With FSDP2 all ranks must run the student equally often.
    """
    ahead = next(sweep, None)
    for number in range(count):
        if ahead is not None and ahead.step == number:
            yield ahead
            ahead = next(sweep, None)
        else:
            blank = torch.zeros(1, 3, size, size, device=world.device)
            big = torch.zeros(1, 3, *shown, device=world.device)
            yield Batch(blank, big, torch.empty(0, dtype=torch.long), 0, number)


def _measure(
    said: Prediction, target: TeacherTargets, teachers: Teachers, teacher: FrozenTeacher
) -> Tensor:
    """Sums over the images of the batch of what `_NAMES` names."""
    cls = cosine_distance(said.cls, target.cls)
    cls_mse = (said.cls.float() - target.cls).square().mean(dim=-1)
    dense = cosine_distance(said.patches, target.patches).mean(dim=1)
    dense_mse = (said.patches.float() - target.patches).square().mean(dim=(1, 2))
    loss = cls + teachers.loss.dense * (dense + teachers.loss.mse * dense_mse)
    kl = agree = torch.zeros_like(cls)
    if target.logits is not None:
        logits = teacher.classify(said.cls)
        kl = classifier_kl(logits, target.logits)
        agree = (logits.argmax(dim=-1) == target.logits.argmax(dim=-1)).float()
    return torch.stack([1 - cls, cls_mse, 1 - dense, dense_mse, loss, kl, agree]).sum(dim=1)


def _row(
    size: int, budget: int, keep: float, teachers: Teachers, place: int, values: Sequence[float]
) -> dict[str, Any]:
    teacher = teachers[place]
    named = {"teacher": teacher.name} if len(teachers) > 1 else {}
    numbers = dict(zip(_NAMES, values, strict=True))
    if not teacher.settings.kl:
        numbers = {name: v for name, v in numbers.items() if name not in _OF_CLASSIFIER}
    merged = {"keep": keep} if keep < 1 else {}
    return {"size": size, "cores": budget, **merged, **named, **numbers}
