"""The fine-tuning example on public sets, beside the frozen features of the same images.

    python -m benchmarks finetune --dataset oxford-pets --data oxford-pets
    python -m benchmarks finetune --dataset camvid --data camvid --size 192 --batch 8

Oxford-IIIT Pet: breeds as class folders (links, made for the run), the first images of each breed
in the official training list to train on, the first of the test list to score. CamVid: its training
and test frames with their masks. It runs examples/finetune.py on them with that file's own
defaults, but for the options given here, and writes results/finetune.csv, a row a budget. Minutes
on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.common import write_csv
from benchmarks.rows import RESULTS, ROOT

STAGES = ("frozen, 10-NN", "frozen, linear", "fine-tuned")
_CAMVID_VOID = 11


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset", choices=["oxford-pets", "camvid"], default="oxford-pets")
    add("--data", type=Path, required=True, help="its folder")
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
        train, test = Path(folder, "train"), Path(folder, "test")
        if options.dataset == "camvid":
            frames_and_masks(options.data, "train", train)
            frames_and_masks(options.data, "test", test)
        else:
            class_folders(options.data, "trainval", options.train, train)
            class_folders(options.data, "test", options.test, test)
        words = [str(train), "--test", str(test), "--out", f"{folder}/run"]
        for name in ("weights", "size", "steps", "batch", "cores", "device"):
            words += [f"--{name}", str(getattr(options, name))]
        found = example.main(words)
    rows = [
        {
            "dataset": options.dataset,
            "weights": options.weights,
            "metric": found["metric"],
            "cores": cores,
            **{name: found["scores"].get(name, {}).get(cores, "") for name in STAGES},
            **{f"{part} images": count for part, count in found["images"].items()},
            **{name: found["settings"][name] for name in ("size", "steps", "batch", "lr", "seed")},
        }
        for cores in options.cores.split(",")
    ]
    path = write_csv("finetune", rows, options.out, device=options.device, key="dataset")
    print(f"wrote {path}")


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


def frames_and_masks(data: Path, split: str, out: Path) -> None:
    """Links to the frames of a split, and its masks with 255 where the example expects it."""
    for name in ("images", "masks"):
        (out / name).mkdir(parents=True)
    for frame in sorted((data / split).iterdir()):
        name = f"{frame.stem}.png"
        (out / "images" / frame.name).symlink_to(frame.resolve())
        mask = np.array(Image.open(data / f"{split}annot" / name))
        mask[mask == _CAMVID_VOID] = 255
        Image.fromarray(mask).save(out / "masks" / name)
