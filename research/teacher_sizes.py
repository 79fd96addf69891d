"""How much a teacher with a classifier knows about photos as they are enlarged.

    python -m research.teacher_sizes --config research/configs/coco-stage1.toml \
        --data COCO/train2017

The photos are the first `--images` of those the settings hold out. Writes
research/results/teacher_sizes.csv: for each size the mean entropy of the classes (nats; ln of their
number is none the wiser), the mean probability of the likeliest, and the variance of the global
feature.
"""

from __future__ import annotations

import math

import torch

from benchmarks.common import print_table, write_csv
from research import RESULTS
from research.agreement import opened, options_of
from veca.distill.teachers import open_teachers

BATCH = 32


def main() -> None:
    parser = options_of(__doc__, images=256, out=RESULTS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[192, 224, 256, 320, 384, 512])
    options = parser.parse_args()

    config, world, loader = opened(options)
    teacher = open_teachers(config, world)[0].model
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
