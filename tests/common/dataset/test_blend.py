"""Blends: counts near their share at every point, and a pure function of the sample number."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from common.dataset.blend import FINEST, Blend, open_samples, parse_blend, part_names, windows_by_part
from common.dataset.samples import GPTDataset
from common.errors import DataError
from tests.common.dataset.conftest import WHOLE, windows_of

NUMBERS: Any = SimpleNamespace(seq_length=1, fingerprint="", samples_per_epoch=1, source=str)
"""A data set whose sample n is the window n."""


def numbers_of(weights) -> Blend:
    return Blend([NUMBERS for _ in weights], weights)


COUNTS = st.one_of(
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.lists(st.integers(0, 9).map(lambda n: 2**n), min_size=2, max_size=8),
)


@settings(max_examples=80, deadline=None)
@given(counts=COUNTS, start=st.sampled_from([0, 2**20 + 7, 2**52]))
def test_each_data_set_stays_near_its_share_from_any_sample_on(counts, start) -> None:
    """Exact after each period, never two samples off, no sample of a data set left out or twice."""
    blend, period = numbers_of(counts), sum(counts) // math.gcd(*counts)
    start -= start % period
    numbers, inner = blend.locate(np.arange(start, start + 2 * period))
    for number, count in enumerate(counts):
        mine, share = numbers == number, Fraction(count, sum(counts))
        assert mine[:period].sum() == mine[period:].sum() == period * share
        first = start * share
        assert inner[mine].tolist() == list(range(int(first), int(first + 2 * period * share)))
        wanted = np.arange(1, 2 * period + 1) * float(share)
        assert (np.abs(np.cumsum(mine) - wanted) < 2).all()


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([0.9998, 0.00014, 0.00006], [49990, 7, 3]),
        ([1] * 12_000, [1] * 12_000),
        ([1e308, 1e308], [1, 1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([math.pi, 4 - math.pi], [round(FINEST * math.pi / 4), round(FINEST * (1 - math.pi / 4))]),
    ],
)
def test_shares_are_exact_down_to_one_in_two_billion(weights, counts) -> None:
    blend, total = numbers_of(weights), sum(counts)
    assert blend.weights == tuple(count / total for count in counts)
    if total < FINEST:
        numbers, _ = blend.locate(np.arange(10**12 * total, 10**12 * total + total))
        assert np.bincount(numbers).tolist() == counts


@pytest.mark.parametrize(
    "weights", [[0.5, 0.3, 0.2], [0.9998, 0.00014, 0.00006], [7, 1, 1, 1, 0.25], np.arange(1, 300).tolist()]
)
def test_counts_are_those_of_megatron_core(weights) -> None:
    """Megatron takes the data set that lacks most. Its data sets hold 1.005 times their samples, ours need no more."""
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    size, count = 100_000, len(weights)
    theirs, inner = np.zeros(size, np.int16), np.zeros(size, np.int64)
    shares = np.array(weights) / sum(weights)
    helpers.build_blending_indices(theirs, inner, shares, count, size, False)
    ours, _ = numbers_of(weights).locate(np.arange(size))
    for number, share in enumerate(shares):
        mine = np.cumsum(ours == number)
        assert np.abs(mine - np.cumsum(theirs == number)).max() <= 2
        assert mine[-1] <= math.ceil(math.ceil(size * share) * 1.005)


def blend_of(write_pair, weights):
    prefixes = [write_pair([9] * (10 + 7 * n), name=f"set{n}") for n in range(len(weights))]
    return Blend([windows_of(prefix, 4) for prefix in prefixes], weights)


def test_each_data_set_is_read_in_its_own_order(write_pair) -> None:
    blend = blend_of(write_pair, [5, 3, 2])
    ids = np.arange(1000)
    numbers, inner = blend.locate(ids)
    rows, identities = blend.read(ids), blend.identities(ids)
    for number, dataset in enumerate(blend.datasets):
        mine = numbers == number
        assert inner[mine].tolist() == list(range(mine.sum()))
        assert (np.abs(np.cumsum(mine) - (ids + 1) * blend.weights[number]) < 1).all()
        assert (rows[mine] == dataset.read(inner[mine])).all()
        assert (identities[mine, 1] == dataset.identities(inner[mine])[:, 1]).all()
        assert (identities[mine, 0] == number).all()
        assert blend.source(int(ids[mine][0])) == dataset.data.prefix
    some = np.array([999, 3, 500])
    assert (blend.read(some) == rows[some]).all()
    assert blend.samples_per_epoch == sum(each.samples_per_epoch for each in blend.datasets)
    same, other = (blend_of(write_pair, weights) for weights in ([10, 6, 4], [2, 3, 5]))
    assert blend.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("windows", "limit", "wanted"),
    [([1171, 4], 10**6, [1171, 4]), ([1171, 4], 128, [127, 1]), ([3, 9, 1], 2, [1, 1, 0]), ([], 0, [])],
)
def test_a_limited_validation_takes_windows_in_proportion(windows, limit, wanted) -> None:
    assert windows_by_part(windows, limit) == wanted


def test_names_of_parts_are_short_and_differ() -> None:
    assert part_names(["data/a_text_document", "data/b+c"]) == ["a_text_document", "b_c"]
    assert part_names(["/x/de/text", "/x/en/text"]) == ["x_de_text", "x_en_text"]
    assert part_names(["a/b", "a+b"]) == ["b", "a_b"]
    assert part_names(["a/b", "a+b", "c/b"]) == ["a_b-1", "a_b-2", "c_b-3"]


def test_parse_blend() -> None:
    assert parse_blend(["a"]) == ((None, "a"),)
    assert parse_blend(["a", "b", "c"]) == ((None, "a"), (None, "b"), (None, "c"))
    assert parse_blend(["0.3", "a", "7", "b"]) == ((0.3, "a"), (7.0, "b"))
    for data, message in (
        ([], "0 entries"),
        (["1", "a", "2"], "3 entries"),
        (["a", "1", "2", "b"], "'a' stands where a weight belongs"),
        (["1", "a", "2", "a"], "named twice"),
    ):
        with pytest.raises(DataError, match=message):
            parse_blend(data)


@pytest.mark.parametrize("weight", ["0", "nan", "inf", "1e-10"])
def test_bad_weights_name_their_data_set(write_pair, weight) -> None:
    paths = [str(write_pair([90], name=name)) for name in ("a", "b")]
    with pytest.raises(DataError, match=r"weight of .*b is"):
        open_samples(["1", paths[0], weight, paths[1]], seq_length=4, **WHOLE)


def test_without_weights_each_window_is_read_once_in_an_epoch(write_pair) -> None:
    """Sizes are the weights, as in megatron-core, which reads such a list so."""
    utils = pytest.importorskip("megatron.core.datasets.utils")
    paths = [str(write_pair([size], name=name)) for name, size in (("a", 41), ("b", 9), ("c", 90))]
    assert utils.get_blend_from_list(paths) == (paths, None)
    assert isinstance(open_samples(paths[:1], seq_length=4, **WHOLE), GPTDataset)
    blend = open_samples(paths, seq_length=4, **WHOLE)
    windows = [dataset.samples_per_epoch for dataset in blend.datasets]
    numbers, inner = blend.locate(np.arange(blend.samples_per_epoch))
    assert windows == [10, 2, 22]
    assert sorted(zip(numbers.tolist(), inner.tolist(), strict=True)) == [
        (number, window) for number, count in enumerate(windows) for window in range(count)
    ]
