"""How well students agree with their teacher as images grow, on photos no run trained on.

    PYTHONPATH=src python benchmarks/agreement.py --config configs/coco-stage2.toml \
        --data COCO/train2017 --weights small=runs/coco-2/final

Teacher, data and split are the settings' of a run of `veca distill`; the photos are the first
`--images` of those it holds out. Scales of the targets come from `targets.safetensors` beside the
first weights. Writes results/agreement.csv: a row for each network, size and budget.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import print_table, write_csv
from rows import RESULTS
from veca.data import AugmentConfig, InMemoryImages, Loader
from veca.data.decode import EncodedImage, shaped
from veca.distill import DistillConfig, load_config
from veca.distill.parallel import World
from veca.distill.setup import open_data, open_teachers
from veca.distill.standardise import find_targets
from veca.distill.student import Student, load_backbone
from veca.distill.teaching import Teaching
from veca.distill.validate import validate
from veca.images import normalize
from veca.teachers import read_dense_vit
from veca.teachers.ours import is_dense_vit

PIXELS = 96 * 512 * 512
"""Pixels of a batch; fewer images of larger sizes."""


def main() -> None:
    parser = options_of(__doc__, images=512)
    add_weights(parser)
    parser.add_argument("--sizes", type=int, nargs="+", default=[192, 256, 384, 512, 768, 1024])
    parser.add_argument("--cores", type=int, nargs="+", default=[8, 16, 32, 64])
    options = parser.parse_args()

    named = named_weights(options)
    config, world, loader = opened(options)
    teaching = open_lessons(config, world, next(iter(named.values())))
    rows: list[dict[str, object]] = []
    for name, folder in named.items():
        found = measure(folder, teaching, loader, world, options.sizes, options.cores)
        rows += [{"weights": name, **row} for row in found]
    write_csv("agreement", rows, options.out, device=options.device)
    print_table(rows)


# ------------------------------------ what every benchmark on a run's held-out photos begins with


def options_of(doc: str | None, *, images: int) -> argparse.ArgumentParser:
    """The settings of a run, how many of its held-out photos, and where."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--images", type=int, default=images)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", action="append", required=True, metavar="NAME=FOLDER")


def named_weights(options: argparse.Namespace) -> dict[str, str]:
    return dict(item.split("=", 1) for item in options.weights)


def opened(options: argparse.Namespace) -> tuple[DistillConfig, World, Loader]:
    """The settings, the device and the photos."""
    config = load_config(options.config, overrides=options.set, data=options.data)
    world = World(device=torch.device(options.device))
    return config, world, held_out(config, options.images, world)


def open_lessons(config: DistillConfig, world: World, beside: str) -> Teaching:
    """The settings' teachers, with the scales of the targets that lie beside some weights."""
    teaching = open_teachers(config, world)
    if len(teaching.lessons) > 1:
        raise SystemExit("one teacher at a time: heads of further ones are not measured here.")
    for lesson in teaching.lessons:
        if lesson.settings.standardise:
            found = find_targets([lesson.name], [lesson.widths], beside)
            teaching.set_statistics(found, world.device)
    return teaching


def measure(
    folder: str,
    teaching: Teaching,
    loader: Loader,
    world: World,
    sizes: Sequence[int],
    cores: Sequence[int],
) -> list[dict[str, Any]]:
    """The rows of one network; a dense one has no budget."""
    dense = is_dense_vit(Path(folder))
    backbone = read_dense_vit(folder)[0] if dense else load_backbone(folder, backend="auto")
    student = Student(backbone.float(), [x.widths for x in teaching.lessons]).to(world.device)
    architecture = backbone.config
    found = validate(
        student,
        teaching,
        loader,
        sizes=sizes,
        budgets=cores[-1:] if dense else cores,
        batches={size: max(1, PIXELS // size**2) for size in sizes},
        normalise=lambda pixels: normalize(pixels, architecture.image_mean, architecture.image_std),
        world=world,
        autocast=lambda: _precision(world.device),
    )
    blank = {"cores": ""} if dense else {}
    return [{"images": loader.samples, **row, **blank} for row in found]


def held_out(config: DistillConfig, count: int, world: World) -> Loader:
    """The first of the photos that runs with these settings hold out; only those are decoded."""
    about = dataclasses.replace(config.data, in_memory=False)
    data = open_data(about, World())
    if data.validation is None:
        raise SystemExit("these settings hold no images out; set data.hold_out.")
    source = data.validation
    held = data.validation_subset if data.validation_subset is not None else range(len(source))
    places = np.asarray(held[:count])
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
