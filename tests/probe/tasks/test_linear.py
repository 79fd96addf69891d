"""The grid trains each classifier as torch's own optimiser would train it alone."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from probe import sets
from probe.tasks.test_knn import blobs
from veca.probe.schedule import batches
from veca.probe.tasks import linear
from veca.probe.tasks.linear import LinearGrid, fit, select, verify
from veca.probe.tasks.shared import Selection, choose, scaling

SETTINGS = dataclasses.replace(
    sets.protocol().linear,
    learning_rates=(1e-3, 1e-2, 0.1),
    iterations=40,
    batch=32,
    weight_decay=0.0,
)
CPU = torch.device("cpu")


def grid(settings=SETTINGS, width=16, classes=5, **options):
    return LinearGrid(width, classes, settings, seed=0, device=CPU, **options)


@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_each_rate_as_if_alone(decay):
    settings = dataclasses.replace(SETTINGS, weight_decay=decay)
    features, labels = blobs(100)
    ours = grid(settings)
    start = ours.classifier(0)[0].clone()
    linear.train(ours, features, labels, seed=3)
    for i, rate in enumerate(settings.learning_rates):
        layer = nn.Linear(16, 5)
        with torch.no_grad():
            layer.weight.copy_(start.T)
            layer.bias.zero_()
        top = rate * 32 / 256
        optimizer = torch.optim.SGD(layer.parameters(), lr=top, momentum=0.9, weight_decay=decay)
        for step, order in enumerate(batches(100, 32, 40, seed=3)):
            optimizer.param_groups[0]["lr"] = top * 0.5 * (1 + math.cos(math.pi * step / 40))
            optimizer.zero_grad()
            nn.functional.cross_entropy(layer(features[order]), labels[order]).backward()
            optimizer.step()
        weight, bias = ours.classifier(i)
        torch.testing.assert_close(weight, layer.weight.T, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(bias, layer.bias, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_cross_entropy_before_the_step():
    features, labels = blobs(32)
    ours = grid()
    expected = nn.functional.cross_entropy(ours.logits(features)[:, 0], labels)
    torch.testing.assert_close(ours.step(features, labels), expected.expand(3))


def test_scores_and_predictions():
    features, labels = blobs(50)
    ours = grid()
    linear.train(ours, features, labels, seed=0)
    accuracies, losses = ours.scores(features, labels)
    for i in range(3):
        weight, bias = ours.classifier(i)
        logits = features @ weight + bias
        torch.testing.assert_close(ours.logits(features)[:, i], logits)
        assert torch.equal(ours.predict(features, i), logits.argmax(dim=1))
        hits = (logits.argmax(dim=1) == labels).float().mean()
        assert accuracies[i] == pytest.approx(float(hits))
        assert losses[i] == pytest.approx(float(nn.functional.cross_entropy(logits, labels)))


def test_the_best_on_validation_is_chosen():
    assert choose([1, 2, 3], [0.5, 0.9, 0.7], [1.0, 2.0, 0.5]) == 1
    assert choose([1, 2, 3], [0.9, 0.9, 0.7], [1.0, 0.3, 0.1]) == 1  # of equals, the lower loss
    assert choose([1, 2], [0.9, 0.2], [math.nan, 5.0]) == 1  # one that blew up loses
    assert choose([1, 2], [0.9, 0.9], [1.0, 1.0]) == 0


def test_fit_chooses_on_held_out_rows_and_trains_again():
    features, labels = blobs(200)
    held = torch.zeros(200, dtype=torch.bool)
    held[::4] = True
    settings = dataclasses.replace(SETTINGS, refit=True, normalize="standardize")
    trained, which, chosen = fit(features, labels, held, 5, settings, seed=0)
    assert which == 0 and len(trained) == 1
    assert chosen.value in settings.learning_rates
    assert chosen.validation_top1 == max(chosen.tried.values())
    once, which, same = fit(
        features, labels, held, 5, dataclasses.replace(settings, refit=False), seed=0
    )
    assert same == chosen and settings.learning_rates[which] == chosen.value
    assert len(once) == 3
    # Without refit, held-out rows must not have been seen: changing them changes no weight.
    changed = features.clone()
    changed[held] += 100
    other, _, _ = fit(changed, labels, held, 5, dataclasses.replace(settings, refit=False), seed=0)
    assert torch.equal(other.weight, once.weight)


def test_one_rate_needs_no_choice():
    features, labels = blobs(60)
    settings = dataclasses.replace(SETTINGS, learning_rates=(0.1,), validation=0.0)
    held = torch.zeros(60, dtype=torch.bool)
    _, which, chosen = fit(features, labels, held, 5, settings, seed=0)
    assert (which, chosen) == (0, Selection(0.1, None, {}))


def test_the_verification_agrees():
    features, labels = blobs(120)
    held = torch.arange(120) % 5 == 0
    settings = dataclasses.replace(SETTINGS, normalize="standardize")
    fitted = fit(features, labels, held, 5, settings, seed=0)
    found = verify(features, labels, held, fitted, settings, 0)
    assert found["equal_predictions"] == 1.0 and found["largest_weight_difference"] < 1e-3


class TestScaling:
    def test_standardize_with_training_statistics(self):
        train, test = blobs(100)[0] * 5 + 3, blobs(20, seed=2)[0]
        scale = scaling("standardize", train)
        done = scale.apply(train)
        torch.testing.assert_close(done.mean(dim=0), torch.zeros(16), atol=1e-5, rtol=0)
        torch.testing.assert_close(done.std(dim=0, correction=0), torch.ones(16), atol=1e-5, rtol=0)
        expected = (test - train.mean(dim=0)) / train.std(dim=0, correction=0)
        torch.testing.assert_close(scale.apply(test), expected, rtol=1e-4, atol=1e-5)

    def test_a_constant_channel_stays_harmless(self):
        train = blobs(50)[0]
        train[:, 3] = 7.0
        test = train.clone()
        test[:, 3] = 1e6
        done = scaling("standardize", train).apply(test)
        assert torch.isfinite(done).all() and done[:, 3].abs().max() == 0

    def test_l2_and_none(self):
        train = blobs(10)[0]
        torch.testing.assert_close(scaling("l2", train).apply(train).norm(dim=1), torch.ones(10))
        assert scaling("none", train).apply(train) is train


def test_deterministic():
    features, labels = blobs(80)
    held = torch.arange(80) % 4 == 0
    runs = [fit(features, labels, held, 5, SETTINGS, seed=s)[0].weight for s in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_select_reports_what_was_tried():
    features, labels = blobs(40)
    ours = grid()
    linear.train(ours, features, labels, seed=0)
    which, chosen = select(ours, features, labels)
    assert list(chosen.tried) == ["0.001", "0.01", "0.1"]
    assert chosen.value == SETTINGS.learning_rates[which]
