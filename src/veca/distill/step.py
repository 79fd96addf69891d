"""One training step, from top to bottom: batch -> teachers -> students -> loss -> update.

All students of a run see the same pixels and learn the same targets, so the teachers run once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from veca.data import Batch
from veca.distill.config import DistillConfig
from veca.distill.losses import DistillLoss
from veca.distill.schedule import StepPlan, seed_torch
from veca.distill.teachers import TeacherTargets
from veca.distill.trainer import StudentGroup, StudentTrainer


def training_step(group: StudentGroup, step: StepPlan, batch: Batch) -> tuple[Tensor, Tensor]:
    """Run a step; returns loss terms and gradients' lengths, still on the device.

    The terms are the first student's, then its siblings' (see `StudentGroup.term_names`).
    """
    grid = group.grid(step.size)
    sums: dict[str, Tensor] = {}
    for pixels, shown, share, last in _parts(batch, step, group.config):
        targets = group.teachers.targets(shown, grid)
        for name, trainer in group.trainers.items():
            terms = forward_backward(trainer, group.loss, pixels, targets, step, share, last=last)
            sums[name] = sums[name] + terms if name in sums else terms
    group.world.finish_backward()
    norms = [update(trainer, step) for trainer in group.trainers.values()]
    return torch.cat(list(sums.values())), torch.stack(norms)


def _parts(
    batch: Batch, step: StepPlan, config: DistillConfig
) -> Iterator[tuple[Tensor, Tensor, float, bool]]:
    """The parts in which a batch is run, to save memory.

    Each is the students' pixels, the teachers', its share of the batch, and whether it is the last.
    """
    count, o = len(batch.pixels), config.optimizer
    size = -(-count // o.accumulate_by_size.get(step.size, o.accumulate))
    parts = list(zip(batch.pixels.split(size), batch.shown.split(size), strict=True))
    for number, (pixels, shown) in enumerate(parts):
        yield pixels, shown, len(pixels) / count, number + 1 == len(parts)


def forward_backward(
    trainer: StudentTrainer,
    loss: DistillLoss,
    pixels: Tensor,
    targets: Sequence[TeacherTargets],
    step: StepPlan,
    share: float,
    *,
    last: bool,
) -> Tensor:
    """One student's passes on a part of the batch; returns its loss terms, on the device.

    Args:
        pixels: [B, 3, H, W] in 0..1.
        targets: what each teacher says about them.
        share: of the part in the step's batch, 0..1.
        last: whether the part is the step's last.
    """
    images = trainer.normalise(pixels)
    # A dense student has no budgets, hence one pass, however many the others make.
    budgets = (0,) if trainer.dense else step.budgets
    keep = 1.0 if trainer.dense else step.keep
    share = share / len(budgets)

    run = functools.partial(one_pass, trainer, loss)
    terms: Tensor | None = None
    for number, cores in enumerate(budgets):
        seed_torch(trainer.config.seed, step.number, number)
        with trainer.world.backward(trainer.wrapped, last=last and number + 1 == len(budgets)):
            if trainer.graphs is None:
                here = run(images, targets, cores, keep, share)
            else:
                here = trainer.graphs.run(run, images, targets, cores, keep, share)
        terms = here if terms is None else terms + here
    assert terms is not None
    return terms


def one_pass(
    trainer: StudentTrainer,
    loss: DistillLoss,
    images: Tensor,
    targets: Sequence[TeacherTargets],
    cores: int,
    keep: float,
    share: float,
) -> Tensor:
    """Forward and backward at one budget and share of patch tokens.

    Adds to the gradients, returns the loss terms.
    """
    with trainer.autocast():
        predictions = trainer.wrapped(images, cores=cores, keep=keep)
    losses = loss(predictions, targets)
    (loss.total(losses) * share).backward()
    return loss.terms(losses) * share


def update(trainer: StudentTrainer, step: StepPlan) -> Tensor:
    """Move a student's weights after all parts of a step; returns the gradient's length."""
    settings, optimizers = trainer.settings, trainer.optimizers
    optimizers.set_lr(step.lr * settings.lr_scale, settings.adamw_scale)
    norm = trainer.world.clip_gradients(trainer.parameters, trainer.config.optimizer.clip)
    optimizers.step()
    optimizers.zero_grad(keep=trainer.graphs is not None)
    if trainer.ema is not None:
        trainer.ema.update(step.number + 1)
    return norm
