"""A rank's samples depend only on the samples consumed, for any layout and point of resumption; read ahead."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from common.dataset.blend import Blend, Samples
from common.dataset.sampler import Batch, ordered_batches, prefetch, rank_batches
from common.errors import DataError
from tests.common.dataset.conftest import windows_of


@pytest.fixture
def samples(write_pair) -> Samples:
    sets = [windows_of(write_pair([9] * n, name=f"set{n}"), 6) for n in (20, 31)]
    return Blend(sets, [3, 1])


def batches_of(samples: Samples, rank: int, ranks: int, size: int, *start: Any) -> Iterator[Batch]:
    place = {"data_parallel_size": ranks, "data_parallel_rank": rank}
    return rank_batches(samples, *start, global_batch_size=size, **place)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.sampled_from([1, 2, 3, 4, 64]), per_rank=st.integers(1, 5), consumed=st.integers(0, 500))
def test_the_ranks_parts_make_the_global_batch(samples, size, per_rank, consumed) -> None:
    batch = size * per_rank
    places = [(0, 1), *((rank, size) for rank in range(size))]
    whole, *parts = (next(batches_of(samples, *place, batch, consumed)) for place in places)
    assert all(part.tokens.shape == (per_rank, 7) and part.tokens.dtype == np.int32 for part in parts)
    assert (np.concatenate([part.tokens for part in parts]) == whole.tokens).all()
    assert (whole.tokens == samples.read(np.arange(consumed, consumed + batch))).all()
    assert len({part.sample_hash for part in (whole, *parts)}) == 1


def test_64_readers_that_open_the_data_themselves_agree(write_pair) -> None:
    prefix = write_pair(np.random.default_rng(0).integers(1, 90, size=400))
    places = [(0, 1), *((rank, 64) for rank in range(64))]
    streams = [batches_of(windows_of(prefix, 6), *place, 128) for place in places]
    for _ in range(50):  # beyond an epoch
        whole, *parts = map(next, streams)
        assert (np.concatenate([part.tokens for part in parts]) == whole.tokens).all()
        assert {part.sample_hash for part in parts} == {whole.sample_hash}


def test_resuming_continues_data_and_hash(samples) -> None:
    straight = list(itertools.islice(batches_of(samples, 1, 2, 8), 12))
    saved = straight[4]
    resumed = list(itertools.islice(batches_of(samples, 1, 2, 8, saved.consumed_samples, saved.sample_hash), 7))
    for one, two in zip(straight[5:], resumed, strict=True):
        assert (one.tokens == two.tokens).all()
        assert (one.consumed_samples, one.sample_hash) == (two.consumed_samples, two.sample_hash)
    assert len({batch.sample_hash for batch in straight}) == 12
    assert len(saved.sample_hash) == 16


def test_the_hash_tells_other_data_and_other_settings(write_pair) -> None:
    def first(documents: int = 40, seq_length: int = 6, **changes: Any) -> str:
        changes = {"split_weights": (8, 1, 1), **changes}
        data = windows_of(write_pair([9] * documents), seq_length, **changes)
        return next(rank_batches(data, global_batch_size=4)).sample_hash

    others = [first(41), first(seed=6), first(seq_length=5), first(split="valid")]
    others += [first(shuffle=False), first(split_weights=(1, 1, 1))]
    assert len({first(), *others}) == 7 and first() == first()


BEYOND = r" \(sample 4, position 1\), but vocab_size is 50257"


@pytest.mark.parametrize(
    ("dtype", "bad", "message"),
    [
        ("uint16", 50257, f"50257{BEYOND}"),
        ("int32", -1, f"-1{BEYOND}"),
        ("int64", 2**32 + 5, "4294967301, which no vocabulary"),  # cut to 32 bits: the token 5
    ],
)
def test_a_token_beyond_the_vocabulary_is_named(write_pair, dtype, bad, message) -> None:
    prefix = write_pair([40], dtype=dtype)
    raw = np.fromfile(prefix.with_suffix(".bin"), dtype=dtype)
    raw[17] = bad
    raw.tofile(prefix.with_suffix(".bin"))
    dataset = windows_of(prefix, 4, shuffle=False)
    batches = rank_batches(dataset, global_batch_size=2, vocab_size=50257)
    assert next(batches).consumed_samples == 2
    assert next(batches).tokens[1].tolist() == [12, 13, 14, 15, 16]
    with pytest.raises(DataError, match=f"data: holds the token id {message}"):
        next(batches)


def test_validation_reads_in_order_and_its_ranks_read_each_window_once(write_pair) -> None:
    dataset = windows_of(write_pair([9] * 20), 6, shuffle=False)
    for limit, rows in ((None, [10] * 2 + [9]), (13, [10, 3]), (100, [10] * 2 + [9]), (0, [])):
        batches = list(ordered_batches(dataset, 10, limit))
        assert [len(batch) for batch in batches] == rows
        assert [row[0] for batch in batches for row in batch.tolist()] == [6 * n for n in range(sum(rows))]
    parts = [list(ordered_batches(dataset, 2, 11, rank=rank, ranks=3)) for rank in range(3)]
    assert [list(map(len, part)) for part in parts] == [[2, 2], [2, 2], [2, 1]]
    turns = np.concatenate([each for turn in zip(*parts, strict=True) for each in turn])
    assert (turns == dataset.read(np.arange(11))).all()


def test_what_is_read_ahead_has_its_order_its_end_and_its_error() -> None:
    def source() -> Iterator[int]:
        yield from range(20)
        raise ValueError("broken")

    with prefetch(iter(range(20)), depth=3) as items:
        assert [list(items), list(items)] == [list(range(20)), []]
    with prefetch(source()) as items:
        assert [next(items) for _ in range(20)] == list(range(20))
        with pytest.raises(ValueError, match="broken"):
            next(items)
        with pytest.raises(StopIteration):
            next(items)


def test_an_endless_source_is_left_without_a_thread_and_is_not_read_far_ahead() -> None:
    source = itertools.count()
    before = threading.active_count()
    with prefetch(source, depth=2) as items:
        assert [next(items) for _ in range(5)] == list(range(5))
    assert threading.active_count() == before
    assert next(source) <= 5 + 2 + 1
    with pytest.raises(StopIteration):
        next(items)
