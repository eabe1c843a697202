"""Choice of a rank's next samples, which depends only on the samples consumed so far, and their reading ahead."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from common.dataset.blend import Samples
from common.errors import DataError

Tokens = npt.NDArray[np.int32]
"""Token ids (rows, columns)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One rank's part of a global batch.

    tokens: (samples / data_parallel_size, seq_length + 1) int32.
    samples: size of the global batch.
    consumed_samples, sample_hash: state of the run after this batch, which a checkpoint stores to
    resume after it.
    """

    tokens: Tokens
    samples: int
    consumed_samples: int
    sample_hash: str


def rank_batches(
    samples: Samples,
    consumed_samples: int = 0,
    sample_hash: str = "",
    *,
    global_batch_size: int,
    data_parallel_size: int = 1,
    data_parallel_rank: int = 0,
    batch_size_at: Callable[[int], int] | None = None,
    vocab_size: int | None = None,
) -> Iterator[Batch]:
    """Yield a rank's batches from ``consumed_samples`` on, without end: the r-th contiguous part of each global batch.

    The order survives any change of the layout. sample_hash: the one stored with ``consumed_samples``; at the start,
    the fingerprint of the data. batch_size_at: size of the global batch that starts at a sample, where it is not always
    ``global_batch_size``. vocab_size: the model's. A token beyond it raises DataError when it is read (None: no check).
    """
    assert 0 <= data_parallel_rank < data_parallel_size <= global_batch_size
    assert global_batch_size % data_parallel_size == 0
    state = sample_hash or samples.fingerprint
    while True:
        size = batch_size_at(consumed_samples) if batch_size_at else global_batch_size
        own = size // data_parallel_size
        first = consumed_samples + data_parallel_rank * own
        tokens = _read(samples, np.arange(first, first + own), vocab_size)
        # chained over the whole global batch, it is equal on every rank and under every layout
        identities = samples.identities(np.arange(consumed_samples, consumed_samples + size))
        data = bytes.fromhex(state) + identities.astype("<i8").tobytes()
        state = hashlib.blake2b(data, digest_size=8).hexdigest()
        consumed_samples += size
        yield Batch(tokens=tokens, samples=size, consumed_samples=consumed_samples, sample_hash=state)


def ordered_batches(
    samples: Samples,
    batch_size: int,
    limit: int | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
    vocab_size: int | None = None,
) -> Iterator[Tokens]:
    """Yield tokens (<= batch_size, seq_length + 1) of samples 0, 1, ...: one epoch, or its first ``limit`` samples.

    Each of ``ranks`` ranks gets every ``ranks``-th batch. All ranks get the same number, so the last one may be empty.
    vocab_size: as in rank_batches.
    """
    end = samples.samples_per_epoch if limit is None else min(limit, samples.samples_per_epoch)
    for start in range(0, end, ranks * batch_size):
        first = min(start + rank * batch_size, end)
        yield _read(samples, np.arange(first, min(first + batch_size, end)), vocab_size)


def _read(samples: Samples, ids: npt.NDArray[np.int64], vocab_size: int | None) -> Tokens:
    """Raise DataError naming the file and the id if a token is not in 0 ... vocab_size - 1."""
    tokens = samples.read(ids)
    # as unsigned numbers, negative ids are huge
    if vocab_size is None or int(tokens.view(np.uint32).max(initial=0)) < vocab_size:
        return tokens
    row, column = np.argwhere((tokens < 0) | (tokens >= vocab_size))[0].tolist()
    raise DataError(
        f"{samples.source(int(ids[row]))}: holds the token id {int(tokens[row, column])} (sample"
        f" {int(ids[row])}, position {column}), but vocab_size is {vocab_size}; preprocess with the"
        " tokenizer of this model, or raise the model's vocab_size"
    )


Item = TypeVar("Item")
_END: Any = object()


@contextmanager
def prefetch(source: Iterator[Item], depth: int = 2) -> Iterator[Iterator[Item]]:
    """Yield an iterator over ``source``, which a thread reads ahead until the block ends.

    An exception of the source is raised in place of its item. depth: maximum number of waiting items.
    """
    thread = ThreadPoolExecutor(1, "prefetch")
    waiting = deque(thread.submit(next, source, _END) for _ in range(depth))

    def items() -> Generator[Item, None, None]:
        while (item := waiting.popleft().result()) is not _END:
            waiting.append(thread.submit(next, source, _END))
            yield item

    found = items()
    try:
        yield found
    finally:
        thread.shutdown(cancel_futures=True)  # when the current item is done
        found.close()
