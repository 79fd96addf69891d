"""Does a student know the photos it trains on better than others?

    python -m research.by_heart --config research/configs/coco-192-sizes.toml \
        --data COCO/train2017 --weights small=runs/at192-sizes/final

The same questions about two sets of photos, whole and in their own colours: the first that the
settings hold out, and as many drawn from those they train on. What was learnt by heart shows as the
difference. Writes research/results/by_heart.csv; rows of weights that are not named again are kept.
"""

from __future__ import annotations

import numpy as np

from benchmarks.common import print_table, write_csv
from research import RESULTS
from research.agreement import Jury, add_question, add_weights, options_of, split, swept
from veca.data import Loader


def main() -> None:
    parser = options_of(__doc__, images=500, out=RESULTS)
    add_weights(parser)
    add_question(parser, size=192)
    options = parser.parse_args()

    jury = Jury(options)
    rows = jury.rows([options.size], options.cores, photos="held out")
    seen = _trained_on(jury, jury.loader.samples)
    rows += jury.rows([options.size], options.cores, loader=seen, photos="trained on")
    write_csv("by_heart", rows, options.out, device=options.device, key="weights")
    print_table(rows)


def _trained_on(jury: Jury, count: int) -> Loader:
    """As many of the photos that the settings train on, drawn with seed 0."""
    data = split(jury.config)
    everything = range(len(data.source)) if data.subset is None else data.subset
    drawn = np.random.default_rng(0).choice(np.asarray(everything), count, replace=False)
    return swept(jury.config, data.source, drawn.tolist(), jury.world)


if __name__ == "__main__":
    main()
