"""The photos a run held out, as a folder: to judge short runs on a part of its data.

    python -m research.held_out --config research/configs/coco-stage1.toml \
        --data COCO/packed --after 33398 --out COCO/held-out

With `--after N` only those beyond the first N photos of the data, so that a run on the first N
trains on none of them. File names are places in the data.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from research.agreement import held_out_places
from veca._util.files import atomic_write
from veca.distill import load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    source, held = held_out_places(load_config(options.config, data=options.data))
    chosen = [place for place in held if place >= options.after]
    options.out.mkdir(parents=True, exist_ok=True)
    for place in chosen:
        suffix = Path(source.name(place)).suffix
        with atomic_write(options.out / f"{place:06d}{suffix}") as file:
            file.write(source.read(place))
    print(f"{len(chosen)} of {len(held)} held-out photos, in {options.out}")


if __name__ == "__main__":
    main()
