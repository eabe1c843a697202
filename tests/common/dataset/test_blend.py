"""Blends: counts within 1 of their share at every point, and a pure function of the sample
number.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from common.dataset import Blend, GPTDataset, open_samples, parse_blend
from common.dataset.blend import interleave, quantise
from common.errors import DataError


@settings(max_examples=80, deadline=None)
@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_interleaving_stays_within_one_of_every_share(counts) -> None:
    pattern, period = interleave(counts), sum(counts)
    places = np.arange(1, period + 1)
    for number, count in enumerate(counts):
        assert (pattern == number).sum() == count
        assert (np.abs(np.cumsum(pattern == number) - places * count / period) < 1).all()


@settings(max_examples=80, deadline=None)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_quantising_stays_within_one(weights) -> None:
    counts = quantise(weights, 100_000, ["x"] * len(weights))
    assert sum(counts) == 100_000
    assert all(
        abs(count - weight / math.fsum(weights) * 100_000) < 1
        for count, weight in zip(counts, weights, strict=True)
    )


def blend_of(write_pair, weights, period=10_000):
    options = {"split": "train", "split_weights": (1, 0, 0), "seq_length": 4, "seed": 3}
    datasets = [
        GPTDataset(write_pair([9] * (10 + 7 * n), name=f"set{n}"), **options)
        for n in range(len(weights))
    ]
    return Blend(datasets, weights, period)


@pytest.mark.parametrize("period", [10, 97, 10_000])
def test_each_data_set_is_read_in_its_own_order(write_pair, period) -> None:
    blend = blend_of(write_pair, [5, 3, 2], period)
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
    n = blend.samples_per_epoch
    assert all(
        (inner[:n][numbers[:n] == k] < d.samples_per_epoch).all()
        for k, d in enumerate(blend.datasets)
    )
    assert inner[n] == blend.datasets[numbers[n]].samples_per_epoch


def test_the_fingerprint_follows_the_weights(write_pair) -> None:
    assert blend_of(write_pair, [1, 2]).fingerprint == blend_of(write_pair, [2, 4]).fingerprint
    assert blend_of(write_pair, [1, 2]).fingerprint != blend_of(write_pair, [2, 1]).fingerprint


def test_parse_blend() -> None:
    assert parse_blend(["a"]) == ((1.0, "a"),)
    assert parse_blend(["0.3", "a", "7", "b"]) == ((0.3, "a"), (7.0, "b"))
    for data, message in (
        ([], "0 entries"),
        (["1", "a", "2"], "3 entries"),
        (["a", "b"], "'a' stands where a weight belongs"),
        (["1", "a", "2", "a"], "named twice"),
    ):
        with pytest.raises(DataError, match=message):
            parse_blend(data)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "1e-9"])
def test_bad_weights_name_their_data_set(write_pair, weight) -> None:
    paths = [str(write_pair([90], name=name)) for name in ("a", "b")]
    with pytest.raises(DataError, match=r"weight of .*b is"):
        open_samples(
            ["1", paths[0], weight, paths[1]],
            split="train",
            split_weights=(1, 0, 0),
            seq_length=4,
            seed=1,
        )


def test_weights_whose_sum_no_float_holds_are_refused(write_pair) -> None:
    with pytest.raises(DataError, match="add up to more than a float holds"):
        open_samples(
            ["1e308", str(write_pair([50])), "1e308", str(write_pair([50], "b"))],
            split="train",
            seq_length=8,
            seed=1,
        )


def test_open_samples(write_pair) -> None:
    paths = [str(write_pair([90], name=name)) for name in ("a", "b")]
    options = {"split": "train", "split_weights": (1, 0, 0), "seq_length": 4, "seed": 1}
    assert isinstance(open_samples(paths[:1], **options), GPTDataset)
    assert isinstance(open_samples(["1", paths[0], "2", paths[1]], **options), Blend)
