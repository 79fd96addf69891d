"""Fine-tune a VECA backbone and a linear classifier, end to end, on the 37 breeds of Oxford Pets.

    python examples/finetune_classification.py --data pets/ --out runs/breeds
    python examples/finetune_classification.py --data pets/ --out runs/breeds-full --no-nested

The head reads the first core, the global embedding. Nested dropout stays on: each step trains one
budget, so that all of them go on being trained. `--no-nested` trains all cores at every step, and
the table at the end shows what that does to smaller budgets.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from finetuning import (
    as_batch,
    chunks,
    finetune,
    middle_box,
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
from veca.probe.metrics import accuracy


class Classifier(nn.Module):
    """Logits [B, classes] of images [B, 3, H, W] at a budget."""

    def __init__(self, backbone: veca.Veca, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.feature_width, classes)

    def forward(self, images: Tensor, cores: int | None = None) -> Tensor:
        return self.head(self.backbone(images, cores).cls)


def training_view(image: Image.Image, size: int, rng: random.Random) -> Image.Image:
    """A random part of the image, mirrored half of the time."""
    seen = view(image, random_box(image.size, rng), size)
    return seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else seen


@torch.inference_mode()
def top1(model: Classifier, data: Dataset, indices: Sequence[int], size: int, cores: int) -> float:
    """Share of images whose breed is found, at a budget."""
    guesses: list[int] = []
    for some_of in chunks(indices, 32):
        images = [data.image(i) for i in some_of]
        squares = [view(image, middle_box(image.size), size) for image in images]
        guesses += model(as_batch(squares, model.backbone), cores).argmax(dim=1).tolist()
    return accuracy(guesses, [data.labels(i) for i in indices], data.num_classes)["top1"]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = options(__doc__.splitlines()[0], "runs/finetune-classification").parse_args(argv)
    backbone = start(args)
    train = open_dataset("oxford-pets", args.data, "train", task="classification")
    test = open_dataset("oxford-pets", args.data, "test", task="classification")
    train_indices = some(len(train), args.limit, args.seed)
    test_indices = some(len(test), args.test_limit or args.limit, args.seed)
    model = Classifier(backbone, train.num_classes).to(args.device)

    def loss_of(chosen: list[int], cores: int | None, rng: random.Random) -> Tensor:
        samples = [train_indices[i] for i in chosen]
        views = [training_view(train.image(i), args.size, rng) for i in samples]
        labels = torch.tensor([train.label(i) for i in samples], device=args.device)
        return F.cross_entropy(model(as_batch(views, backbone), cores), labels)

    seconds = finetune(model, backbone, loss_of, len(train_indices), args)
    return report(
        args,
        backbone,
        model.head,
        lambda cores: top1(model, test, test_indices, args.size, cores),
        "top-1",
        dataset=train.name,
        images={"train": len(train_indices), "test": len(test_indices)},
        training_seconds=round(seconds, 1),
    )


if __name__ == "__main__":
    run(main)
