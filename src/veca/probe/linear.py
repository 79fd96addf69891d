"""Linear classification by SGD: a whole grid of learning rates trained at once.

The classifiers of the grid lie side by side in one tensor [D, rates, classes], so that a step is
two matrix products for all of them. They share each batch and its features and are otherwise
independent: training together gives what training apart would.
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
    exact = train.cpu().double()  # not every device has float64
    mean, std = exact.mean(dim=0), exact.std(dim=0, correction=0)
    # A channel that never changes says nothing; left at zero, it cannot blow up at test time.
    std = torch.where(std > 1e-6 * std.max().clamp(min=1e-30), std, torch.inf)
    return Scaling(kind, mean.to(train), std.to(train))


class LinearGrid:
    """Classifiers [D, rates, classes] and their momentum; `step` trains all of them."""

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
        self.rates = torch.tensor([rate * factor for rate in chosen], device=device).view(-1, 1)
        # One start for all, drawn on the CPU: the rates are compared from the same point.
        start = torch.empty(width, 1, classes).normal_(
            std=settings.init_std, generator=torch_generator(seed, "init")
        )
        self.weight = start.to(device).expand(-1, len(chosen), -1).clone()
        self.bias = torch.zeros(len(chosen), classes, device=device)
        self._velocity = (torch.zeros_like(self.weight), torch.zeros_like(self.bias))
        self._step = 0

    def __len__(self) -> int:
        return len(self.bias)

    def classifier(self, which: int) -> tuple[Tensor, Tensor]:
        """Weight [D, classes] and bias [classes] of one of the grid."""
        return self.weight[:, which], self.bias[which]

    def logits(self, features: Tensor) -> Tensor:
        """[n, D] -> [n, rates, classes]."""
        return self._logits(self.scaling.apply(features.to(self.weight)))

    def _logits(self, scaled: Tensor) -> Tensor:
        return (scaled @ self.weight.flatten(1)).unflatten(1, self.bias.shape).add_(self.bias)

    @torch.no_grad()
    def step(self, features: Tensor, labels: Tensor) -> Tensor:
        """One step of every classifier on a batch; returns their losses [rates]."""
        s = self.settings
        scaled = self.scaling.apply(features.to(self.weight))
        scores = self._logits(scaled).log_softmax(dim=2)
        rows = torch.arange(len(labels), device=labels.device)
        losses = -scores[rows, :, labels].mean(dim=0)
        # The gradient of the mean cross-entropy by the logits, written out: softmax - one-hot.
        gradient = scores.exp_()
        gradient[rows, :, labels] -= 1
        gradient /= len(labels)
        rates = self.rates * cosine(self._step, s.iterations, s.final_lr)
        updates = (
            (scaled.T @ gradient.flatten(1)).unflatten(1, self.bias.shape),
            gradient.sum(dim=0),
        )
        for value, update, velocity in zip(
            (self.weight, self.bias), updates, self._velocity, strict=True
        ):
            if s.weight_decay:
                update = update + s.weight_decay * value
            velocity.mul_(s.momentum).add_(update)
            value.addcmul_(rates, velocity, value=-1)
        self._step += 1
        return losses

    @torch.no_grad()
    def scores(self, features: Tensor, labels: Tensor) -> tuple[list[float], list[float]]:
        """Accuracy and mean loss of every classifier on labelled features."""
        logits, labels = self.logits(features).cpu().double(), labels.cpu()
        hits = (logits.argmax(dim=2) == labels[:, None]).double().mean(dim=0)
        rows = torch.arange(len(labels))
        losses = -logits.log_softmax(dim=2)[rows, :, labels].mean(dim=0)
        return hits.tolist(), losses.tolist()

    def predict(self, features: Tensor, which: int) -> Tensor:
        """The classes that one classifier of the grid predicts, int64 [n]."""
        weight, bias = self.classifier(which)
        return (self.scaling.apply(features.to(weight)) @ weight + bias).argmax(dim=1)


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
