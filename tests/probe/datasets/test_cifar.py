"""CIFAR records, pixel by pixel."""

from __future__ import annotations

import numpy as np
import pytest

from veca.probe.datasets import DatasetError, check_dataset, open_dataset


def records(write, name: str, labels) -> np.ndarray:
    """Write records; return their pixels [N, 32, 32, 3]."""
    labels = np.asarray(labels, dtype=np.uint8).reshape(len(labels), -1)
    pixels = write.rng.integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
    data = b"".join(
        bytes(row) + b"".join(image[:, :, channel].tobytes() for channel in range(3))
        for row, image in zip(labels, pixels, strict=True)
    )
    write.path(name).write_bytes(data)
    return pixels


def cifar10(write):
    write.text("cifar-10-batches-bin/batches.meta.txt", [f"thing {i}" for i in range(10)])
    labels = [[0, 1], [2, 3], [4, 5], [6, 7], [9, 8]]
    pixels = [
        records(write, f"cifar-10-batches-bin/data_batch_{i}.bin", row)
        for i, row in enumerate(labels, 1)
    ]
    return np.concatenate(pixels), records(write, "cifar-10-batches-bin/test_batch.bin", [3, 3, 9])


def test_cifar10(write) -> None:
    train_pixels, test_pixels = cifar10(write)
    train = open_dataset("cifar-10", write.root, "train")
    assert train.classes == tuple(f"thing {i}" for i in range(10))
    assert train.targets.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 8]
    assert train.ids[:3] == (
        "data_batch_1.bin/00000",
        "data_batch_1.bin/00001",
        "data_batch_2.bin/00000",
    )
    test = open_dataset("cifar-10", write.root / "cifar-10-batches-bin", "test")
    assert test.targets.tolist() == [3, 3, 9]
    for dataset, pixels in ((train, train_pixels), (test, test_pixels)):
        for i in range(len(dataset)):
            assert np.array_equal(np.asarray(dataset.image(i)), pixels[i])
    assert train.image_path(9).name == "data_batch_5.bin"
    assert check_dataset("cifar-10", write.root, contents=True).ok


def test_cifar100_reads_the_fine_label(write) -> None:
    write.text("cifar-100-binary/fine_label_names.txt", [f"fine_{i}" for i in range(100)])
    write.text("cifar-100-binary/coarse_label_names.txt", [f"coarse_{i}" for i in range(20)])
    rows = [[i % 20, i] for i in range(100)]
    pixels = records(write, "cifar-100-binary/train.bin", rows)
    records(write, "cifar-100-binary/test.bin", [[19, 4]])
    train = open_dataset("cifar-100", write.root, "train")
    assert train.targets.tolist() == list(range(100))
    assert np.array_equal(np.asarray(train.image(41)), pixels[41])
    assert open_dataset("cifar-100", write.root, "test").targets.tolist() == [4]


def test_the_fingerprint_sees_every_byte(write) -> None:
    cifar10(write)
    first = open_dataset("cifar-10", write.root, "test").fingerprint()
    path = write.root / "cifar-10-batches-bin/test_batch.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert open_dataset("cifar-10", write.root, "test").fingerprint() != first


def test_a_label_outside_the_classes(write) -> None:
    cifar10(write)
    records(write, "cifar-10-batches-bin/test_batch.bin", [3, 10])
    with pytest.raises(DatasetError, match="label 10"):
        open_dataset("cifar-10", write.root, "test")


def test_a_file_that_was_cut_off(write) -> None:
    cifar10(write)
    path = write.root / "cifar-10-batches-bin/test_batch.bin"
    dataset = open_dataset("cifar-10", write.root, "test")
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DatasetError, match="9,212"):
        open_dataset("cifar-10", write.root, "test")
    with pytest.raises(DatasetError, match="shorter"):
        dataset.image(2)


@pytest.mark.parametrize("name", ["cifar-10", "cifar-100"])
def test_the_pickled_version_is_refused(write, name: str) -> None:
    folder = {"cifar-10": "cifar-10-batches-py", "cifar-100": "cifar-100-python"}[name]
    write.path(f"{folder}/test_batch").write_bytes(b"cos\nsystem\n")
    for root in (write.root, write.root / folder):
        with pytest.raises(DatasetError, match="binary"):
            open_dataset(name, root, "test")
