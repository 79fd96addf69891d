"""`veca embed` without patches: the last block for CLS alone, beside the whole last block.

    python -m benchmarks cls_only

For each of `--weights`, a folder of made JPEG files is embedded into Parquet again and again,
in one process on `--threads` threads, decoding included: as it is, and as before, when the whole
network ran and the patches were thrown away. The two take turns; images/s are medians, the ratio is
the median of the rounds' ratios. Seconds are those of the processor, all threads together, which
what else runs does not disturb. The vectors are written as float32 and compared. Writes
results/cls_only.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import veca
from benchmarks.common import print_table, write_csv
from benchmarks.embed import make_images
from benchmarks.rows import RESULTS
from veca.embed import embed, read_embeddings
from veca.embed.pipeline import ModelRunner
from veca.model import Veca

Features = tuple[dict[str, Tensor], tuple[int, int]]


def before(self: ModelRunner, pixels: Tensor) -> Features:
    """What `ModelRunner` did in 0.1: the whole network, of which CLS is kept."""
    out = self._model(pixels, cores=self._cores)
    return {"cls": out.cls}, out.grid


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    with mock.patch.object(ModelRunner, "_features", before):
        yield


def once(model: Veca, images: Path, out: Path, options: argparse.Namespace) -> float:
    """Images a second of one whole run."""
    begin = time.process_time()
    report = embed(
        images,
        out,
        weights=model,
        cores=options.cores,
        size=(options.side, options.side),
        dtype="float32",
        batch_size=options.batch,
        workers=0,
        threads=options.threads,
    )
    return report.images / (time.process_time() - begin)


def measured(weights: str, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    model = veca.load(weights)
    rates: dict[str, list[float]] = {"before": [], "now": []}
    place = folder / weights.replace("/", "-")
    for number in range(options.rounds + 1):
        # The first round warms up; then each begins every other round.
        order = ("before", "now") if number % 2 else ("now", "before")
        for name in order:
            with as_before() if name == "before" else contextlib.nullcontext():
                rate = once(model, folder / "images", place / f"{name}-{number}", options)
            if number:
                rates[name].append(rate)
    ratios = [now / then for now, then in zip(rates["now"], rates["before"], strict=True)]
    vectors = [read_embeddings(place / f"{name}-0")[1] for name in rates]
    return {
        "weights": model.name or weights,
        "pixels": options.side,
        "cores": options.cores or model.config.num_cores,
        "images": options.images,
        "batch": options.batch,
        "threads": options.threads,
        "rounds": options.rounds,
        "before images/s": statistics.median(rates["before"]),
        "now images/s": statistics.median(rates["now"]),
        "ratio": statistics.median(ratios),
        "lowest ratio": min(ratios),
        "largest difference": float(np.abs(vectors[0] - vectors[1]).max()),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", nargs="+", default=["tiny", "small"])
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--side", type=int, default=224, help="pixels, of files and for the model")
    parser.add_argument("--cores", type=int, help="by default all")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "images", options.images, options.side)
        rows = [measured(weights, folder, options) for weights in options.weights]
    write_csv("cls_only", rows, options.out, device="cpu", key="weights")
    print_table(rows)
