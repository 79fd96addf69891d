"""Which sample comes when: a pure function of the seed and a running sample count.

The samples form one endless sequence: epoch 0 in its own shuffled order, then epoch 1, and so on.
A batch is a stretch of that sequence, so each sample comes exactly once per epoch, whatever the
batch sizes; a batch that reaches the end of an epoch continues in the next one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from veca.data.draws import permutation, sample_keys
from veca.errors import DataError


class Stretch(NamedTuple):
    """Consecutive samples of the sequence."""

    epochs: NDArray[np.int64]
    indices: NDArray[np.int64]


class SampleOrder:
    """The endless sequence of `samples` samples under `seed`; in index order without `shuffle`."""

    def __init__(self, samples: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if samples < 1:
            raise DataError("no samples to order; expected at least one image.")
        self.samples, self.seed, self.shuffle = samples, seed, shuffle
        self._cached: dict[int, NDArray[np.int64]] = {}

    def epoch(self, number: int) -> NDArray[np.int64]:
        """The sample indices of one epoch, in order."""
        if not self.shuffle:
            return np.arange(self.samples)
        if number not in self._cached:
            # A batch touches at most this epoch and the next, unless the set is tiny.
            while len(self._cached) >= 4:
                del self._cached[min(self._cached)]
            self._cached[number] = permutation(self.samples, self.seed, number)
        return self._cached[number]

    def take(self, start: int, count: int) -> Stretch:
        """Samples `start` to `start + count` of the sequence."""
        places = np.arange(start, start + count)
        epochs, within = places // self.samples, places % self.samples
        indices = np.empty(count, np.int64)
        for number in np.unique(epochs):
            here = epochs == number
            indices[here] = self.epoch(int(number))[within[here]]
        return Stretch(epochs, indices)

    def keys(self, stretch: Stretch) -> NDArray[np.uint64]:
        """The key of each sample's random draws."""
        return sample_keys(self.seed, stretch.epochs, stretch.indices)


def hold_out(samples: int, count: int, *, seed: int = 0) -> tuple[list[int], list[int]]:
    """Split sample indices into (training, held out), the latter `count` drawn under `seed`.

    Both lists are sorted. The draw does not depend on the number of ranks or on the run's own
    seed, unless that is passed.
    """
    if not 0 < count < samples:
        raise DataError(
            f"cannot hold out {count} of {samples} images; expected between 1 and {samples - 1}."
        )
    order = permutation(samples, seed, -1)
    return sorted(order[count:].tolist()), sorted(order[:count].tolist())
