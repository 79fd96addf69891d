"""CIFAR-10 and CIFAR-100 in their binary version.

The better known Python version is a set of pickles, and a pickle can run any code when it is
loaded; it is not read here. The binary version holds the same images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from veca.errors import DatasetError
from veca.images import read_image
from veca.probe.datasets.catalogue import shipped
from veca.probe.datasets.classification import ClassificationDataset
from veca.probe.datasets.registry import register
from veca.probe.datasets.tree import Tree

_PIXELS = 3 * 32 * 32
_WHERE = "https://www.cs.toronto.edu/~kriz/cifar.html"


class Cifar(ClassificationDataset):
    """Records of a few label bytes and 32 x 32 pixels (red plane, green plane, blue plane)."""

    # The label that counts is the last of these bytes.
    label_bytes: ClassVar[int]
    files: ClassVar[dict[str, tuple[str, ...]]]
    names: ClassVar[str]
    pickled: ClassVar[str]

    def _samples(self, tree: Tree) -> tuple[Sequence[str], Iterable[tuple[str, int]]]:
        files = self.files[self.split]
        pickled = tree.root if tree.root.name == self.pickled else tree.root / self.pickled
        if not tree.exists(files[0]) and pickled.is_dir():
            raise DatasetError(
                f"{pickled}: this is the Python version of {self.name}, which is pickled and "
                f"could run code when read; get the binary version from {_WHERE}",
                missing=files,
            )
        tree.require([self.names, *files])
        classes = [line for _, line in tree.lines(self.names)]
        self._places: list[tuple[Path, int]] = []
        samples = []
        size = self.label_bytes + _PIXELS
        for name in files:
            path = tree.root / name
            # Labels and pixels are one file, so the whole of it counts in the fingerprint.
            data = tree.data(name)
            if not data or len(data) % size:
                raise tree.error(
                    name,
                    f"{len(data):,} bytes is not a whole number of {size}-byte records; replace it",
                )
            labels = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)[:, self.label_bytes - 1]
            wrong = np.flatnonzero(labels >= len(classes))
            if wrong.size:
                raise tree.error(
                    name,
                    f"record {wrong[0]} has label {labels[wrong[0]]}, expected 0 to "
                    f"{len(classes) - 1}",
                )
            samples += [(f"{name}/{i:05d}", int(label)) for i, label in enumerate(labels)]
            self._places += [(path, i * size + self.label_bytes) for i in range(len(labels))]
        return classes, samples

    def image_path(self, i: int) -> Path:
        return self._places[i][0]

    def image(self, i: int) -> Image.Image:
        path, offset = self._places[i]
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(_PIXELS)
        if len(data) != _PIXELS:
            raise DatasetError(f"{path}: shorter than when it was opened; replace it")
        planes = np.frombuffer(data, dtype=np.uint8).reshape(3, 32, 32)
        return read_image(planes.transpose(1, 2, 0))

    def _hash_image(self, i: int) -> str:
        return ""  # the file's hash is in the fingerprint


@register
class Cifar10(Cifar):
    info = shipped("cifar-10")
    markers = ("batches.meta.txt", "test_batch.bin")
    nested = ("cifar-10-batches-bin",)
    label_bytes = 1
    files: ClassVar = {
        "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        "test": ("test_batch.bin",),
    }
    names = "batches.meta.txt"
    pickled = "cifar-10-batches-py"


@register
class Cifar100(Cifar):
    """The 100 fine classes; the 20 coarse ones are passed over."""

    info = shipped("cifar-100")
    markers = ("fine_label_names.txt", "test.bin")
    nested = ("cifar-100-binary",)
    label_bytes = 2
    files: ClassVar = {"train": ("train.bin",), "test": ("test.bin",)}
    names = "fine_label_names.txt"
    pickled = "cifar-100-python"
