"""How well students agree with their teacher as images grow, on photos no run trained on.

    python -m research.agreement --config research/configs/coco-stage2.toml \
        --data COCO/train2017 --weights small=runs/coco-2/final

Teacher, data and split are the settings' of a run of `veca distill`; the photos are the first
`--images` of those it holds out. Scales of the targets come from `targets.safetensors` beside the
first weights; what others answer on a scale of their own is brought to it. Writes
benchmarks/results/agreement.csv: a row for each network, size and budget; rows of weights that are
not named again are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import print_table, write_csv
from benchmarks.rows import RESULTS
from veca.data import AugmentConfig, InMemoryImages, Loader
from veca.data.decode import EncodedImage, shaped
from veca.dense import DenseVit
from veca.distill import DistillConfig, load_config
from veca.distill.data import ImageSplit, open_data
from veca.distill.parallel import World
from veca.distill.standardise import TargetStatistics, find_targets
from veca.distill.student import Prediction, Student, load_backbone
from veca.distill.teachers import open_teachers
from veca.distill.validate import ValidatedStudent, validate
from veca.images import normalize
from veca.teachers import read_dense_vit
from veca.teachers.ours import is_dense_vit
from veca.weights.store import TARGETS

PIXELS = {"cuda": 96 * 512 * 512, "cpu": 4 * 512 * 512}
"""Pixels of a batch; fewer images of larger sizes."""


def main() -> None:
    parser = options_of(__doc__, images=512)
    add_weights(parser)
    parser.add_argument("--sizes", type=int, nargs="+", default=[192, 256, 384, 512, 768, 1024])
    parser.add_argument("--cores", type=int, nargs="+", default=[8, 16, 32, 64])
    options = parser.parse_args()

    rows = Jury(options).rows(options.sizes, options.cores)
    write_csv("agreement", rows, options.out, device=options.device, key="weights")
    print_table(rows)


# ------------------------------------ what every benchmark on a run's held-out photos begins with


def options_of(doc: str | None, *, images: int, out: Path = RESULTS) -> argparse.ArgumentParser:
    """The settings of a run, how many of its held-out photos, and where."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--images", type=int, default=images)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=out)
    return parser


def add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", action="append", required=True, metavar="NAME=FOLDER")


def add_question(parser: argparse.ArgumentParser, size: int) -> None:
    """One size, and the smallest and the largest budget."""
    parser.add_argument("--size", type=int, default=size)
    parser.add_argument("--cores", type=int, nargs="+", default=[8, 64])


def opened(options: argparse.Namespace) -> tuple[DistillConfig, World, Loader]:
    """The settings, the device and the photos."""
    config = load_config(options.config, overrides=options.set, data=options.data)
    world = World(device=torch.device(options.device))
    source, held = held_out_places(config)
    return config, world, swept(config, source, held[: options.images], world)


