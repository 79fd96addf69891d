"""Fine-tune a VECA backbone on a folder of yours, and see whether it was worth it.

    python finetune.py photos/ --out runs/a    # photos/CLASS/*.jpg: a classifier
    python finetune.py scenes/ --out runs/b    # scenes/images and scenes/masks: a segmenter
    python finetune.py photos/ --test others/ --steps 500

One file that needs nothing but `veca`: copy it and change it. It goes through three stages:

1. Frozen: the features of each image once, at each budget. A linear head is trained on them.
   For a classifier, 10-NN is scored, too.
2. Fine-tuned: from that head on, backbone and head are trained together at a low rate. Each step
   draws a budget, so that all of them go on working (`--no-nested` trains all cores at every step).
   With `--keep 1,0.5,0.35` it draws the share of patch tokens that go on, too.
3. A table: frozen beside fine-tuned, at each budget, on images that were not trained on. The
   frozen rows, and the fine-tuned one, see every patch; one more has the smallest share trained.

Masks are PNG files of class numbers, named as their images; 255 is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import veca
from veca.distill import BudgetSampler, KeepSampler
from veca.images import read_image
from veca.probe.metrics import Confusion

KINDS = {".jpg", ".jpeg", ".png", ".webp"}
CELLS = 4
"""A segmenter predicts so many cells a patch, down and across."""
NEIGHBOURS = 10
Sample = tuple[Path, Any]
"""An image, and its class or the path of its mask."""
Box = tuple[float, float, float, float]


# ------------------------------------------------------------------------------------ the two tasks


class Classify:
    """Class folders; a linear layer on the first core."""

    metric = "top-1"

    def __init__(self, root: Path) -> None:
        self.classes = sorted(p.name for p in root.iterdir() if p.is_dir() and images_in(p))
        if len(self.classes) < 2:
            raise veca.VecaError(f"{root} needs two folders of images or more, one for each class.")

    def samples(self, root: Path) -> list[Sample]:
        folders = enumerate(self.classes)
        return [(path, number) for number, name in folders for path in images_in(root / name)]

    def head(self, width: int) -> nn.Module:
        return nn.Linear(width, len(self.classes))

    def features(self, out: veca.VecaOutput) -> Tensor:
        return out.cls

    def target(self, sample: Sample, box: Box | None, flip: bool, size: int) -> Tensor:
        return torch.tensor(sample[1])

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)

    def score(self, logits: Tensor, targets: Tensor) -> float:
        return (logits.argmax(dim=1) == targets).double().mean().item()


class Segment:
    """Images and masks; a linear layer on the patches that predicts 4 x 4 cells each."""

    metric = "mIoU"

    def __init__(self, root: Path) -> None:
        self.masks = {path.stem: path for path in sorted((root / "masks").glob("*.png"))}
        if not self.masks:
            raise veca.VecaError(f"{root / 'masks'} has no PNG files.")
        seen = np.unique(np.concatenate([np.unique(mask_of(p)) for p in self.masks.values()]))
        self.classes = [str(number) for number in range(int(seen[seen < 255].max()) + 1)]

    def samples(self, root: Path) -> list[Sample]:
        masks = {path.stem: path for path in (root / "masks").glob("*.png")}
        return [(p, masks[p.stem]) for p in images_in(root / "images") if p.stem in masks]

    def head(self, width: int) -> nn.Module:
        layers = nn.Conv2d(width, len(self.classes) * CELLS**2, 1), nn.PixelShuffle(CELLS)
        return nn.Sequential(*layers)

    def features(self, out: veca.VecaOutput) -> Tensor:
        return out.feature_map()

    def target(self, sample: Sample, box: Box | None, flip: bool, size: int) -> Tensor:
        mask = Image.fromarray(mask_of(sample[1]))
        mask = mask.resize((size, size), Image.Resampling.NEAREST, box=box)
        mask = mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else mask
        return torch.from_numpy(np.array(mask)).long()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(resized(logits, targets), targets, ignore_index=255)

    def score(self, logits: Tensor, targets: Tensor) -> float:
        confusion = Confusion(len(self.classes), 255)
        for one, target in zip(logits, targets, strict=True):
            confusion.add(target.cpu().numpy(), resized(one[None], target[None])[0].argmax(dim=0))
        return confusion.metrics()["miou"]


Task = Classify | Segment


def resized(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits of cells as logits of pixels."""
    return F.interpolate(logits, size=targets.shape[1:], mode="bilinear", align_corners=False)


def task_of(root: Path) -> Task:
    if not root.is_dir():
        raise veca.VecaError(f"{root} is no folder.")
    return Segment(root) if (root / "masks").is_dir() else Classify(root)


def images_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.suffix.lower() in KINDS)


def mask_of(path: Path) -> np.ndarray:
    with Image.open(path) as mask:
        return np.array(mask if mask.mode in ("P", "L") else mask.convert("L"), dtype=np.uint8)


# ------------------------------------------------------------------------------------------ images


