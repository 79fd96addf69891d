"""k nearest neighbours by cosine, as in the DINO family: no training, hardly a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from veca.errors import ProbeError
from veca.probe.data import test_labels, train_labels
from veca.probe.extract import Stored
from veca.probe.metrics import accuracy
from veca.probe.protocol import Knn
from veca.probe.tasks.shared import (
    Array,
    Outcome,
    ProbeSetup,
    agreement,
    classified,
    require_sklearn,
    square_wants,
)

_CHUNK_NUMBERS = 2**25  # of a block of similarities


class KnnTask:
    def __init__(self, setup: ProbeSetup, settings: Knn) -> None:
        self.setup, self.settings = setup, settings
        self.labels, self.right = train_labels(setup.data), test_labels(setup.data)
        images = len(self.labels)
        self.ks = [k for k in settings.k if k <= images]
        if settings.report_k not in self.ks:
            raise ProbeError(
                f"k = {settings.report_k} neighbours of {images} training images do not exist."
            )
        if len(self.ks) < len(settings.k):
            left_out = ", ".join(str(k) for k in settings.k if k not in self.ks)
            setup.note(f"k = {left_out} left out: only {images} training images")
        wants = square_wants(setup, settings.view, settings.features)
        self.requests = [setup.of_training(wants), setup.of_test(wants)]

    def outcomes(self, features: Sequence[Sequence[Stored]]) -> list[Outcome]:
        setup, settings, data = self.setup, self.settings, self.setup.data
        outcomes = []
        for i, stored in enumerate(zip(*features, strict=True)):
            setup.progress("k-NN", i, len(setup.rows))
            bank, queries = (part.matrix(settings.features).to(setup.device) for part in stored)
            found = predict(
                bank,
                self.labels,
                queries,
                self.ks,
                num_classes=data.train.num_classes,
                temperature=settings.temperature,
                center=settings.center,
            )
            details: dict[str, Any] = {"features": settings.features, "k": settings.report_k}
            if setup.verify:
                details["verified"] = verify(
                    bank, self.labels, queries, found, self.right, settings
                )
            outcome = classified(setup, i, found[settings.report_k], self.right, details)
            for k in self.ks:
                score = accuracy(found[k], self.right, data.test.num_classes)
                outcome.metrics[f"top1_k{k}"] = score["top1"]
            outcomes.append(outcome)
        setup.progress("k-NN", len(outcomes), len(outcomes))
        return outcomes


def unit(features: Tensor, mean: Tensor | None = None) -> Tensor:
    """Rows of length 1, after subtracting `mean` if given."""
    return F.normalize(features if mean is None else features - mean, dim=1)


def predict(
    train: Tensor,
    labels: Tensor,
    test: Tensor,
    ks: Sequence[int],
    *,
    num_classes: int,
    temperature: float,
    center: bool = False,
) -> dict[int, Tensor]:
    """The predicted class of each row of `test`, for each k.

    The k most similar training rows vote, each with the weight softmax(similarity / temperature)
    over the k. Rows are L2-normalised first; with `center` the mean of the training rows is
    subtracted before that, for features that are all positive and so nearly parallel.

    Args:
        train, test: [n, D] and [m, D]; labels: int64 [n].
    """
    if len(train) < max(ks):
        raise ProbeError(f"k = {max(ks)} neighbours of {len(train)} training images do not exist.")
    mean = train.mean(dim=0) if center else None
    bank, queries = unit(train, mean), unit(test, mean)
    labels = labels.to(bank.device)
    chunk = max(1, _CHUNK_NUMBERS // len(bank))
    found: dict[int, list[Tensor]] = {k: [] for k in ks}
    for start in range(0, len(queries), chunk):
        similarity = queries[start : start + chunk] @ bank.T
        nearest, where = similarity.topk(max(ks), dim=1)
        # Votes are added on the CPU: on a GPU the order of the sums would change from run to run.
        nearest, classes = nearest.cpu().double(), labels[where].cpu()
        for k in ks:
            weights = (nearest[:, :k] / temperature).softmax(dim=1)
            votes = weights.new_zeros(len(weights), num_classes)
            votes.scatter_add_(1, classes[:, :k], weights)
            found[k].append(votes.argmax(dim=1))
    return {k: torch.cat(parts) for k, parts in found.items()}


def verify(
    train: Tensor,
    labels: Tensor,
    test: Tensor,
    found: Mapping[int, Tensor],
    right: Sequence[Sequence[int]],
    settings: Knn,
) -> dict[str, Any]:
    """scikit-learn's `KNeighborsClassifier` in float64, with the vote weights as a callable."""
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
        result[f"k{k}"] = agreement(ours, theirs, right)
    return result
