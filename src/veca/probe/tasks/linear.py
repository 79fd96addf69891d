"""Linear classification by SGD: a whole grid of learning rates trained at once.

The classifiers of the grid lie side by side in one tensor [D, rates, classes], so that a step is
two matrix products for all of them. They share each batch and its features and are otherwise
independent: training together gives what training apart would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from veca.probe import live
from veca.probe.augment import random_square
from veca.probe.data import hold_out, test_labels, train_labels
from veca.probe.extract import Stored
from veca.probe.protocol import Linear
from veca.probe.schedule import batches, cosine, torch_generator
from veca.probe.tasks.shared import (
    FeatureRequest,
    Outcome,
    ProbeSetup,
    Scaling,
    Selection,
    choose,
    classified,
    random_batches,
    scaling,
    square_wants,
)


class LinearTask:
    def __init__(self, setup: ProbeSetup, settings: Linear) -> None:
        self.setup, self.settings = setup, settings
        data = setup.data
        self.labels, self.right = train_labels(data), test_labels(data)
        self.held = hold_out(data, self.labels, settings.validation, setup.seed)
        self.wants = square_wants(setup, settings.view, settings.features)
        self.requests = [setup.of_test(self.wants)]
        if not settings.augment.enabled:
            self.requests.insert(0, setup.of_training(self.wants))
            return
        if setup.verify:
            setup.note(
                "not verified: random crops leave no features to train another classifier on"
            )
        if len(settings.learning_rates) > 1:
            # Held-out images are seen as in the test, not through random crops.
            held = [data.train_indices[i] for i in self.held.nonzero().flatten().tolist()]
            self.requests.insert(0, FeatureRequest(data.train, held, self.wants))

    def outcomes(self, features: Sequence[Sequence[Stored]]) -> list[Outcome]:
        setup, settings = self.setup, self.settings
        *training, test = features
        trained = self._fit_on_random_crops(*training) if settings.augment.enabled else []
        outcomes = []
        for i in range(len(setup.rows)):
            setup.progress("linear", i, len(setup.rows))
            details: dict[str, Any] = {"features": settings.features}
            if trained:
                grid, which, chosen = trained[i]
            else:
                x = training[0][i].matrix(settings.features).to(setup.device)
                fitted = fit(
                    x, self.labels, self.held, setup.data.train.num_classes, settings,
                    seed=setup.seed,
                )  # fmt: skip
                grid, which, chosen = fitted
                if setup.verify:
                    details["verified"] = verify(
                        x, self.labels, self.held, fitted, settings, setup.seed
                    )
            predicted = grid.predict(test[i].matrix(settings.features).to(setup.device), which)
            details.update(chosen.describe("learning_rate"))
            outcomes.append(classified(setup, i, predicted, self.right, details))
        setup.progress("linear", len(outcomes), len(outcomes))
        return outcomes

    def _fit_on_random_crops(self, held_out: Sequence[Stored] = ()) -> list[FittedGrid]:
        """Train on random crops and choose on the held-out images, if there is a choice."""
        settings, device = self.settings, self.setup.device
        everything = torch.arange(len(self.labels))
        if len(settings.learning_rates) == 1:
            only = Selection(settings.learning_rates[0], None, {})
            return [(grid, 0, only) for grid in self._train_on_random_crops(everything)]
        grids = self._train_on_random_crops(everything[~self.held])
        labels = self.labels[self.held].to(device)
        fitted: list[FittedGrid] = [
            (grid, *select(grid, stored.matrix(settings.features).to(device), labels))
            for grid, stored in zip(grids, held_out, strict=True)
        ]
        if not settings.refit:
            return fitted
        again = self._train_on_random_crops(everything, [chosen.value for *_, chosen in fitted])
        return [(grid, 0, chosen) for grid, (*_, chosen) in zip(again, fitted, strict=True)]

    def _train_on_random_crops(
        self, places: Tensor, rates: Sequence[float] | None = None
    ) -> list[LinearGrid]:
        """A grid for every row (or one classifier, at the rate given for it)."""
        setup, settings, data = self.setup, self.settings, self.setup.data

        def read(place: int) -> tuple[Image.Image, int]:
            where = int(places[place])
            return data.train.image(data.train_indices[where]), int(self.labels[where])

        def make(
            sample: tuple[Image.Image, int], size: int, random: np.random.Generator
        ) -> live.Drawn:
            image, label = sample
            interpolation = settings.view.interpolation
            return live.Drawn(
                random_square(image, settings.augment, size, interpolation, random), label
            )

        grids: list[LinearGrid] = []
        for row, features, views in random_batches(
            setup, self.wants, read, make, count=len(places), batch=settings.batch,
            iterations=settings.iterations, text="linear, random crops",
        ):  # fmt: skip
            x = live.global_features(features, settings.features).to(setup.device)
            if row == len(grids):
                grids.append(
                    LinearGrid(
                        x.shape[1],
                        data.train.num_classes,
                        settings,
                        seed=setup.seed,
                        device=setup.device,
                        rates=None if rates is None else [rates[row]],
                        normalize=Scaling(settings.normalize),
                    )
                )
            grids[row].step(x, torch.tensor([view.label for view in views], device=setup.device))
        return grids


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


FittedGrid = tuple[LinearGrid, int, Selection]
"""The classifiers of a grid, which of them to use, and how it was chosen."""


def train(grid: LinearGrid, features: Tensor, labels: Tensor, *, seed: int) -> None:
    """Train on features in memory."""
    s = grid.settings
    for order in batches(len(features), s.batch, s.iterations, seed):
        picked = torch.from_numpy(order).to(features.device)
        grid.step(features[picked], labels[picked])


def fit(
    train_features: Tensor,
    train_labels: Tensor,
    held_out: Tensor,
    num_classes: int,
    settings: Linear,
    *,
    seed: int,
) -> FittedGrid:
    """Train the grid on cached features, choose a rate on held-out rows, train again if asked.

    Args:
        train_features: [n, D] on the device to train on; train_labels: int64 [n].
        held_out: bool [n], the rows that the rate is chosen on.
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
        return grid, 0, Selection(settings.learning_rates[0], None, {})
    grid = new(kept)
    train(grid, train_features[kept], train_labels[kept], seed=seed)
    which, chosen = select(grid, train_features[held_out], train_labels[held_out])
    if settings.refit:
        grid, which = new(torch.ones_like(kept), [chosen.value]), 0
        train(grid, train_features, train_labels, seed=seed)
    return grid, which, chosen


