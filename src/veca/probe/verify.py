"""The same numbers from other code: scikit-learn and torch's own optimiser, on the very features.

Slow and never needed for a score; `veca probe --verify` runs it and stores what it found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from veca.errors import MissingExtraError
from veca.probe.linear import Chosen, LinearGrid
from veca.probe.logreg import Fitted
from veca.probe.metrics import Confusion, accuracy
from veca.probe.protocol import Knn, Linear, Logreg
from veca.probe.schedule import batches, cosine, torch_generator

Array = np.ndarray[Any, Any]


def require_sklearn() -> Any:
    try:
        import sklearn  # type: ignore[import-untyped,import-not-found]
    except ImportError as error:
        raise MissingExtraError(
            "--verify needs scikit-learn; install it with: pip install 'veca[probe]'"
        ) from error
    return sklearn


def knn(
    train: Tensor,
    labels: Tensor,
    test: Tensor,
    found: Mapping[int, Tensor],
    right: Sequence[Sequence[int]],
    settings: Knn,
) -> dict[str, Any]:
    """`KNeighborsClassifier` in float64, with the vote weights as a callable."""
    sklearn = require_sklearn()
    from sklearn.neighbors import KNeighborsClassifier  # type: ignore[import-untyped,import-not-found]

    bank, queries = (x.cpu().double().numpy() for x in (train, test))
    if settings.center:
        mean = bank.mean(axis=0)
        bank, queries = bank - mean, queries - mean

    def weights(distance: Array) -> Array:
        weighed: Array = np.exp((1 - distance) / settings.temperature)
        return weighed

    result: dict[str, Any] = {"with": f"scikit-learn {sklearn.__version__}"}
    for k, ours in found.items():
        classifier = KNeighborsClassifier(k, weights=weights, metric="cosine", algorithm="brute")
        theirs = classifier.fit(bank, labels.numpy()).predict(queries)
        result[f"k{k}"] = _agreement(ours, theirs, right)
    return result


def logreg(
    features: Tensor,
    labels: Tensor,
    held_out: Tensor,
    test: Tensor,
    ours: Tensor,
    right: Sequence[Sequence[int]],
    fitted: Fitted,
    settings: Logreg,
) -> dict[str, Any]:
    """`LogisticRegression` with the chosen C, on the rows that the classifier was trained on."""
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
    return {"with": f"scikit-learn {sklearn.__version__}", **_agreement(ours, theirs, right)}


def linear(
    features: Tensor,
    labels: Tensor,
    held_out: Tensor,
    fitted: tuple[LinearGrid, int, Chosen],
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


class ConfusionCheck:
    """`sklearn.metrics.confusion_matrix`, summed over the images."""

    def __init__(self, num_classes: int, ignore: int) -> None:
        self._version = require_sklearn().__version__
        self._labels = list(range(num_classes))
        self._ignore = ignore
        self._counts = np.zeros((num_classes, num_classes), dtype=np.int64)

    def add(self, labels: Array, predicted: Array) -> None:
        from sklearn.metrics import confusion_matrix  # type: ignore[import-untyped,import-not-found]

        known = labels != self._ignore
        if known.any():
            self._counts += confusion_matrix(labels[known], predicted[known], labels=self._labels)

    def result(self, ours: Confusion) -> dict[str, Any]:
        hit = np.diag(self._counts)
        union = self._counts.sum(axis=0) + self._counts.sum(axis=1) - hit
        miou = float((hit[union > 0] / union[union > 0]).mean())
        return {
            "with": f"scikit-learn {self._version}",
            "equal_matrix": bool((self._counts == ours.counts).all()),
            "miou": miou,
        }


class DepthCheck:
    """`sklearn.metrics` on the valid pixels of each image, averaged over the images."""

    def __init__(self) -> None:
        self._version = require_sklearn().__version__
        self._errors: list[tuple[float, float]] = []

    def add(self, predicted: Array, truth: Array) -> None:
        from sklearn import metrics  # type: ignore[import-untyped,import-not-found]

        valid = np.isfinite(truth)
        if valid.any():
            pair = truth[valid].astype(np.float64), predicted[valid].astype(np.float64)
            squared = metrics.mean_squared_error(*pair)
            relative = metrics.mean_absolute_percentage_error(*pair)
            self._errors.append((float(np.sqrt(squared)), float(relative)))

    def result(self) -> dict[str, Any]:
        rmse, abs_rel = np.mean(self._errors, axis=0).tolist()
        return {"with": f"scikit-learn {self._version}", "rmse": rmse, "abs_rel": abs_rel}


def _agreement(ours: Tensor, theirs: Array, right: Sequence[Sequence[int]]) -> dict[str, float]:
    classes = int(max(theirs.max(), ours.max())) + 1
    classes = max(classes, 1 + max((max(labels) for labels in right if labels), default=0))
    return {
        "equal_predictions": float((ours.cpu().numpy() == theirs).mean()),
        "top1": accuracy(theirs.tolist(), right, classes)["top1"],
    }
