"""Tiny datasets in plain layouts, and tiny backbones, for the probe tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from conftest import stirred
from veca import Veca, VecaConfig, create_model
from veca.probe import ElasticBackbone, load_protocol
from veca.probe.protocol import Protocol

CONFIG = VecaConfig(depth=2, width=32, heads=2, num_cores=8)
CLASSES = ("blue", "green", "red")


def model(seed: int = 0, config: VecaConfig = CONFIG) -> Veca:
    torch.manual_seed(seed)
    return stirred(create_model(config)).eval()


def backbone(cores: int | None = None, seed: int = 0, **kwargs: str) -> ElasticBackbone:
    return ElasticBackbone(model(seed), cores, **kwargs)


def photo(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def class_folders(root: Path, train: int = 8, test: int = 5, size=(40, 52), seed: int = 0) -> Path:
    """Noise with one channel raised by class: nearly, not quite, separable."""
    random = np.random.default_rng(seed)
    for split, count in (("train", train), ("test", test)):
        for channel, name in enumerate(CLASSES):
            for i in range(count):
                pixels = random.integers(0, 200, (*size, 3))
                pixels[..., 2 - channel] += random.integers(0, 56)
                photo(root / split / name / f"{i:03d}.png", pixels.astype(np.uint8))
    return root


def images_masks(root: Path, train: int = 6, test: int = 4, seed: int = 0) -> Path:
    """A bright half and a dark half, left or right, and an ignored strip; sizes differ."""
    random = np.random.default_rng(seed)
    (root).mkdir(parents=True, exist_ok=True)
    (root / "dataset.json").write_text(json.dumps({"classes": ["dark", "bright", "never"]}))
    for split, count in (("train", train), ("test", test)):
        for i in range(count):
            height, width = int(random.integers(40, 70)), int(random.integers(40, 70))
            mask = np.zeros((height, width), dtype=np.uint8)
            half = slice(0, width // 2) if i % 2 else slice(width // 2, width)
            mask[:, half] = 1
            pixels = random.integers(0, 60, (height, width, 3)) + 150 * mask[..., None]
            mask[:3] = 255
            photo(root / "images" / split / f"{i}.png", pixels.astype(np.uint8))
            photo(root / "masks" / split / f"{i}.png", mask)
    return root


def rgb_depth(root: Path, train: int = 6, test: int = 4, seed: int = 0) -> Path:
    """The brighter the nearer; a strip at the top is invalid. Millimetres."""
    random = np.random.default_rng(seed)
    root.mkdir(parents=True, exist_ok=True)
    (root / "dataset.json").write_text(json.dumps({"depth_scale": 1000, "max_depth": 8}))
    for split, count in (("train", train), ("test", test)):
        for i in range(count):
            near = random.uniform(0, 1, (4, 5)).repeat(16, axis=0).repeat(16, axis=1)
            depth = (1000 + 6000 * (1 - near)).astype(np.uint16)
            depth[:2] = 0
            pixels = np.repeat((near * 255).astype(np.uint8)[..., None], 3, axis=2)
            photo(root / "rgb" / split / f"{i}.png", pixels)
            photo(root / "depth" / split / f"{i}.png", depth)
    return root


def protocol(*settings: str) -> Protocol:
    """`quick`, cut down to what a test needs."""
    small = [
        "timing.repeats=0",
        "extract.batch=8",
        "knn.k=[1,3]",
        "knn.report_k=3",
        "knn.view.size=32",
        "linear.view.size=32",
        "linear.iterations=30",
        "linear.batch=16",
        "linear.validation=0.25",
        "linear.learning_rates=[0.01,0.1]",
        "logreg.view.size=32",
        "logreg.c_exponents=[-2.0,0.0,3]",
        "segmentation.view.size=48",
        "segmentation.optimizer.iterations=20",
        "segmentation.optimizer.warmup=2",
        "segmentation.optimizer.batch=4",
        "depth.view.size=64",
        "depth.optimizer.iterations=20",
        "depth.optimizer.warmup=2",
        "depth.optimizer.batch=4",
    ]
    return load_protocol("quick").with_settings([*small, *settings])
