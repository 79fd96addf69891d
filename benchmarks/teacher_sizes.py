"""How much a teacher with a classifier knows about photos as they are enlarged.

    PYTHONPATH=src python benchmarks/teacher_sizes.py --config configs/coco-stage1.toml \
        --data COCO/train2017

The photos are the first `--images` of those the settings hold out. Writes
results/teacher_sizes.csv: for each size the mean entropy of the classes (nats; ln of their number
is none the wiser), the mean probability of the likeliest, and the variance of the global feature.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from agreement import held_out
from common import print_table, write_csv
from rows import RESULTS
from veca.distill import load_config
from veca.distill.parallel import World
from veca.distill.setup import open_teachers

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--sizes", type=int, nargs="+", default=[192, 224, 256, 320, 384, 512])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()

    config = load_config(options.config, overrides=options.set, data=options.data)
    world = World(device=torch.device(options.device))
    teacher = open_teachers(config, world).lessons[0].teacher
    loader = held_out(config, options.images, world)
    rows: list[dict[str, object]] = []
    for size in options.sizes:
        grid = teacher.grid_for(size)
        features = torch.cat(
            [
                teacher.features(batch.pixels, grid).cls
                for batch in loader.sweep(size=teacher.input_size(grid), batch_size=BATCH)
            ]
        )
        logits = teacher.classify(features)
        if logits is None:
            raise SystemExit(f"teacher {teacher.name} has no classifier.")
        chances = logits.softmax(dim=-1)
        entropy = torch.special.entr(chances).sum(dim=-1).mean()
        rows.append(
            {
                "teacher": teacher.name,
                "size": size,
                "images": len(features),
                "entropy": float(entropy),
                "most_possible": math.log(chances.shape[1]),
                "likeliest": float(chances.amax(dim=-1).mean()),
                "variance": float(features.var(dim=0).sum()),
            }
        )
    write_csv("teacher_sizes", rows, options.out, device=options.device)
    print_table(rows)


if __name__ == "__main__":
    main()
