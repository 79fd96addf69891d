"""Features in fewer dimensions: the principal components of a first sample of a collection.

The sample is the first images of the source, so a run that is killed and started again fits the
same. What was fitted lies beside the features, as `pca.safetensors`: for each kind of feature its
mean [D] and its components [k, D], largest first. Its hash is one of the settings, so features
reduced by another are never mixed in.

    reduced = (features - mean) @ components.T
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca._util.files import atomic_write
from veca.errors import InputError, at_least

FILE = "pca.safetensors"
LEAST_IMAGES = 512
PATCHES_AN_IMAGE = 64


def sample_size(dimensions: int) -> int:
    """Images that are looked at to find so many dimensions."""
    return max(LEAST_IMAGES, 4 * at_least("pca", dimensions))


class Reduction:
    """Takes features [..., D] to [..., k], by their kind."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensors[name] for name in sorted(tensors)}

    @property
    def dimensions(self) -> int:
        return next(len(t) for name, t in self.tensors.items() if name.endswith(".components"))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What settings say of it."""
        digest = hashlib.sha256()
        for name, tensor in self.tensors.items():
            digest.update(f"{name} {list(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
        return {"dimensions": self.dimensions, "sha256": digest.hexdigest()}

    def __call__(self, kind: str, features: Tensor) -> Tensor:
        mean, components = (
            self.tensors[f"{kind}.{part}"].to(features.device) for part in ("mean", "components")
        )
        return (features.float() - mean) @ components.T

    def save(self, path: Path) -> None:
        """Write it, all or nothing."""
        from safetensors.torch import save

        with atomic_write(path) as file:
            file.write(save(self.tensors, {"made_by": "veca", "layout": "veca-pca-1"}))


def fit(samples: Mapping[str, NDArray[Any]], dimensions: int) -> Reduction:
    """The principal components of samples [n, D] of each kind of feature."""
    tensors = {}
    for kind, sample in samples.items():
        count, width = sample.shape
        if dimensions > min(count - 1, width):
            raise InputError(
                f"pca={dimensions} is too much for {kind} features of {width} numbers, of which "
                f"the sample has {count}; give at most {min(count - 1, width)}."
            )
        values = sample.astype(np.float64)
        mean = values.mean(axis=0)
        values -= mean
        _, vectors = np.linalg.eigh(values.T @ values / count)
        components = vectors[:, ::-1][:, :dimensions].T
        # Either sign of a component is right; the largest number is made positive.
        largest = np.abs(components).argmax(axis=1)
        components = components * np.sign(components[np.arange(dimensions), largest])[:, None]
        for part, array in (("mean", mean), ("components", components)):
            tensors[f"{kind}.{part}"] = torch.from_numpy(np.ascontiguousarray(array, np.float32))
    return Reduction(tensors)


class Sample:
    """Gathers features to fit: every cls, and some patches of each image, evenly spaced."""

    def __init__(self, what: Sequence[str]) -> None:
        self._found: dict[str, list[NDArray[Any]]] = {name: [] for name in what}

    def add(self, arrays: Mapping[str, Any]) -> None:
        """Take those of one image."""
        for name, found in self._found.items():
            rows = np.asarray(arrays[name], np.float32).reshape(-1, arrays[name].shape[-1])
            count = min(len(rows), PATCHES_AN_IMAGE)
            found.append(rows[np.linspace(0, len(rows) - 1, count).round().astype(int)])

    def fit(self, dimensions: int) -> Reduction:
        if not all(self._found.values()):
            raise InputError("no image of the sample that PCA is fitted to can be read.")
        return fit({name: np.concatenate(found) for name, found in self._found.items()}, dimensions)


def load(path: Path, wanted: Mapping[str, Any]) -> Reduction:
    """That of a folder, which must be the one its settings name.

    Raises:
        InputError: it is not there, or has been changed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = Reduction(load_file(path))
        whole = found.settings == dict(wanted)
    except (OSError, SafetensorError, ValueError, KeyError, StopIteration):
        whole = False
    if not whole:
        raise InputError(
            f"{path}, which the features beside it were reduced by, is missing or was changed; "
            "put it back, or start over with overwrite (--overwrite)."
        )
    return found