def split(samples: list[Sample], share: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Training and test samples, the share taken from each class (or from all masks)."""
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample[1] if isinstance(sample[1], int) else None, []).append(sample)
    train, test = [], []
    for group in groups.values():
        random.Random(seed).shuffle(group)
        count = max(1, round(share * len(group))) if len(group) > 1 else 0
        test += group[:count]
        train += group[count:]
    return train, test


def random_box(size: tuple[int, int], rng: random.Random) -> Box:
    """A part of an image of (width, height): half of its area or more, nearly its shape."""
    width, height = size
    share, stretch = math.sqrt(rng.uniform(0.5, 1)), math.exp(rng.uniform(-0.15, 0.15))
    w, h = min(1, share * stretch) * width, min(1, share / stretch) * height
    left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
    return left, top, left + w, top + h


def batch_of(
    task: Task, model: veca.Veca, samples: Sequence[Sample], size: int, rng: random.Random | None
) -> tuple[Tensor, Tensor]:
    """Pixels as the weights want them, and targets; with `rng` random parts, mirrored or not."""
    views, targets = [], []
    for sample in samples:
        image = read_image(sample[0])
        box = random_box(image.size, rng) if rng else None
        flip = rng is not None and rng.random() < 0.5
        view = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
        views.append(view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else view)
        targets.append(task.target(sample, box, flip, size))
    pixels = model.preprocess(views, size=(size, size)).pixels
    return pixels.to(model.device), torch.stack(targets).to(model.device)


# ------------------------------------------------------------------------------------------ stages


@torch.no_grad()
def features_of(
    task: Task,
    model: veca.Veca,
    samples: Sequence[Sample],
    size: int,
    budgets: Sequence[int],
    keep: float = 1.0,
) -> tuple[dict[int, Tensor], Tensor]:
    """Features of whole images at each budget, and their targets."""
    found: dict[int, list[Tensor]] = {cores: [] for cores in budgets}
    targets = []
    for first in range(0, len(samples), 32):
        pixels, some = batch_of(task, model, samples[first : first + 32], size, None)
        targets.append(some)
        for cores in budgets:
            found[cores].append(task.features(model(pixels, cores, keep)))
    return {cores: torch.cat(parts) for cores, parts in found.items()}, torch.cat(targets)


def fit_head(
    task: Task, head: nn.Module, features: dict[int, Tensor], targets: Tensor, args: Any
) -> None:
    """Train the head alone: one head for all budgets, a budget drawn at each step."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.head_lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.head_steps)
    rng = random.Random(args.seed)
    order = torch.Generator().manual_seed(args.seed)
    for _ in range(args.head_steps):
        some = torch.randint(len(targets), (64,), generator=order)
        loss = task.loss(head(features[rng.choice(list(features))][some]), targets[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def finetune(task: Task, model: veca.Veca, head: nn.Module, train: list[Sample], args: Any) -> None:
    """Train backbone and head together; each step runs on the budget and share that it draws."""
    groups = [
        {"params": list(model.parameters()), "lr": args.lr},
        {"params": list(head.parameters()), "lr": args.head_lr / 10},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    warmup = max(1, args.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, (1 + math.cos(math.pi * step / args.steps)) / 2),
    )
    bank = model.config.num_cores
    budgets = BudgetSampler(bank, weights=[1.0] * 8, seed=args.seed)  # all alike
    keep = KeepSampler(args.keep, seed=args.seed)
    rng = random.Random(args.seed)
    queue: list[Sample] = []
    model.train()
    for step in range(args.steps):
        while len(queue) < args.batch:
            queue += rng.sample(train, len(train))
        chosen, queue = queue[: args.batch], queue[args.batch :]
        pixels, targets = batch_of(task, model, chosen, args.size, rng)
        cores = None if args.no_nested else budgets.draw(step)[0]
        loss = task.loss(head(task.features(model(pixels, cores, keep.draw(step)))), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *head.parameters()], 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 10 == 0 or step + 1 == args.steps:
            print(f"step {step + 1}/{args.steps}: loss {loss.item():.3f}", flush=True)
    model.eval()


def knn(train: Tensor, labels: Tensor, test: Tensor, classes: int) -> Tensor:
    """Votes [n, classes] of the nearest training images, by cosines of centred features."""
    mean = train.mean(dim=0)
    near = F.normalize(test - mean, dim=1) @ F.normalize(train - mean, dim=1).T
    score, index = near.topk(min(NEIGHBOURS, len(train)), dim=1)
    votes = torch.zeros(len(test), classes, device=test.device)
    return votes.scatter_add_(1, labels[index], torch.exp(score / 0.07))


def evaluate(
    task: Task, head: nn.Module, features: dict[int, Tensor], targets: Tensor
) -> dict[str, float]:
    with torch.no_grad():
        return {str(c): task.score(head(found), targets) for c, found in features.items()}


# --------------------------------------------------------------------------------------------- run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("data", type=Path, help="class folders, or a folder with images/ and masks/")
    add("--test", type=Path, help="the same of test images; otherwise some are held out")
    add("--hold-out", type=float, default=0.2, help="share of the images to test on")
    add("--weights", default="tiny", help="a name, a folder, a file or a hub id")
    add("--out", type=Path, default=Path("runs/finetune"))
    add("--cores", default="8,16,32,64", help="budgets to score")
    add("--size", type=int, default=128, help="side of the square that the network sees, in pixels")
    add("--steps", type=int, default=200, help="of fine-tuning; 0 stops at the frozen rows")
    add("--batch", type=int, default=32)
    add("--lr", type=float, default=1e-4, help="of the backbone")
    add("--head-steps", type=int, default=300, help="of the head on frozen features")
    add("--head-lr", type=float, default=2e-3)
    add("--no-nested", action="store_true", help="train all cores at every step")
    add("--keep", type=shares, default=[1.0], help="shares of patch tokens to draw from")
    add("--seed", type=int, default=0)
    add("--device", default="cpu")
    return parser


def shares(text: str) -> list[float]:
    """'1,0.5,0.35' -> [1.0, 0.5, 0.35]."""
    return [float(share) for share in text.split(",")]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parser().parse_args(argv)
    if min(args.batch, args.head_steps, args.steps + 1) < 1 or args.size < 16 or args.size % 16:
        raise veca.VecaError("--batch and --head-steps are at least 1, --size a multiple of 16.")
    KeepSampler(args.keep)  # refuses what cannot be, before the work starts
    torch.manual_seed(args.seed)
    model = veca.load(args.weights, device=args.device)
    budgets = [int(cores) for cores in args.cores.split(",")]
    task = task_of(args.data)
    if args.test:
        train, test = task.samples(args.data), task.samples(args.test)
    else:
        train, test = split(task.samples(args.data), args.hold_out, args.seed)
    if not train or not test:
        raise veca.VecaError(f"{args.test or args.data} has no images to test on.")
    print(f"{len(train)} training images, {len(test)} test images, {len(task.classes)} classes")

    columns: dict[str, dict[str, float]] = {}

    def column(name: str, scores: dict[str, float]) -> None:
        columns[name] = scores
        told = ", ".join(f"{score:.3f} at {cores}" for cores, score in scores.items())
        print(f"{name}: {task.metric} {told} cores", flush=True)

    begin = time.perf_counter()
    known, labels = features_of(task, model, train, args.size, budgets)
    asked, truth = features_of(task, model, test, args.size, budgets)
    if isinstance(task, Classify):
        votes = {c: knn(known[c], labels, asked[c], len(task.classes)) for c in budgets}
        scores = {str(c): task.score(votes[c], truth) for c in budgets}
        column(f"frozen, {NEIGHBOURS}-NN", scores)
    head = task.head(model.num_features).to(args.device)
    fit_head(task, head, known, labels, args)
    column("frozen, linear", evaluate(task, head, asked, truth))
    del known, asked
    if args.steps:
        sha = veca.weights.weights_hash(model)
        finetune(task, model, head, train, args)
        asked, truth = features_of(task, model, test, args.size, budgets)
        column("fine-tuned", evaluate(task, head, asked, truth))
        if min(args.keep) < 1:
            asked, truth = features_of(task, model, test, args.size, budgets, min(args.keep))
            column(f"fine-tuned, keep {min(args.keep)}", evaluate(task, head, asked, truth))
        frozen = max(max(scores.values()) for name, scores in columns.items() if "frozen" in name)
        chance = 1.96 * math.sqrt(frozen * (1 - frozen) / len(test))  # 95 %, of a share of images
        if max(columns["fine-tuned"].values()) <= frozen + chance * isinstance(task, Classify):
            print(
                "Fine-tuning gained no more here than chance explains: the frozen features are "
                "the better choice."
            )
        veca.save(model, args.out / "backbone", provenance={"finetuned": {"derived_from": sha}})
    args.out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(state, args.out / "head.safetensors", {"classes": json.dumps(task.classes)})

    results = {
        "metric": task.metric,
        "scores": columns,
        "images": {"train": len(train), "test": len(test)},
        "settings": {
            name: getattr(args, name)
            for name in (
                "steps",
                "batch",
                "size",
                "lr",
                "head_steps",
                "head_lr",
                "no_nested",
                "keep",
                "seed",
            )
        },
        "seconds": round(time.perf_counter() - begin, 1),
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    lines = [f"| cores | {' | '.join(columns)} |", "|---:" * (len(columns) + 1) + "|"]
    lines += [
        f"| {cores} | {' | '.join(f'{scores[str(cores)]:.3f}' for scores in columns.values())} |"
        for cores in budgets
    ]
    (args.out / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join([*lines, f"wrote {args.out}"]))
    return results


def run(main: Callable[[], object]) -> None:
    """Bad input is one line, not a traceback."""
    try:
        main()
    except veca.VecaError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


if __name__ == "__main__":
    run(main)
