"""Scores against their definitions, and against scikit-learn where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from veca.probe import ProbeError
from veca.probe.metrics import (
    Confusion,
    accuracy,
    as_labels,
    depth_errors,
    mean_of,
    retention,
)


class TestAccuracy:
    def test_single_labels(self):
        found = accuracy([0, 1, 1, 2], [[0], [1], [0], [1]], 3)
        assert found["top1"] == 0.5
        assert found["mean_class_top1"] == pytest.approx((1 / 2 + 1 / 2) / 2)

    def test_several_labels_and_none(self):
        found = accuracy(torch.tensor([0, 1, 2]), [[1, 0], [], [0]], 3)
        assert found == {"top1": 0.5}  # of two: the one without a label is not scored

    def test_nothing_to_score(self):
        with pytest.raises(ProbeError, match="label"):
            accuracy([0], [[]], 2)
        with pytest.raises(ProbeError, match="2 predictions"):
            accuracy([0, 1], [[0]], 2)


class TestConfusion:
    def random(self, shape, seed=0):
        random = np.random.default_rng(seed)
        labels = random.integers(0, 4, shape).astype(np.uint8)
        labels[random.random(shape) < 0.2] = 255
        return labels, random.integers(0, 4, shape)

    def test_against_scikit_learn(self):
        metrics = pytest.importorskip("sklearn.metrics", reason="needs the extra probe")
        confusion = Confusion(4)
        everything = []
        for seed in range(3):
            labels, guesses = self.random((20 + seed, 30), seed)
            confusion.add(labels, guesses)
            everything.append((labels[labels != 255], guesses[labels != 255]))
        truth, guess = (np.concatenate(part) for part in zip(*everything, strict=True))
        assert (confusion.counts == metrics.confusion_matrix(truth, guess)).all()
        jaccard = metrics.jaccard_score(truth, guess, average="macro")
        assert confusion.metrics()["miou"] == pytest.approx(jaccard, rel=1e-12)
        assert confusion.metrics()["aacc"] == pytest.approx(metrics.accuracy_score(truth, guess))
        recall = metrics.balanced_accuracy_score(truth, guess)
        assert confusion.metrics()["macc"] == pytest.approx(recall, rel=1e-12)

    def test_over_the_whole_set_not_by_image(self):
        confusion = Confusion(2)
        first = np.array([[0, 0, 0, 0]])
        confusion.add(first, np.array([[0, 0, 0, 1]]))
        confusion.add(np.array([[1]]), np.array([[1]]))
        # Class 0: 3 hits of a union of 4; class 1: 1 hit of 2. By image it would be (3/4 + 1) / 2.
        assert confusion.metrics()["miou"] == pytest.approx((3 / 4 + 1 / 2) / 2)

    def test_ignored_pixels_never_count(self):
        labels, guesses = self.random((16, 16))
        first, second = Confusion(4), Confusion(4)
        first.add(labels, guesses)
        second.add(labels, np.where(labels == 255, (guesses + 1) % 4, guesses))
        assert (first.counts == second.counts).all()
        assert first.counts.sum() == (labels != 255).sum()

    def test_a_class_that_never_occurs_is_left_out(self):
        confusion = Confusion(3)
        confusion.add(np.array([[0, 1]]), np.array([[0, 0]]))
        iou = confusion.iou()
        assert np.isnan(iou[2]) and iou[0] == 0.5 and iou[1] == 0
        assert confusion.metrics()["miou"] == 0.25

    def test_a_class_that_is_only_predicted_counts_as_zero(self):
        confusion = Confusion(3)
        confusion.add(np.array([[0, 0]]), np.array([[0, 2]]))
        assert confusion.metrics()["miou"] == pytest.approx((0.5 + 0.0) / 2)

    def test_bad_input(self):
        with pytest.raises(ProbeError, match="label 7"):
            Confusion(4).add(np.array([[7]]), np.array([[0]]))
        with pytest.raises(ProbeError, match="prediction 4"):
            Confusion(4).add(np.array([[0]]), np.array([[4]]))
        with pytest.raises(ProbeError, match=r"\(2, 3\)"):
            Confusion(4).add(np.zeros((2, 2)), np.zeros((2, 3)))
        with pytest.raises(ProbeError, match="ignored"):
            Confusion(4).metrics()


class TestDepth:
    def test_against_the_definitions(self):
        random = np.random.default_rng(0)
        truth = random.uniform(0.5, 8, (12, 9)).astype(np.float32)
        guess = (truth * random.uniform(0.7, 1.4, truth.shape)).astype(np.float32)
        truth[0] = np.nan
        guess[0] = 1e6  # what is not valid must not matter
        found = depth_errors(guess, truth)
        d, g = truth[1:].astype(float), guess[1:].astype(float)
        assert found["rmse"] == pytest.approx(np.sqrt(((d - g) ** 2).mean()), rel=1e-12)
        assert found["abs_rel"] == pytest.approx((abs(d - g) / d).mean(), rel=1e-12)
        within = np.maximum(d / g, g / d) < 1.25
        assert found["delta1"] == pytest.approx(within.mean())

    def test_perfect(self):
        truth = np.full((3, 3), 2.0, dtype=np.float32)
        assert depth_errors(truth, truth) == {"rmse": 0, "abs_rel": 0, "delta1": 1}

    def test_all_invalid_is_none_not_zero(self):
        assert depth_errors(np.ones((2, 2)), np.full((2, 2), np.nan)) is None
        with pytest.raises(ProbeError, match="test split"):
            mean_of([])

    def test_by_image_then_averaged(self):
        assert mean_of([{"rmse": 1.0}, {"rmse": 3.0}]) == {"rmse": 2.0}

    def test_bad_input(self):
        ones = np.ones((2, 2))
        with pytest.raises(ProbeError, match="predicted depth"):
            depth_errors(ones * 0, ones)
        with pytest.raises(ProbeError, match="valid depth"):
            depth_errors(ones, ones * -1)
        with pytest.raises(ProbeError, match=r"\(2, 3\)"):
            depth_errors(ones, np.ones((2, 3)))


def test_retention_is_one_at_par_and_less_when_worse():
    assert retention(0.45, 0.9, "top1") == 0.5
    assert retention(2.0, 1.0, "rmse") == 0.5
    assert retention(0.5, 0.0, "miou") is None


def test_labels_are_checked_by_name():
    assert as_labels([0, 2], 3, ["a", "b"]).tolist() == [0, 2]
    with pytest.raises(ProbeError, match=r"b\.jpg"):
        as_labels([0, 3], 3, ["a.jpg", "b.jpg"])


def test_delta1_leaves_out_its_bound():
    found = depth_errors(np.array([[5.0, 4.9]]), np.array([[4.0, 4.0]]))
    assert found is not None and found["delta1"] == 0.5
