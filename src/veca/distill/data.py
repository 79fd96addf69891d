"""The images of a run: opened as the settings say, split, and cut into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from veca._util.cache import cache_folder
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
from veca.distill import samples
from veca.distill.config import DataConfig, DistillConfig
from veca.distill.parallel import World
from veca.distill.schedule import TrainingPlan
from veca.errors import DistillError

Images = Any
"""Whatever `veca.data.open_source` takes, or `InMemoryImages`."""


@dataclass
class ImageSplit:
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
) -> ImageSplit:
    """The images of the settings, or those given, split into training and validation."""
    given = source if source is not None else config.source
    if isinstance(given, str) and not given:
        raise DistillError("no images to train on; give a folder with --data or data.source.")
    images = _open(given, config, world)
    other = validation if validation is not None else (config.validation or None)
    if other is not None:
        return ImageSplit(images, None, _open(other, config, world), None, "a set of its own")
    if not config.hold_out:
        return ImageSplit(images, None, None, None, "none")
    try:
        train, held = hold_out(len(images), config.hold_out, seed=config.split_seed)
    except DataError as error:  # it knows the numbers, not where they were set
        raise DataError(
            f"data.hold_out: {error} Give more images, or hold out fewer (--set data.hold_out=N)."
        ) from error
    split = f"{len(held)} of {len(images)} images held out, drawn with seed {config.split_seed}"
    return ImageSplit(images, train, images, held, split)


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
    data: ImageSplit,
    plan: TrainingPlan,
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


def validation_loader(
    config: DistillConfig, data: ImageSplit, plan: TrainingPlan, world: World
) -> Loader | None:
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
