"""How much networks rely on where patches are: their coordinates stretched, or shuffled.

    python -m research.positions --config research/configs/coco-stage2.toml \
        --data COCO/train2017 --weights small=runs/coco-2/final

In training the patches' coordinates are shifted and stretched at random, those of the cores are
not. Here the patches' are multiplied by a factor, or dealt out anew among the patches, and the
cosines to the teacher are measured again on photos that the settings hold out. Writes
research/results/positions.csv; rows of weights that are not named again are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common import print_table, write_csv
from research import RESULTS
from research.agreement import Jury, add_weights, options_of
from veca import rope

FACTORS = (0.5, 1.0, 2.0)


def main() -> None:
    parser = options_of(__doc__, images=64, out=RESULTS)
    add_weights(parser)
    parser.add_argument("--size", type=int, default=192)
    options = parser.parse_args()

    jury, rows = Jury(options), []
    for what in (*(str(factor) for factor in FACTORS), "shuffled"):
        with _coordinates(what):
            rows += jury.rows([options.size], [64], coordinates=what)
    write_csv("positions", rows, options.out, device=options.device, key="weights")
    print_table(rows)


@contextmanager
def _coordinates(what: str) -> Iterator[None]:
    """Inside, patches believe to be elsewhere."""
    real = rope.grid_coordinates

    def changed(height: int, width: int, device: torch.device | None = None) -> Tensor:
        xy = real(height, width, device)
        if what != "shuffled":
            return xy * float(what)
        order = torch.randperm(len(xy), generator=torch.Generator().manual_seed(0))
        return xy[order.to(xy.device)]

    with mock.patch.object(rope, "grid_coordinates", changed):
        yield


if __name__ == "__main__":
    main()
