"""Linear classification by SGD: a whole grid of learning rates trained at once.

The classifiers of the grid are one tensor [rates, D, classes]; they share each batch and its
features and are otherwise independent, so training together gives what training apart would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from veca.probe.protocol import Linear
from veca.probe.schedule import batches, cosine, torch_generator


class Scaling(NamedTuple):
    """What is done to features before a classifier sees them."""

    kind: str
    mean: Tensor | None = None
    std: Tensor | None = None

    def apply(self, features: Tensor) -> Tensor:
        if self.kind == "l2":
            return torch.nn.functional.normalize(features, dim=1)
        if self.mean is None or self.std is None:
            return features
        return (features - self.mean.to(features)) / self.std.to(features)


def scaling(kind: str, train: Tensor) -> Scaling:
    """The scaling that a protocol names; statistics come from training features alone."""
    if kind != "standardize":
        return Scaling(kind)
    mean, std = train.double().mean(dim=0), train.double().std(dim=0, correction=0)
    # A channel that never changes says nothing; left at zero, it cannot blow up at test time.
    return Scaling(kind, mean, torch.where(std > 1e-6 * std.max().clamp(min=1e-30), std, torch.inf))


class LinearGrid:
    """Classifiers [rates, D, classes] and their momentum; `step` trains all of them."""

    def __init__(
        self,
        width: int,
        classes: int,
        settings: Linear,
        *,
        seed: int,
        device: torch.device,
        rates: Sequence[float] | None = None,
        normalize: Scaling | None = None,
    ) -> None:
        self.settings = settings
        self.scaling = normalize or Scaling("none")
        chosen = settings.learning_rates if rates is None else tuple(rates)
        factor = settings.batch / settings.reference_batch if settings.reference_batch else 1.0
        self.rates = torch.tensor(chosen, dtype=torch.float64, device=device) * factor
        # One start for all, drawn on the CPU: the rates are compared from the same point.
        start = torch.empty(width, classes).normal_(
            std=settings.init_std, generator=torch_generator(seed, "init")
        )
        count = len(chosen)
        self.weight = start.to(device).expand(count, -1, -1).clone()
        self.bias = torch.zeros(count, 1, classes, device=device)
        self._velocity = (torch.zeros_like(self.weight), torch.zeros_like(self.bias))
        self._step = 0

    def logits(self, features: Tensor) -> Tensor:
        """[n, D] -> [rates, n, classes]."""
        scaled = self.scaling.apply(features.to(self.weight))
        return torch.baddbmm(self.bias, scaled.expand(len(self.weight), -1, -1), self.weight)

    @torch.no_grad()
    def step(self, features: Tensor, labels: Tensor) -> Tensor:
        """One step of every classifier on a batch; returns their losses [rates]."""
        s = self.settings
        scaled = self.scaling.apply(features.to(self.weight))
        inputs = scaled.expand(len(self.weight), -1, -1)
        scores = torch.baddbmm(self.bias, inputs, self.weight).log_softmax(dim=2)
        rows = torch.arange(len(labels), device=labels.device)
        losses = -scores[:, rows, labels].mean(dim=1)
        # The gradient of the mean cross-entropy by the logits, written out: softmax - one-hot.
        gradient = scores.exp_()
        gradient[:, rows, labels] -= 1
        gradient /= len(labels)
        factor = cosine(self._step, s.iterations, s.final_lr)
        rates = (self.rates * factor).to(self.weight).view(-1, 1, 1)
        updates = (inputs.transpose(1, 2) @ gradient, gradient.sum(dim=1, keepdim=True))
        for value, update, velocity in zip(
            (self.weight, self.bias), updates, self._velocity, strict=True
        ):
            if s.weight_decay:
                update = update + s.weight_decay * value
            velocity.mul_(s.momentum).add_(update)
            value.sub_(rates * velocity)
        self._step += 1
        return losses

    @torch.no_grad()
    def scores(self, features: Tensor, labels: Tensor) -> tuple[list[float], list[float]]:
        """Accuracy and mean loss of every classifier on labelled features."""
        logits = self.logits(features).double()
        hits = (logits.argmax(dim=2) == labels).double().mean(dim=1)
        rows = torch.arange(len(labels), device=labels.device)
        losses = -logits.log_softmax(dim=2)[:, rows, labels].mean(dim=1)
        return hits.tolist(), losses.tolist()

    def predict(self, features: Tensor, which: int) -> Tensor:
        """The classes that one classifier of the grid predicts, int64 [n]."""
        scaled = self.scaling.apply(features.to(self.weight))
        return (scaled @ self.weight[which] + self.bias[which]).argmax(dim=1)


class Chosen(NamedTuple):
    """A classifier, and how its setting was chosen."""

    value: float
    """The learning rate (before scaling by the batch), or C."""
    validation_top1: float | None
    """None where there was nothing to choose."""
    tried: dict[str, float]
    """Validation accuracy by setting."""


def choose(values: Sequence[float], accuracies: Sequence[float], losses: Sequence[float]) -> int:
    """The best by accuracy, of equals the one with the lower loss; one that blew up loses."""
    ranking = [
        (not math.isfinite(loss), -accuracy, loss if math.isfinite(loss) else 0.0, value)
        for value, accuracy, loss in zip(values, accuracies, losses, strict=True)
    ]
    return ranking.index(min(ranking))


def train(
    grid: LinearGrid,
    features: Tensor,
    labels: Tensor,
    *,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Train on features in memory."""
    s = grid.settings
    for i, order in enumerate(batches(len(features), s.batch, s.iterations, seed)):
        picked = torch.from_numpy(order).to(features.device)
        grid.step(features[picked], labels[picked])
        if progress:
            progress(i + 1)