def select(grid: LinearGrid, features: Tensor, labels: Tensor) -> tuple[int, Selection]:
    """The best classifier of a trained grid on validation features."""
    rates = grid.settings.learning_rates
    accuracies, losses = grid.scores(features, labels)
    which = choose(rates, accuracies, losses)
    tried = {f"{rate:g}": accuracy for rate, accuracy in zip(rates, accuracies, strict=True)}
    return which, Selection(rates[which], accuracies[which], tried)


def verify(
    features: Tensor,
    labels: Tensor,
    held_out: Tensor,
    fitted: FittedGrid,
    settings: Linear,
    seed: int,
) -> dict[str, Any]:
    """One `nn.Linear` and `torch.optim.SGD` at the chosen rate, from the same start and batches."""
    grid, which, chosen = fitted
    everything = settings.refit or len(settings.learning_rates) == 1
    rows = torch.ones_like(held_out) if everything else ~held_out
    x = grid.scaling.apply(features[rows.to(features.device)].float())
    y = labels[rows].to(x.device)
    layer = nn.Linear(x.shape[1], grid.bias.shape[1]).to(x.device)
    with torch.no_grad():
        start = torch.empty(x.shape[1], layer.out_features)
        start.normal_(std=settings.init_std, generator=torch_generator(seed, "init"))
        layer.weight.copy_(start.T)
        layer.bias.zero_()
    top = chosen.value * (settings.batch / (settings.reference_batch or settings.batch))
    optimizer = torch.optim.SGD(
        layer.parameters(), lr=top, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    order = batches(len(x), settings.batch, settings.iterations, seed)
    for step, picked in enumerate(order):
        optimizer.param_groups[0]["lr"] = top * cosine(step, settings.iterations, settings.final_lr)
        at = torch.from_numpy(picked).to(x.device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(layer(x[at]), y[at]).backward()
        optimizer.step()
    with torch.no_grad():
        same = layer(x).argmax(dim=1) == grid.predict(features[rows.to(features.device)], which)
        apart = (layer.weight.T - grid.classifier(which)[0]).abs().max() / layer.weight.abs().max()
    return {
        "with": f"torch.optim.SGD {torch.__version__}",
        "equal_predictions": float(same.double().mean()),
        "largest_weight_difference": float(apart),
    }
