"""Scores: accuracy, mean intersection over union, depth errors. All sums are exact integers or
float64, over the whole set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veca.errors import ProbeError

Array = np.ndarray[Any, Any]


def hits(predicted: Sequence[int] | Tensor, right: Sequence[Sequence[int]]) -> list[bool | None]:
    """Whether each image is told right; None for one that is not scored.

    Args:
        right: every label that counts as right, by image; an image without any is not scored.
    """
    guesses = [int(x) for x in (predicted.tolist() if isinstance(predicted, Tensor) else predicted)]
    if len(guesses) != len(right):
        raise ProbeError(f"{len(guesses)} predictions for {len(right)} images.")
    return [
        guess in labels if labels else None for guess, labels in zip(guesses, right, strict=True)
    ]


def accuracy(
    predicted: Sequence[int] | Tensor, right: Sequence[Sequence[int]], num_classes: int
) -> dict[str, float]:
    """top1, and its mean over the classes (of images with one label), in 0..1; see `hits`."""
    found = zip(hits(predicted, right), right, strict=True)
    scored = [(good, labels) for good, labels in found if good is not None]
    if not scored:
        raise ProbeError("no image of the test split has a label, so there is nothing to score.")
    metrics = {"top1": sum(good for good, _ in scored) / len(scored)}
    if all(len(labels) == 1 for _, labels in scored):
        count, hit = np.zeros(num_classes), np.zeros(num_classes)
        for good, labels in scored:
            count[labels[0]] += 1
            hit[labels[0]] += good
        seen = count > 0
        metrics["mean_class_top1"] = float((hit[seen] / count[seen]).mean())
    return metrics


class Confusion:
    """One confusion matrix for a whole set: counts [label, prediction].

    `images` keeps of each image, by class, what the intersection over union is made of: pixels
    told right, labelled and predicted, int64 [3, classes].
    """

    def __init__(self, num_classes: int, ignore: int = 255) -> None:
        self.num_classes = num_classes
        self.ignore = ignore
        self.counts = np.zeros((num_classes, num_classes), dtype=np.int64)
        self.images: list[Array] = []

    def add(self, labels: Array, predicted: Array | Tensor) -> None:
        """Count the pixels of one image; ignored ones do not count."""
        guesses = predicted.cpu().numpy() if isinstance(predicted, Tensor) else predicted
        if labels.shape != guesses.shape:
            raise ProbeError(
                f"labels of {labels.shape} and predictions of {guesses.shape} pixels do not match."
            )
        known = labels != self.ignore
        truth, guess = labels[known].astype(np.int64), guesses[known].astype(np.int64)
        for name, values in (("label", truth), ("prediction", guess)):
            if values.size and not 0 <= values.min() <= values.max() < self.num_classes:
                wrong = values.max() if values.max() >= self.num_classes else values.min()
                raise ProbeError(
                    f"{name} {wrong} is outside the classes 0..{self.num_classes - 1}."
                )
        pairs = truth * self.num_classes + guess
        counts = np.bincount(pairs, minlength=self.num_classes**2).reshape(self.counts.shape)
        self.counts += counts
        self.images.append(_parts(counts))

    def metrics(self) -> dict[str, float]:
        """miou, mean class accuracy (macc) and pixel accuracy (aacc), in 0..1.

        The mean goes over the classes that occur, as a label or as a prediction.
        """
        total = self.counts.sum()
        if total == 0:
            raise ProbeError("every pixel of the test split is ignored; there is nothing to score.")
        hit, labelled, predicted = _parts(self.counts)
        seen = labelled > 0
        return {
            "miou": float(mean_iou(hit, labelled, predicted)),
            "macc": float((hit[seen] / labelled[seen]).mean()),
            "aacc": float(hit.sum() / total),
        }

    def iou(self) -> Array:
        """float64 [classes]; nan where a class neither is a label nor is predicted."""
        return iou(*_parts(self.counts))


def _parts(counts: Array) -> Array:
    """[label, prediction] -> [3, classes]: pixels told right, labelled and predicted."""
    return np.stack([np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)])


def iou(right: Array, labelled: Array, predicted: Array) -> Array:
    """Intersection over union by class, float64; nan where there is neither."""
    return over(right, labelled + predicted - right)


def mean_iou(right: Array, labelled: Array, predicted: Array) -> Array:
    """The mean over the last axis, of the classes that occur; nan where none does."""
    found = iou(right, labelled, predicted)
    there = np.isfinite(found)
    return over(np.where(there, found, 0.0).sum(axis=-1), there.sum(axis=-1))


def over(above: Array, below: Array) -> Array:
    """above / below, float64; nan where `below` is not above 0."""
    return np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below > 0)


def depth_errors(predicted: Array, truth: Array) -> dict[str, float] | None:
    """rmse (metres), abs_rel and delta1 of one image; None where no pixel is valid (not nan)."""
    if predicted.shape != truth.shape:
        raise ProbeError(
            f"depth of {truth.shape} and prediction of {predicted.shape} pixels do not match."
        )
    valid = np.isfinite(truth)
    if not valid.any():
        return None
    real, guess = truth[valid].astype(np.float64), predicted[valid].astype(np.float64)
    if not np.isfinite(guess).all() or guess.min() <= 0:
        raise ProbeError("predicted depth must be finite and above 0.")
    if real.min() <= 0:
        raise ProbeError("valid depth must be above 0.")
    ratio = np.maximum(real / guess, guess / real)
    return {
        "rmse": float(np.sqrt(np.mean((guess - real) ** 2))),
        "abs_rel": float(np.mean(np.abs(guess - real) / real)),
        "delta1": float(np.mean(ratio < 1.25)),
    }


def mean_of(images: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over images of each error."""
    if not images:
        raise ProbeError("no image of the test split has valid depth; there is nothing to score.")
    return {name: float(np.mean([one[name] for one in images])) for name in images[0]}


HIGHER_IS_BETTER = {"top1": True, "miou": True, "rmse": False}
"""Which way each score points."""
PRIMARY = {
    "knn": "top1",
    "linear": "top1",
    "logreg": "top1",
    "segmentation": "miou",
    "depth": "rmse",
}
"""The score of each task that the table shows first and retention is computed of."""


def retention(score: float, reference: float, metric: str) -> float | None:
    """How much of the reference's score is kept; 1 is all of it, whichever way is better."""
    if HIGHER_IS_BETTER[metric]:
        return score / reference if reference > 0 else None
    return reference / score if score > 0 else None


def as_labels(values: Sequence[int], num_classes: int, names: Sequence[str]) -> Tensor:
    """int64 [n], with an error that names the image of a label outside the classes."""
    for value, name in zip(values, names, strict=True):
        if not 0 <= value < num_classes:
            raise ProbeError(f"{name}: label {value} is outside the classes 0..{num_classes - 1}.")
    return torch.tensor(list(values), dtype=torch.long)