def fit(
    train_features: Tensor,
    train_labels: Tensor,
    held_out: Tensor,
    num_classes: int,
    settings: Linear,
    *,
    seed: int,
) -> tuple[LinearGrid, int, Chosen]:
    """Train the grid on cached features, choose a rate on held-out rows, train again if asked.

    Args:
        train_features: [n, D] on the device to train on; train_labels: int64 [n].
        held_out: bool [n], the rows that the rate is chosen on.

    Returns:
        The classifiers, which of them to use, and how it was chosen.
    """
    device = train_features.device
    train_labels, held_out = train_labels.to(device), held_out.to(device)

    def new(rows: Tensor, rates: Sequence[float] | None = None) -> LinearGrid:
        return LinearGrid(
            train_features.shape[1],
            num_classes,
            settings,
            seed=seed,
            device=device,
            rates=rates,
            normalize=scaling(settings.normalize, train_features[rows]),
        )

    kept = ~held_out
    if len(settings.learning_rates) == 1:
        everything = torch.ones_like(held_out)
        grid = new(everything)
        train(grid, train_features, train_labels, seed=seed)
        return grid, 0, Chosen(settings.learning_rates[0], None, {})
    grid = new(kept)
    train(grid, train_features[kept], train_labels[kept], seed=seed)
    which, chosen = select(grid, train_features[held_out], train_labels[held_out])
    if settings.refit:
        grid, which = new(torch.ones_like(kept), [chosen.value]), 0
        train(grid, train_features, train_labels, seed=seed)
    return grid, which, chosen


def select(grid: LinearGrid, features: Tensor, labels: Tensor) -> tuple[int, Chosen]:
    """The best classifier of a trained grid on validation features."""
    rates = grid.settings.learning_rates
    accuracies, losses = grid.scores(features, labels)
    which = choose(rates, accuracies, losses)
    tried = {f"{rate:g}": accuracy for rate, accuracy in zip(rates, accuracies, strict=True)}
    return which, Chosen(rates[which], accuracies[which], tried)
