"""Fine-tune a VECA backbone and a segmentation head, end to end, on the trimaps of Oxford Pets.

    python examples/finetune_segmentation.py --data pets/ --out runs/trimaps
    python examples/finetune_segmentation.py --data pets/ --out runs/trimaps-full --no-nested

The head reads the patches: each of them says the classes (pet, background, border) of 4 x 4 cells,
4 pixels each. Nested dropout stays on: each step trains one budget, so that all of them go on being
trained. `--no-nested` trains all cores at every step, and the table at the end shows what that does
to smaller budgets.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from finetuning import (
    as_batch,
    chunks,
    finetune,
    options,
    random_box,
    report,
    run,
    some,
    start,
    view,
)
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import veca
from veca.probe.datasets import Dataset, open_dataset
from veca.probe.metrics import Confusion

CELLS = 4
"""Predictions a patch, down and across."""


class Segmenter(nn.Module):
    """Logits [B, classes, 4h, 4w] of images [B, 3, H, W] with h x w patches, at a budget."""

    def __init__(self, backbone: veca.Veca, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Conv2d(backbone.config.feature_width, classes * CELLS**2, 1)

    def forward(self, images: Tensor, cores: int | None = None) -> Tensor:
        features = self.backbone(images, cores).feature_map()  # [B, D, h, w]
        return F.pixel_shuffle(self.head(features), CELLS)


def resized(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Logits at another (height, width)."""
    return F.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)


def training_view(
    image: Image.Image, mask: np.ndarray, size: int, rng: random.Random
) -> tuple[Image.Image, Tensor]:
    """The same random part of image and mask, mirrored half of the time."""
    box = random_box(image.size, rng)
    seen = view(image, box, size)
    labels = Image.fromarray(mask).resize((size, size), Image.Resampling.NEAREST, box=box)
    if rng.random() < 0.5:
        seen, labels = (x.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for x in (seen, labels))
    return seen, torch.from_numpy(np.array(labels)).long()


@torch.inference_mode()
def miou(model: Segmenter, data: Dataset, indices: Sequence[int], size: int, cores: int) -> float:
    """Mean intersection over union at a budget, scored on the masks as they are."""
    confusion = Confusion(data.num_classes, data.ignore_index)
    for some_of in chunks(indices, 32):
        images = [data.image(i) for i in some_of]
        whole = [view(image, (0, 0, *image.size), size) for image in images]
        logits = model(as_batch(whole, model.backbone), cores)
        for i, one in zip(some_of, logits, strict=True):
            mask = data.mask(i)
            confusion.add(mask, resized(one[None], mask.shape)[0].argmax(dim=0))
    return confusion.metrics()["miou"]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = options(__doc__.splitlines()[0], "runs/finetune-segmentation").parse_args(argv)
    backbone = start(args)
    train = open_dataset("oxford-pets", args.data, "train", task="segmentation")
    test = open_dataset("oxford-pets", args.data, "test", task="segmentation")
    train_indices = some(len(train), args.limit, args.seed)
    test_indices = some(len(test), args.test_limit or args.limit, args.seed)
    model = Segmenter(backbone, train.num_classes).to(args.device)

    def loss_of(chosen: list[int], cores: int | None, rng: random.Random) -> Tensor:
        samples = [train_indices[i] for i in chosen]
        views = [training_view(train.image(i), train.mask(i), args.size, rng) for i in samples]
        images, masks = zip(*views, strict=True)
        labels = torch.stack(masks).to(args.device)
        logits = resized(model(as_batch(images, backbone), cores), labels.shape[1:])
        return F.cross_entropy(logits, labels, ignore_index=train.ignore_index)

    seconds = finetune(model, backbone, loss_of, len(train_indices), args)
    return report(
        args,
        backbone,
        model.head,
        lambda cores: miou(model, test, test_indices, args.size, cores),
        "mIoU",
        dataset=train.name,
        images={"train": len(train_indices), "test": len(test_indices)},
        training_seconds=round(seconds, 1),
    )


if __name__ == "__main__":
    run(main)
