"""Choice of a rank's next samples, which depends only on the samples consumed so far, and their reading ahead."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from common.dataset.samples import Samples
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


class ShardedSampler:
    """Sampler in which rank r reads the r-th contiguous part of each global batch.

    The order survives any change of the layout. batch_size_at: size of the global batch that starts
    at a sample, where it is not always ``global_batch_size``. vocab_size: the model's. A token
    beyond it raises DataError when it is read (None: no check).
    """

    def __init__(
        self,
        samples: Samples,
        *,
        global_batch_size: int,
        data_parallel_size: int = 1,
        data_parallel_rank: int = 0,
        batch_size_at: Callable[[int], int] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size <= global_batch_size
        assert global_batch_size % data_parallel_size == 0
        self.samples = samples
        self._size_at = batch_size_at or (lambda _: global_batch_size)
        self._ranks, self._rank = data_parallel_size, data_parallel_rank
        self._vocab_size = vocab_size

    @property
    def initial_hash(self) -> str:
        """Return the sample hash before any sample: 16 hex digits that identify the data and its settings."""
        return self.samples.fingerprint

    def batch(self, consumed_samples: int) -> Tokens:
        """Return this rank's tokens (samples, seq_length + 1) of the global batch that starts at
        sample ``consumed_samples``.
        """
        own = self._size_at(consumed_samples) // self._ranks
        first = consumed_samples + self._rank * own
        ids = np.arange(first, first + own)
        tokens = self.samples.read(ids)
        if self._vocab_size is not None:
            check_tokens(tokens, ids, self.samples, self._vocab_size)
        return tokens

    def extend_hash(self, sample_hash: str, consumed_samples: int) -> str:
        """Chain ``sample_hash`` with the global batch at ``consumed_samples``.

        The result is equal on every rank and under every layout.
        """
        identities = self.samples.identities(
            np.arange(consumed_samples, consumed_samples + self._size_at(consumed_samples))
        )
        data = bytes.fromhex(sample_hash) + identities.astype("<i8").tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    def batches(self, consumed_samples: int = 0, sample_hash: str | None = None) -> Iterator[Batch]:
        """Yield batches from ``consumed_samples`` on, without end.

        sample_hash: the hash stored with ``consumed_samples``. None: ``initial_hash``.
        """
        state = self.initial_hash if sample_hash is None else sample_hash
        while True:
            tokens, size = self.batch(consumed_samples), self._size_at(consumed_samples)
            state = self.extend_hash(state, consumed_samples)
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
    vocab_size: as in ShardedSampler.
    """
    end = samples.samples_per_epoch if limit is None else min(limit, samples.samples_per_epoch)
    for start in range(0, end, ranks * batch_size):
        first = min(start + rank * batch_size, end)
        ids = np.arange(first, min(first + batch_size, end))
        tokens = samples.read(ids)
        if vocab_size is not None:
            check_tokens(tokens, ids, samples, vocab_size)
        yield tokens


def check_tokens(tokens: Tokens, ids: npt.NDArray[np.int64], samples: Samples, vocab_size: int) -> None:
    """Raise DataError naming the file and the id if a token is not in 0 ... vocab_size - 1."""
    # as unsigned numbers, negative ids are huge
    if int(tokens.view(np.uint32).max(initial=0)) < vocab_size:
        return
    row, column = np.argwhere((tokens < 0) | (tokens >= vocab_size))[0].tolist()
    raise DataError(
        f"{samples.source(int(ids[row]))}: holds the token id {int(tokens[row, column])} (sample"
        f" {int(ids[row])}, position {column}), but vocab_size is {vocab_size}; preprocess with the"
        " tokenizer of this model, or raise the model's vocab_size"
    )


Item = TypeVar("Item")
_END: Any = object()


class Prefetch(Generic[Item]):
    """Iterator over ``source`` that runs ahead. An exception of the source is raised in place of its item.

    As a context manager it stops the thread on exit. depth: maximum number of waiting items.
    """

    def __init__(self, source: Iterator[Item], depth: int = 2) -> None:
        self._source, self._thread = source, ThreadPoolExecutor(1, "prefetch")
        self._waiting: deque[Future[Item]] = deque(self._read() for _ in range(depth))

    def _read(self) -> Future[Item]:
        return self._thread.submit(next, self._source, _END)

    def __iter__(self) -> Prefetch[Item]:
        return self

    def __next__(self) -> Item:
        if not self._waiting:
            raise StopIteration
        item = self._waiting.popleft().result()
        if item is _END:
            raise StopIteration
        self._waiting.append(self._read())
        return item

    def __enter__(self) -> Prefetch[Item]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and drop waiting items. Returns when the current item is done."""
        self._thread.shutdown(cancel_futures=True)
        self._waiting.clear()
