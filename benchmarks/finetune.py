"""The fine-tuning example on a part of Oxford-IIIT Pet, beside the frozen features.

    python -m benchmarks finetune --data oxford-pets

Breeds as class folders (links, made for the run): the first images of each breed in the official
training list to train on, the first of the test list to score. It runs examples/finetune.py on them
with that file's own defaults, but for the options given here, and writes results/finetune.csv, a
row a budget. Minutes to an hour on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path

from benchmarks.common import write_csv
from benchmarks.rows import RESULTS, ROOT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, required=True, help="with images/ and annotations/")
    add("--weights", default="tiny")
    add("--train", type=int, default=20, help="images of each breed to train on")
    add("--test", type=int, default=20, help="images of each breed to score")
    add("--size", type=int, default=128)
    add("--steps", type=int, default=200)
    add("--batch", type=int, default=32)
    add("--cores", default="8,64")
    add("--device", default="cpu")
    add("--out", type=Path, default=RESULTS, help="folder of finetune.csv")


def run(options: argparse.Namespace) -> None:
    spec = importlib.util.spec_from_file_location("finetune", ROOT / "examples" / "finetune.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with tempfile.TemporaryDirectory() as folder:
        parts = {"trainval": options.train, "test": options.test}
        for split, count in parts.items():
            class_folders(options.data, split, count, Path(folder, split))
        words = [f"{folder}/trainval", "--test", f"{folder}/test", "--out", f"{folder}/run"]
        for name in ("weights", "size", "steps", "batch", "cores", "device"):
            words += [f"--{name}", str(getattr(options, name))]
        found = example.main(words)
    rows = [
        {
            "weights": options.weights,
            "cores": cores,
            **{name: scores[cores] for name, scores in found["scores"].items()},
            **{f"{part} images": count for part, count in found["images"].items()},
            **{name: found["settings"][name] for name in ("size", "steps", "batch", "lr", "seed")},
        }
        for cores in options.cores.split(",")
    ]
    print(f"wrote {write_csv('finetune', rows, options.out, device=options.device)}")


def class_folders(data: Path, split: str, count: int, out: Path) -> None:
    """Links to the first images of each breed in an official list, a folder a breed."""
    made: dict[str, int] = {}
    for line in (data / "annotations" / f"{split}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name = line.split()[0]
        breed = name.rpartition("_")[0]
        made[breed] = made.get(breed, 0) + 1
        if made[breed] <= count:
            (out / breed).mkdir(parents=True, exist_ok=True)
            image = (data / "images" / f"{name}.jpg").resolve()
            (out / breed / image.name).symlink_to(image)
