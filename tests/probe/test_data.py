"""Splits, subsets and held-out images: drawn with the seed, never from the test split."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from probe import sets
from veca.probe import ProbeError
from veca.probe.data import hold_out, labels_of, open_data, read_mask, test_labels, train_labels
from veca.probe.datasets import DatasetError, open_dataset
from veca.probe.protocol import Subset
from veca.probe.schedule import batches, cosine, rate

EVERYTHING = Subset(0, 0)
test_labels.__test__ = False  # its name is not a test's


@pytest.fixture
def folder(tmp_path):
    return sets.class_folders(tmp_path / "data")


def opened(folder, subset=EVERYTHING, seed=0, **options):
    return open_data("knn", "folder", folder, subset=subset, seed=seed, **options)


class TestOpening:
    def test_whole_splits(self, folder):
        data = opened(folder)
        assert (len(data.train_indices), len(data.test_indices)) == (24, 15)
        assert data.train.split == "train" and data.test.split == "test" and not data.notes
        assert train_labels(data).bincount().tolist() == [8, 8, 8]
        assert test_labels(data)[0] == [0]
        facts = data.describe()
        assert facts["train"]["used"] == 24 and facts["classes"] == 3
        assert str(folder) not in str(facts)

    def test_a_subset_of_each_class(self, folder):
        data = opened(folder, Subset(3, 2))
        assert train_labels(data).bincount().tolist() == [3, 3, 3]
        assert len(data.test_indices) == 6
        assert any("9 of 24 images" in note for note in data.notes)
        assert opened(folder, Subset(3, 2)).train_indices == data.train_indices
        assert opened(folder, Subset(3, 2), seed=1).train_indices != data.train_indices

    def test_a_subset_of_a_dense_set(self, tmp_path):
        root = sets.images_masks(tmp_path / "dense")
        data = open_data("segmentation", "images-masks", root, subset=Subset(4, 2), seed=0)
        assert (len(data.train_indices), len(data.test_indices)) == (4, 2)

    def test_a_set_without_training_images(self, tmp_path):
        with pytest.raises(ProbeError, match="--train-data"):
            open_data("knn", "imagenet-v2", tmp_path, subset=EVERYTHING, seed=0)

    def test_learning_from_another_set(self, folder, tmp_path):
        other = sets.class_folders(tmp_path / "other", train=2, test=1, seed=9)
        data = opened(folder, train_dataset="folder", train_data=other)
        assert len(data.train_indices) == 6 and len(data.test_indices) == 15
        sets.photo(other / "train" / "violet" / "x.png", np.zeros((32, 32, 3), dtype=np.uint8))
        with pytest.raises(ProbeError, match="4 classes"):
            opened(folder, train_dataset="folder", train_data=other)

    def test_the_split_to_score_cannot_be_trained_on(self, folder):
        with pytest.raises(ProbeError, match="train split"):
            opened(folder, test_split="train")

    def test_the_wrong_kind(self, folder):
        with pytest.raises(DatasetError, match="classification"):
            open_data("segmentation", "food101", folder, subset=EVERYTHING, seed=0)

    def test_an_empty_class_is_an_error(self, folder):
        (folder / "train" / "yellow").mkdir()
        with pytest.raises(DatasetError, match="yellow"):
            opened(folder)


class TestHoldOut:
    def test_of_every_class(self, folder):
        data = opened(folder)
        labels = train_labels(data)
        held = hold_out(data, labels, 0.25, 0)
        assert labels[held].bincount().tolist() == [2, 2, 2]
        assert torch.equal(held, hold_out(data, labels, 0.25, 0))
        assert not torch.equal(held, hold_out(data, labels, 0.25, 1))
        assert not hold_out(data, labels, 0.0, 0).any()

    def test_one_image_of_a_class_stays_to_train_on(self, tmp_path):
        data = opened(sets.class_folders(tmp_path / "few", train=1, test=1))
        with pytest.raises(ProbeError, match="3 training images"):
            hold_out(data, train_labels(data), 0.25, 0)

    def test_whole_groups(self, folder):
        data = opened(folder)
        groups = np.arange(24) // 4
        data.train.groups = tuple(groups.tolist())
        held = hold_out(data, train_labels(data), 0.3, 0).numpy()
        for group in range(6):
            assert len(set(held[groups == group].tolist())) == 1
        assert held.sum() == 8  # two groups: the first to reach 0.3


class TestLabels:
    def test_read_once_while_memory_allows(self, monkeypatch):
        reads = []

        def read(key: int):
            reads.append(key)
            return torch.zeros(100, dtype=torch.uint8)

        monkeypatch.setattr("veca.probe.data._HELD_LABEL_BYTES", 250)
        labels = labels_of(read)
        for key in (0, 1, 2, 0, 1, 2):
            labels(key)
        assert reads == [0, 1, 2, 2]

    def test_masks_are_checked_against_the_image(self, tmp_path):
        dataset = open_dataset("images-masks", sets.images_masks(tmp_path / "d"), "train")
        mask = dataset.mask(0)
        assert torch.equal(read_mask(dataset, 0, mask.shape), torch.from_numpy(mask))
        with pytest.raises(ProbeError, match="1 x 2"):
            read_mask(dataset, 0, (1, 2))

    def test_labels_outside_the_classes(self, tmp_path, monkeypatch):
        dataset = open_dataset("images-masks", sets.images_masks(tmp_path / "d"), "train")
        wrong = np.full((4, 4), 7, dtype=np.uint8)
        monkeypatch.setattr(dataset, "mask", lambda i: wrong)
        with pytest.raises(ProbeError, match="label 7"):
            read_mask(dataset, 0, (4, 4))


class TestSchedule:
    def test_every_image_comes_once_a_pass(self):
        order = np.concatenate(list(batches(10, 4, 5, seed=0)))
        assert sorted(order[:10]) == list(range(10)) and sorted(order[10:]) == list(range(10))
        assert order[:10].tolist() != order[10:].tolist()

    def test_batches_larger_than_the_set(self):
        (batch,) = batches(3, 8, 1, seed=0)
        assert len(batch) == 8 and set(batch) == {0, 1, 2}

    def test_cosine(self):
        assert cosine(0, 10) == 1 and cosine(10, 10) == pytest.approx(0)
        assert cosine(5, 10) == pytest.approx(0.5) and cosine(10, 10, 0.1) == pytest.approx(0.1)

    def test_warm_up_and_decay(self):
        settings = dataclasses.replace(
            sets.protocol().segmentation.optimizer, lr=1.0, warmup=10, iterations=110
        )
        assert rate(settings, 0) == pytest.approx(1e-6)
        assert rate(settings, 5) == pytest.approx(0.5, rel=1e-3)
        assert rate(settings, 10) == 1.0 and rate(settings, 60) == pytest.approx(0.5)
        assert rate(settings, 110) == pytest.approx(0)
        poly = dataclasses.replace(settings, schedule="poly", power=2.0, final_lr=0.1)
        assert rate(poly, 10) == 1.0 and rate(poly, 60) == pytest.approx(0.1 + 0.9 * 0.25)
