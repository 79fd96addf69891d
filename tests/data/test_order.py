"""Draws and order: pure functions of seed, epoch and index."""

from __future__ import annotations

import numpy as np
import pytest

from veca.data import DataError, SampleOrder, hold_out, sample_keys
from veca.data.draws import choice, permutation, uniform


def plain_mix(word: int) -> int:
    """SplitMix64's step on Python integers."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
    return word ^ (word >> 31)


def test_the_first_words_are_splitmix64s() -> None:
    # The published first output for state 0.
    assert plain_mix(0) == 0xE220A8397B1DCDAF
    assert int(sample_keys(0, 0, 0)[0]) == plain_mix(plain_mix(plain_mix(0)))
    assert int(sample_keys(7, 3, [5, 9])[1]) == plain_mix(plain_mix(plain_mix(7) + 3) + 9)


def test_a_key_depends_on_all_three_and_on_nothing_else() -> None:
    keys = sample_keys(1, [0, 0, 1], [4, 5, 4])
    assert len(set(keys.tolist())) == 3
    assert sample_keys(2, 0, 4)[0] != keys[0]
    assert sample_keys(1, 0, 4)[0] == keys[0]
    assert sample_keys(-1, 0, 4)[0] != keys[0]


def test_uniform_draws_are_uniform_and_streams_independent() -> None:
    keys = sample_keys(0, 0, np.arange(20_000))
    draws = np.stack([uniform(keys, stream) for stream in range(4)])
    assert draws.min() >= 0 and draws.max() < 1
    np.testing.assert_allclose(draws.mean(1), 0.5, atol=0.01)
    np.testing.assert_allclose(draws.var(1), 1 / 12, atol=0.005)
    assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < 0.03
    counts = np.bincount(choice(keys, 9, 14), minlength=14)
    assert len(counts) == 14 and np.abs(counts - 20_000 / 14).max() < 150


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    orders = [permutation(101, 5, epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(101))
    assert not np.array_equal(orders[0], orders[1])
    assert np.array_equal(orders[0], permutation(101, 5, 0))
    assert not np.array_equal(orders[0], permutation(101, 6, 0))


@pytest.mark.parametrize("sizes", [[4] * 10, [3, 7, 1, 25, 4], [40], [1] * 40])
def test_any_batch_sizes_walk_through_one_sequence(sizes: list[int]) -> None:
    order = SampleOrder(10, seed=3)
    start, epochs, indices = 0, [], []
    for size in sizes:
        stretch = order.take(start, size)
        epochs += stretch.epochs.tolist()
        indices += stretch.indices.tolist()
        start += size
    assert epochs == [i // 10 for i in range(40)]
    assert indices == [i for epoch in range(4) for i in permutation(10, 3, epoch)]


def test_without_shuffling_the_order_is_the_sources() -> None:
    assert SampleOrder(4, shuffle=False).take(2, 5).indices.tolist() == [2, 3, 0, 1, 2]


def test_no_samples_are_refused() -> None:
    with pytest.raises(DataError, match="no samples"):
        SampleOrder(0)


def test_holding_out() -> None:
    train, held = hold_out(50, 8, seed=1)
    assert len(held) == 8 and sorted(train + held) == list(range(50))
    assert hold_out(50, 8, seed=1) == (train, held) != hold_out(50, 8, seed=2)
    for count in (0, 50):
        with pytest.raises(DataError, match=f"{count} of 50"):
            hold_out(50, count)
