"""Logistic regression by L-BFGS in float64, C chosen on held-out training images.

Minimised is C * (sum of cross-entropies) + |W|^2 / 2, the bias not penalised: scikit-learn's
objective, so that C means the same. It is convex and has one minimum, so the solution for one C is
the start for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from veca.probe.data import hold_out, test_labels, train_labels
from veca.probe.extract import Stored
from veca.probe.protocol import Logreg
from veca.probe.tasks.shared import (
    Outcome,
    ProbeSetup,
    Scaling,
    Selection,
    agreement,
    choose,
    classified,
    require_sklearn,
    scaling,
    square_wants,
)


class LogregTask:
    def __init__(self, setup: ProbeSetup, settings: Logreg) -> None:
        self.setup, self.settings = setup, settings
        self.labels, self.right = train_labels(setup.data), test_labels(setup.data)
        self.held = hold_out(setup.data, self.labels, settings.validation, setup.seed)
        wants = square_wants(setup, settings.view, settings.features)
        self.requests = [setup.of_training(wants), setup.of_test(wants)]

    def outcomes(self, features: Sequence[Sequence[Stored]]) -> list[Outcome]:
        setup, settings = self.setup, self.settings
        tries = len(settings.c_values)
        # It is solved in float64, which Apple's GPUs do not have.
        device = torch.device("cpu") if setup.device.type == "mps" else setup.device
        labels, held = self.labels.to(device), self.held.to(device)
        outcomes = []
        for i, stored in enumerate(zip(*features, strict=True)):
            train, test = (part.matrix(settings.features).to(device) for part in stored)

            def tell(done: int, before: int = i * tries) -> None:
                setup.progress("logistic regression", before + done, len(setup.rows) * tries)

            fitted = fit(train, labels, held, setup.data.train.num_classes, settings, progress=tell)
            predicted = fitted.predict(test)
            details: dict[str, Any] = {
                "features": settings.features,
                **fitted.chosen.describe("C"),
                "iterations": fitted.solution.iterations,
                "unconverged_C": fitted.unconverged,
            }
            if not fitted.solution.converged:
                setup.note(
                    f"{setup.rows[i][0].label}: logistic regression with C = "
                    f"{fitted.chosen.value:.3g} stopped after {fitted.solution.iterations} "
                    "iterations, before the tolerance"
                )
            if setup.verify:
                details["verified"] = verify(
                    train, self.labels, self.held, test, predicted, self.right, fitted, settings
                )
            outcomes.append(classified(setup, i, predicted, self.right, details))
        return outcomes


class Solution(NamedTuple):
    """A classifier for one C."""

    weight: Tensor
    """[D, classes], float64."""
    bias: Tensor
    """[classes], float64."""
    iterations: int
    converged: bool
    """Whether the gradient came below the tolerance."""

    def logits(self, features: Tensor) -> Tensor:
        return features.to(self.weight) @ self.weight + self.bias


def solve(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    c: float,
    settings: Logreg,
    start: Solution | None = None,
) -> Solution:
    """The minimum for one C; features [n, D] and labels int64 [n], on one device."""
    x = features.double()
    count, width = x.shape
    # The mean loss, not the sum: the tolerance then does not depend on the number of images.
    penalty = 1.0 / (2.0 * c * count)
    weight = x.new_zeros(width, num_classes) if start is None else start.weight.clone()
    bias = x.new_zeros(num_classes) if start is None else start.bias.clone()
    weight.requires_grad_(True)
    bias.requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        lr=1.0,
        max_iter=settings.max_iterations,
        max_eval=2 * settings.max_iterations,
        tolerance_grad=settings.tolerance,
        tolerance_change=1e-15,  # about what float64 can tell apart
        history_size=settings.history,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, labels) + penalty * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    objective()
    largest = max(float(p.grad.abs().max()) for p in (weight, bias))  # type: ignore[union-attr]
    state = optimizer.state[weight]
    return Solution(
        weight.detach(), bias.detach(), int(state["n_iter"]), largest <= settings.tolerance
    )


class FittedLogreg(NamedTuple):
    solution: Solution
    scaling: Scaling
    chosen: Selection
    unconverged: list[float]
    """Values of C whose solution was not found within the iterations allowed."""

    def predict(self, features: Tensor) -> Tensor:
        scaled = self.scaling.apply(features.to(self.solution.weight))
        return self.solution.logits(scaled).argmax(dim=1)


def fit(
    features: Tensor,
    labels: Tensor,
    held_out: Tensor,
    num_classes: int,
    settings: Logreg,
    *,
    progress: Callable[[int], None] | None = None,
) -> FittedLogreg:
    """Try every C on the rows not held out, take the best on those that are; train again if asked.

    Args:
        features: [n, D], labels: int64 [n], held_out: bool [n]; on one device.
    """
    values = settings.c_values
    kept = ~held_out if len(values) > 1 else torch.ones_like(held_out)
    scale = scaling(settings.normalize, features[kept])
    inside, outside = (scale.apply(features[rows].double()) for rows in (kept, ~kept))
    solutions: list[Solution] = []
    accuracies, losses = [], []
    for i, c in enumerate(values):
        previous = solutions[-1] if solutions else None
        solutions.append(solve(inside, labels[kept], num_classes, c, settings, previous))
        if len(values) > 1:
            logits = solutions[-1].logits(outside)
            accuracies.append(float((logits.argmax(dim=1) == labels[~kept]).double().mean()))
            losses.append(float(F.cross_entropy(logits, labels[~kept])))
        if progress:
            progress(i + 1)
    unconverged = [c for c, one in zip(values, solutions, strict=True) if not one.converged]
    if len(values) == 1:
        return FittedLogreg(solutions[0], scale, Selection(values[0], None, {}), unconverged)
    which = choose(values, accuracies, losses)
    tried = {f"{c:.3g}": accuracy for c, accuracy in zip(values, accuracies, strict=True)}
    chosen = Selection(values[which], accuracies[which], tried)
    solution = solutions[which]
    if settings.refit:
        scale = scaling(settings.normalize, features)
        solution = solve(
            scale.apply(features.double()), labels, num_classes, values[which], settings, solution
        )
        if not solution.converged and values[which] not in unconverged:
            unconverged.append(values[which])
    return FittedLogreg(solution, scale, chosen, unconverged)


def verify(
    features: Tensor,
    labels: Tensor,
    held_out: Tensor,
    test: Tensor,
    ours: Tensor,
    right: Sequence[Sequence[int]],
    fitted: FittedLogreg,
    settings: Logreg,
) -> dict[str, Any]:
    """scikit-learn's `LogisticRegression` with the chosen C, on the rows that were trained on."""
    sklearn = require_sklearn()
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped,import-not-found]

    everything = settings.refit or len(settings.c_values) == 1
    rows = torch.ones_like(held_out) if everything else ~held_out
    inside, queries = (
        fitted.scaling.apply(x.double().cpu()).numpy()
        for x in (features[rows.to(features.device)], test)
    )
    classifier = LogisticRegression(C=fitted.chosen.value, tol=1e-8, max_iter=20_000)
    theirs = classifier.fit(inside, labels[rows].numpy()).predict(queries)
    return {"with": f"scikit-learn {sklearn.__version__}", **agreement(ours, theirs, right)}
