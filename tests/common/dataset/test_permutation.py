"""The bijection behind the order of an epoch: statistics, against what chance gives."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from common.dataset.samples import permuted, shuffled

TRILLION = 10**12
FROZEN = [1, 2, 4, 3, 5, 0, 7, 6]
FROZEN_FAR = [792569635669, 416020943562, 416638633022]


def is_even(counts: np.ndarray) -> bool:
    """Whether all were drawn equally often: chi-square is within five deviations of its mean."""
    expected, free = counts.mean(), len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum()) < free + 5 * math.sqrt(2 * free)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), key=st.integers())
def test_each_number_is_met_once(n: int, key: int) -> None:
    assert sorted(permuted(np.arange(n), n, str(key)).tolist()) == list(range(n))


def test_numbers_of_a_long_epoch_are_met_once_and_do_not_depend_on_their_company() -> None:
    numbers = np.arange(10**9, 10**9 + 300_000)
    found = permuted(numbers, TRILLION, "long")
    assert len(np.unique(found)) == len(found) and found.min() >= 0 and found.max() < TRILLION
    assert (found[[7, 0, 299_999]] == permuted(numbers[[7, 0, 299_999]], TRILLION, "long")).all()


def test_the_permutation_is_frozen() -> None:
    """A change of these numbers breaks the resumption of every run: raise ORDER_VERSION and say
    so.
    """
    assert permuted(np.arange(8), 8, "frozen").tolist() == FROZEN
    assert permuted(np.arange(3), TRILLION, "frozen").tolist() == FROZEN_FAR


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_are_equally_likely(n: int) -> None:
    orders = {order: number for number, order in enumerate(itertools.permutations(range(n)))}
    found = [
        orders[tuple(permuted(np.arange(n), n, f"key {key}").tolist())] for key in range(max(400, 6 * len(orders)))
    ]
    assert is_even(np.bincount(found, minlength=len(orders)))


@pytest.mark.parametrize("n", [1000, 65_537, TRILLION])
def test_the_first_places_of_many_epochs_are_even(n: int) -> None:
    found = np.concatenate([permuted(np.arange(40), n, str(key)) for key in range(1000)])
    assert is_even(np.bincount(found * 100 // n, minlength=100))


@pytest.mark.parametrize("n", [65_537, TRILLION])
@pytest.mark.parametrize("apart", [1, 2, 64, 4096])
def test_neighbours_are_any_distance_apart(n: int, apart: int) -> None:
    found = permuted(np.arange(65_536), n, "neighbours")
    far = (found[apart:] - found[:-apart]) % n - 1  # it is not 0
    assert is_even(np.bincount(far * 199 // (n - 1), minlength=199))


def test_two_epochs_have_nothing_in_common() -> None:
    one, two = (permuted(np.arange(100_000), TRILLION, f"windows/{epoch}") for epoch in (0, 1))
    assert is_even(np.bincount((two - one) % TRILLION * 199 // TRILLION, minlength=199))
    epochs, places = shuffled(np.arange(2000), 1000, "windows")
    assert epochs.tolist() == [0] * 1000 + [1] * 1000
    assert (places[:1000] == places[1000:]).mean() < 0.01  # one of 1000 by chance


def test_cycles_are_those_of_chance() -> None:
    """A permutation of n has 1 fixed number and 1 + 1/2 + ... + 1/n cycles on average."""
    n, fixed, cycles = 1009, [], []
    for key in range(300):
        order = permuted(np.arange(n), n, f"cycle {key}")
        fixed.append(int((order == np.arange(n)).sum()))
        left, count = set(range(n)), 0
        while left:
            count, at = count + 1, next(iter(left))
            while at in left:
                left.remove(at)
                at = int(order[at])
        cycles.append(count)
    expected = sum(1 / k for k in range(1, n + 1))
    assert abs(np.mean(fixed) - 1) < 4 / math.sqrt(300)
    assert abs(np.mean(cycles) - expected) < 4 * math.sqrt(expected / 300)


def test_each_epoch_is_whole_whatever_is_asked_for_at_once() -> None:
    ids = np.arange(1234, 1234 + 5 * 300)
    epochs, places = shuffled(ids, 300, "x")
    assert (epochs == ids // 300).all()
    for epoch in range(5, 9):
        assert sorted(places[epochs == epoch].tolist()) == list(range(300))
    mixed = np.random.default_rng(0).permutation(len(ids))
    assert (shuffled(ids[mixed], 300, "x")[1] == places[mixed]).all()
