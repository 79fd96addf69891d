"""Logistic regression against scikit-learn, which minimises the same objective."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from probe import sets
from probe.tasks.test_knn import blobs
from veca.probe.tasks.logreg import fit, solve

SETTINGS = dataclasses.replace(
    sets.protocol().logreg, max_iterations=500, tolerance=1e-7, normalize="none"
)


@pytest.mark.parametrize("c", [1e-3, 0.1, 10.0])
def test_against_scikit_learn(c):
    models = pytest.importorskip("sklearn.linear_model", reason="needs the extra probe")
    features, labels = blobs(150)
    test = blobs(80, seed=1)[0].double()
    ours = solve(features, labels, 5, c, SETTINGS)
    assert ours.converged
    classifier = models.LogisticRegression(C=c, tol=1e-10, max_iter=10_000)
    classifier.fit(features.double().numpy(), labels.numpy())
    mine = ours.logits(test).softmax(dim=1).numpy()
    theirs = classifier.predict_proba(test.numpy())
    np.testing.assert_allclose(mine, theirs, atol=2e-4)
    assert (mine.argmax(axis=1) == theirs.argmax(axis=1)).all()


def test_the_gradient_vanishes_at_the_solution():
    features, labels = blobs(100)
    c = 0.5
    found = solve(features, labels, 5, c, SETTINGS)
    weight = found.weight.clone().requires_grad_(True)
    loss = (
        c * F.cross_entropy(features.double() @ weight + found.bias, labels, reduction="sum")
        + 0.5 * weight.square().sum()
    )
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.abs().max() < 1e-4 and found.weight.dtype == torch.float64


def test_a_warm_start_leads_to_the_same_place():
    features, labels = blobs(100)
    cold = solve(features, labels, 5, 1.0, SETTINGS)
    warm = solve(features, labels, 5, 1.0, SETTINGS, solve(features, labels, 5, 0.01, SETTINGS))
    torch.testing.assert_close(warm.weight, cold.weight, rtol=1e-4, atol=1e-5)


def test_too_few_iterations_are_admitted():
    features, labels = blobs(200, spread=3)
    settings = dataclasses.replace(SETTINGS, max_iterations=2)
    assert not solve(features, labels, 5, 100.0, settings).converged
    held = torch.arange(200) % 4 == 0
    fitted = fit(features, labels, held, 5, settings)
    assert fitted.unconverged


def test_fit_chooses_on_held_out_rows():
    features, labels = blobs(200)
    held = torch.arange(200) % 4 == 0
    settings = dataclasses.replace(SETTINGS, normalize="standardize", refit=False)
    fitted = fit(features, labels, held, 5, settings)
    assert fitted.chosen.value in settings.c_values
    assert fitted.chosen.validation_top1 == max(fitted.chosen.tried.values())
    hits = fitted.predict(features[held]) == labels[held]
    assert float(hits.double().mean()) == pytest.approx(fitted.chosen.validation_top1)
    changed = features.clone()
    changed[held] += 50
    assert torch.equal(fit(changed, labels, held, 5, settings).solution.weight.isfinite().all(),
                       torch.tensor(True))  # fmt: skip
    again = fit(features, labels, held, 5, dataclasses.replace(settings, refit=True))
    assert again.chosen.value == fitted.chosen.value
    assert not torch.equal(again.solution.weight, fitted.solution.weight)
