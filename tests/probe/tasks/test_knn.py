"""k-NN against its definition and against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from veca.probe import ProbeError
from veca.probe.tasks import knn
from veca.probe.tasks.knn import predict


def blobs(count: int, classes: int = 5, width: int = 16, seed: int = 0, spread: float = 1.5):
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    labels = random.integers(0, classes, count)
    features = centres[labels] + spread * random.normal(size=(count, width))
    return torch.tensor(features, dtype=torch.float32), torch.tensor(labels)


def by_hand(train, labels, query, k, classes, temperature):
    """One query, in plain Python."""
    similar = [float(torch.dot(row, query) / row.norm() / query.norm()) for row in train.double()]
    nearest = sorted(range(len(similar)), key=lambda i: -similar[i])[:k]
    votes = [0.0] * classes
    for i in nearest:
        votes[int(labels[i])] += math.exp(similar[i] / temperature)
    return votes.index(max(votes))


@pytest.mark.parametrize("center", [False, True])
def test_against_plain_python(center):
    (train, labels), (test, _) = blobs(60), blobs(25, seed=1)
    found = predict(train, labels, test, [1, 5, 20], num_classes=5, temperature=0.07, center=center)
    mean = train.double().mean(dim=0) if center else 0.0
    for k, predicted in found.items():
        expected = [
            by_hand(train.double() - mean, labels, row.double() - mean, k, 5, 0.07) for row in test
        ]
        assert predicted.tolist() == expected


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("k", [1, 10, 50])
def test_against_scikit_learn(k, center):
    neighbors = pytest.importorskip("sklearn.neighbors", reason="needs the extra probe")
    (train, labels), (test, _) = blobs(400), blobs(200, seed=1)
    ours = predict(train, labels, test, [k], num_classes=5, temperature=0.07, center=center)[k]
    bank, queries = train.double().numpy(), test.double().numpy()
    if center:
        bank, queries = bank - bank.mean(axis=0), queries - bank.mean(axis=0)
    classifier = neighbors.KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / 0.07)
    )
    theirs = classifier.fit(bank, labels.numpy()).predict(queries)
    assert (ours.numpy() == theirs).all()


def test_lengths_do_not_matter_and_centring_helps_positive_features():
    (train, labels), (test, right) = blobs(300, spread=0.8), blobs(200, seed=1, spread=0.8)
    options = {"num_classes": 5, "temperature": 0.07}
    plain = predict(train, labels, test, [5], **options)[5]
    scaled = predict(train * 7, labels, test * 0.1, [5], **options)[5]
    assert torch.equal(plain, scaled)
    shifted = [x + 30 for x in (train, test)]  # all positive, nearly parallel
    off = predict(shifted[0], labels, shifted[1], [50], **options)[50]
    on = predict(shifted[0], labels, shifted[1], [50], center=True, **options)[50]
    assert (on == right).float().mean() > (off == right).float().mean()


def test_chunks_change_nothing(monkeypatch):
    (train, labels), (test, _) = blobs(100), blobs(37, seed=1)
    options = {"num_classes": 5, "temperature": 0.07}
    whole = predict(train, labels, test, [3, 10], **options)
    monkeypatch.setattr(knn, "_CHUNK_NUMBERS", 100 * 5)
    parts = predict(train, labels, test, [3, 10], **options)
    assert all(torch.equal(whole[k], parts[k]) for k in whole)


def test_too_few_images():
    train, labels = blobs(5)
    with pytest.raises(ProbeError, match="k = 10"):
        predict(train, labels, train, [10], num_classes=5, temperature=0.07)