class Jury:
    """A run's teacher and held-out photos, and the networks of `--weights` that they judge."""

    def __init__(self, options: argparse.Namespace) -> None:
        folders = dict(item.split("=", 1) for item in options.weights)
        self.config, self.world, self.loader = opened(options)
        self.teaching = open_teachers(self.config, self.world)
        if len(self.teaching) > 1:
            raise SystemExit("one teacher at a time: heads of further ones are not measured here.")
        if self.teaching[0].settings.standardise:
            first = next(iter(folders.values()))
            self.teaching.set_statistics(self._scale(first), self.world.device)
        self.students = {name: self._student(folder) for name, folder in folders.items()}

    def _scale(self, folder: str) -> dict[str, TargetStatistics]:
        """That of the targets, beside some weights."""
        lesson = self.teaching[0]
        return find_targets([lesson.name], [lesson.widths], folder)

    def _student(self, folder: str) -> Student:
        dense = is_dense_vit(Path(folder))
        backbone = read_dense_vit(folder)[0] if dense else load_backbone(folder, backend="auto")
        lesson = self.teaching[0]
        student = Student(backbone.float(), [lesson.widths]).to(self.world.device)
        if lesson.statistics is not None and (Path(folder).expanduser() / TARGETS).is_file():
            own = self._scale(folder)[lesson.name].to(self.world.device)
            if not all(map(torch.equal, chain(*own), chain(*lesson.statistics))):
                student.register_forward_hook(_translating(own, lesson.statistics))
        return student

    def rows(
        self,
        sizes: Sequence[int],
        cores: Sequence[int],
        *,
        loader: Loader | None = None,
        **about: object,
    ) -> list[dict[str, object]]:
        """The rows of all networks, with `about` in each; a dense one has no budget.

        They are asked about the photos held out, or about those of another loader.
        """
        loader = self.loader if loader is None else loader
        pixels = PIXELS.get(self.world.device.type, PIXELS["cpu"])
        found = validate(
            [self.examined(student, cores) for student in self.students.values()],
            self.teaching,
            loader,
            sizes=sizes,
            batches={size: max(1, pixels // size**2) for size in sizes},
            world=self.world,
        )
        return [
            {
                "weights": name,
                **about,
                "images": loader.samples,
                **row,
                **_blank(self.students[name]),
            }
            for name, rows in zip(self.students, found, strict=True)
            for row in rows
        ]

    def examined(self, student: Student, cores: Sequence[int]) -> ValidatedStudent:
        """How a student is asked; a dense one once, whatever the budgets."""
        architecture = student.backbone.config
        mean, std = architecture.image_mean, architecture.image_std
        return ValidatedStudent(
            student,
            [(budget, 1.0) for budget in (cores[-1:] if _blank(student) else cores)],
            lambda pixels: normalize(pixels, mean, std),
            lambda: _precision(self.world.device),
        )


def _translating(
    own: TargetStatistics, jury: TargetStatistics
) -> Callable[[Student, object, list[Prediction]], list[Prediction]]:
    """What brings a student's answers from its own scale to the jury's."""

    def translate(_: Student, __: object, said: list[Prediction]) -> list[Prediction]:
        raw = own.unstandardise(said[0].cls.float(), said[0].patches.float())
        return [Prediction(jury.cls.standardise(raw[0]), jury.dense.standardise(raw[1]))]

    return translate


def _blank(student: Student) -> dict[str, str]:
    """What a row of a network without budgets says of them."""
    return {"cores": ""} if isinstance(student.backbone, DenseVit) else {}


def held_out_places(config: DistillConfig) -> tuple[Any, Sequence[int]]:
    """The images that runs with these settings validate on: their source, and places in it."""
    data = split(config)
    if data.validation is None:
        raise SystemExit("these settings hold no images out; set data.hold_out.")
    everything = range(len(data.validation))
    return data.validation, everything if data.validation_subset is None else data.validation_subset


def split(config: DistillConfig) -> ImageSplit:
    """What runs with these settings train on and what they hold out; nothing is decoded."""
    return open_data(dataclasses.replace(config.data, in_memory=False), World())


def swept(config: DistillConfig, source: Any, chosen: Sequence[int], world: World) -> Loader:
    """The photos at these places of the source, whole, as a run would hold them in memory."""
    about = config.data
    places = np.asarray(chosen)
    if isinstance(source, InMemoryImages):
        pixels = source.images[torch.from_numpy(places)].numpy()
    else:
        size, mode = about.memory_size, about.memory_mode
        views = (shaped(EncodedImage.of(source, int(i)), size, mode) for i in places)
        pixels = np.stack([np.asarray(view).transpose(2, 0, 1) for view in views])
    images = InMemoryImages(
        torch.from_numpy(pixels).to(world.device),
        places.astype(np.int64),
        [source.name(int(place)) for place in places],
        mode=about.memory_mode,
        source_fingerprint=source.fingerprint(),
    )
    return Loader(
        images,
        batch_size=1,
        size=about.memory_size,
        augment=AugmentConfig(kind="none"),
        device=world.device,
        shuffle=False,
    )


def _precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """As in training: bfloat16 on a GPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
