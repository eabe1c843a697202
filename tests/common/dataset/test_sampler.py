"""A rank's samples depend only on the samples consumed, for any layout and point of resumption."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from common.dataset import Blend, GPTDataset, Samples, ShardedSampler, ordered_batches
from common.errors import ConfigError, DataError


@pytest.fixture
def samples(write_pair) -> Samples:
    options = {"split": "train", "split_weights": (1, 0, 0), "seq_length": 6, "seed": 5}
    return Blend(
        [GPTDataset(write_pair([9] * n, name=f"set{n}"), **options) for n in (20, 31)], [3, 1]
    )


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    size=st.sampled_from([1, 2, 3, 4, 64]), per_rank=st.integers(1, 5), consumed=st.integers(0, 500)
)
def test_the_ranks_parts_make_the_global_batch(samples, size, per_rank, consumed) -> None:
    whole = ShardedSampler(samples, global_batch_size=size * per_rank)
    ranks = [
        ShardedSampler(
            samples,
            global_batch_size=size * per_rank,
            data_parallel_size=size,
            data_parallel_rank=rank,
        )
        for rank in range(size)
    ]
    parts = [rank.batch(consumed) for rank in ranks]
    assert all(part.shape == (per_rank, 7) and part.dtype == np.int32 for part in parts)
    assert (np.concatenate(parts) == whole.batch(consumed)).all()
    assert (
        whole.batch(consumed) == samples.read(np.arange(consumed, consumed + size * per_rank))
    ).all()
    state = whole.initial_hash
    assert len({rank.extend_hash(state, consumed) for rank in (whole, *ranks)}) == 1


def test_64_readers_that_open_the_data_themselves_agree(write_pair) -> None:
    prefix = write_pair(np.random.default_rng(0).integers(1, 90, size=400))

    def reader(rank: int, ranks: int) -> ShardedSampler:
        return ShardedSampler(
            GPTDataset(prefix, split="train", seq_length=6, seed=5),
            global_batch_size=128, data_parallel_size=ranks, data_parallel_rank=rank,
        )  # fmt: skip

    readers = [reader(0, 1), *(reader(rank, 64) for rank in range(64))]
    streams = [sampler.batches() for sampler in readers]
    for _ in range(50):  # beyond an epoch
        whole, *parts = map(next, streams)
        assert (np.concatenate([part.tokens for part in parts]) == whole.tokens).all()
        assert {part.sample_hash for part in parts} == {whole.sample_hash}


def test_resuming_continues_data_and_hash(samples) -> None:
    sampler = ShardedSampler(
        samples, global_batch_size=8, data_parallel_size=2, data_parallel_rank=1
    )
    straight = list(itertools.islice(sampler.batches(), 12))
    saved = straight[4]
    resumed = list(itertools.islice(sampler.batches(saved.consumed_samples, saved.sample_hash), 7))
    for one, two in zip(straight[5:], resumed, strict=True):
        assert (one.tokens == two.tokens).all()
        assert (one.consumed_samples, one.sample_hash) == (two.consumed_samples, two.sample_hash)
    assert len({batch.sample_hash for batch in straight}) == 12
    assert len(saved.sample_hash) == 16


def test_the_hash_tells_other_data_and_other_settings(write_pair) -> None:
    def first(lengths, **changes):
        options = {
            "split": "train",
            "split_weights": (8, 1, 1),
            "seq_length": 6,
            "seed": 5,
            **changes,
        }
        return next(
            ShardedSampler(
                GPTDataset(write_pair(lengths), **options), global_batch_size=4
            ).batches()
        ).sample_hash

    base = [9] * 40
    found = [
        first(base),
        first([9] * 41),
        first(base, seed=6),
        first(base, seq_length=5),
        first(base, split="valid"),
    ]
    assert len({*found, first(base, shuffle=False), first(base, split_weights=(1, 1, 1))}) == 7
    assert first(base) == found[0]


@pytest.mark.parametrize(
    ("size", "rank", "batch"), [(3, 0, 8), (2, 2, 8), (2, -1, 8), (0, 0, 8), (1, 0, 0)]
)
def test_contradicting_sizes_are_refused(samples, size, rank, batch) -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size|data_parallel_rank"):
        ShardedSampler(
            samples, global_batch_size=batch, data_parallel_size=size, data_parallel_rank=rank
        )


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [("uint16", 50257), ("int32", -1), ("int32", 70000), ("int64", -1), ("int64", 50257)],
)
def test_a_token_beyond_the_vocabulary_is_named(write_pair, dtype, bad) -> None:
    prefix = write_pair([40], dtype=dtype)
    raw = np.fromfile(prefix.with_suffix(".bin"), dtype=dtype)
    raw[17] = bad
    raw.tofile(prefix.with_suffix(".bin"))
    dataset = GPTDataset(
        prefix, split="train", split_weights=(1, 0, 0), seq_length=4, seed=1, shuffle=False
    )
    batches = ShardedSampler(dataset, global_batch_size=2, vocab_size=50257).batches()
    assert next(batches).consumed_samples == 2
    assert next(batches).consumed_samples == 4
    with pytest.raises(
        DataError,
        match=rf"data: holds the token id {bad} \(sample 4, position 1\), but vocab_size is 50257",
    ):
        next(batches)


@pytest.mark.parametrize("bad", [2**32 + 5, 2**31, -(2**31) - 1])
def test_a_token_of_64_bits_is_not_cut_to_32(write_pair, bad) -> None:
    """2^32 + 5 would become the token 5."""
    prefix = write_pair([40], dtype="int64")
    raw = np.fromfile(prefix.with_suffix(".bin"), dtype=np.int64)
    raw[17] = bad
    raw.tofile(prefix.with_suffix(".bin"))
    dataset = GPTDataset(
        prefix, split="train", split_weights=(1, 0, 0), seq_length=4, seed=1, shuffle=False
    )
    assert dataset.read(np.arange(4))[3].tolist() == [12, 13, 14, 15, 16]
    with pytest.raises(DataError, match=rf"data: holds the token id {bad}, which no vocabulary"):
        dataset.read(np.array([4]))


@pytest.mark.parametrize(
    ("limit", "rows"), [(None, [4, 4, 1]), (6, [4, 2]), (100, [4, 4, 1]), (0, [])]
)
def test_validation_reads_in_order(write_pair, limit, rows) -> None:
    dataset = GPTDataset(
        write_pair([10] * 4),
        split="train",
        split_weights=(1, 0, 0),
        seq_length=4,
        seed=1,
        shuffle=False,
    )
    batches = list(ordered_batches(dataset, 4, limit))
    assert [len(batch) for batch in batches] == rows
    if batches:
        starts = np.concatenate(batches)[:, 0]
        assert starts.tolist() == [4 * n for n in range(len(starts))]


def test_ranks_that_validate_read_each_window_once(write_pair) -> None:
    options = {"split": "train", "split_weights": (1, 0, 0), "seq_length": 6, "seed": 5}
    dataset = GPTDataset(write_pair([9] * 20), **options, shuffle=False)
    parts = [list(ordered_batches(dataset, 2, 11, rank=rank, ranks=3)) for rank in range(3)]
    assert [list(map(len, part)) for part in parts] == [[2, 2], [2, 2], [2, 1]]
    turns = np.concatenate([each for turn in zip(*parts, strict=True) for each in turn])
    assert (turns == dataset.read(np.arange(11))).all()
