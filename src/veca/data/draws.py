"""Random numbers that belong to a sample, not to a process.

Every number is a hash of (seed, epoch, sample index, stream): no state, no order of drawing. Two
ranks with half the batch each, or a run that resumes in mid-epoch, draw exactly what one
uninterrupted process draws, with any version of numpy or torch. The hash is the finaliser of
SplitMix64, applied once per word.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Keys: TypeAlias = "NDArray[np.uint64]"

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def sample_keys(seed: int, epochs: ArrayLike, indices: ArrayLike) -> Keys:
    """One key per sample, uint64 [B], from the run's seed, the epoch and the sample's index.

    `epochs` and `indices` are whole numbers or arrays [B] of them (broadcast together).
    """
    key = _mix(_words(seed))
    key = _mix(key + _words(epochs))
    return _mix(key + _words(indices))


def uniform(keys: Keys, stream: int) -> NDArray[np.float64]:
    """One number in [0, 1) per key; `stream` tells the draws of one sample apart."""
    bits = _mix(keys + _GOLDEN * _words(stream)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def choice(keys: Keys, stream: int, count: int) -> NDArray[np.int64]:
    """One whole number in 0..count-1 per key."""
    return np.minimum((uniform(keys, stream) * count).astype(np.int64), count - 1)


def permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of `count` samples in one epoch."""
    # Two levels of hashing apart from `sample_keys`, so the order tells nothing about the views.
    keys = sample_keys(seed, ~_words(epoch), np.arange(count))
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def _words(values: Any) -> NDArray[np.uint64]:
    """At least one-dimensional: numpy warns when scalars wrap around, never for arrays."""
    if isinstance(values, int):
        return np.array([values % 2**64], dtype=np.uint64)
    return np.atleast_1d(np.asarray(values)).astype(np.uint64)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _A
    words = (words ^ (words >> np.uint64(27))) * _B
    return words ^ (words >> np.uint64(31))
