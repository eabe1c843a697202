"""Endless training samples of seq_length + 1 tokens over one .bin/.idx pair.

Sample n is a pure function of the data and the settings.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.dataset.epoch_index import (
    ORDER_VERSION,
    EpochIndex,
    is_epoch_of,
    ordered_epoch,
    shuffled_epoch,
    window_count,
)
from common.dataset.gather import gather_windows
from common.dataset.index_cache import cached_epoch
from common.dataset.indexed import IndexedDataset
from common.dataset.split import SPLITS, Split, check_weights, document_range
from common.dataset.token_files import TokenFiles, with_extension
from common.errors import DataError

Ids = npt.NDArray[np.int64]
# Number of documents + windows below which an order is not cached. It is built in 0.3 s, and the
# thousands of epochs of a small corpus would leave a file each.
CACHE_MINIMUM = 1_000_000
_EPOCHS_HELD = 2


class EmptySplitError(DataError):
    """Raised where a split of a data set has no whole window."""


class Samples(Protocol):
    """Source of the sampler: one data set or a blend of several."""

    @property
    def seq_length(self) -> int: ...
    @property
    def samples_per_epoch(self) -> int:
        """Return the number of windows, those of all data sets of a blend."""

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal for equal data and settings."""

    def read(self, ids: Ids) -> npt.NDArray[np.int32]:
        """Read samples. ids: (n,) numbers >= 0. Returns (n, seq_length + 1) tokens."""

    def identities(self, ids: Ids) -> Ids:
        """Return (n, 2) for sample numbers (n,): data set, and epoch * windows + window after the
        shuffle.
        """

    def source(self, sample: int) -> Path:
        """Return the prefix of the pair, or the MindRecord file, that a sample is read from."""


class GPTDataset:
    """Windows over the shuffled documents of one split. Each epoch has its own order.

    prefix: of a .bin/.idx pair, or opened token files of any format.
    split_weights: of train, valid and test, over documents (in ``_sentence`` pairs too).
    stride: tokens between the starts of windows; seq_length if None.
    shuffle=False: documents and windows in file order in every epoch, for validation.
    cache_folder: folder for orders of large data sets. None: PREFIX.index-cache. cache_minimum: see
    CACHE_MINIMUM.
    Raises EmptySplitError if the split holds fewer than seq_length + 1 tokens.
    """

    def __init__(
        self,
        prefix: str | Path | TokenFiles,
        *,
        split: Split,
        seq_length: int,
        seed: int,
        stride: int | None = None,
        split_weights: Sequence[float] = (949, 50, 1),
        shuffle: bool = True,
        cache_folder: Path | None = None,
        cache_minimum: int = CACHE_MINIMUM,
    ) -> None:
        self.data = prefix if isinstance(prefix, TokenFiles) else IndexedDataset(prefix)
        if split not in SPLITS:
            raise DataError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
        if seq_length < 1:
            raise DataError(f"seq_length={seq_length}: expected 1 or more")
        if stride is not None and not 1 <= stride <= seq_length:
            raise DataError(f"stride={stride}: expected 1 to seq_length={seq_length}")
        self.split = split
        self.seq_length = seq_length
        self.stride = None if stride == seq_length else stride
        self.seed = seed
        self.shuffle = shuffle
        self.split_weights = check_weights(split_weights)
        first, end = document_range(split, self.split_weights, self.data.document_count)
        self._offsets = self.data.document_offsets()[first : end + 1].copy()
        self.token_count = int(self._offsets[-1] - self._offsets[0])
        self.samples_per_epoch = window_count(self.token_count, seq_length, self.stride)
        if self.samples_per_epoch < 1:
            weights = ",".join(f"{weight:g}" for weight in self.split_weights)
            raise EmptySplitError(
                f"{self.data.prefix}: the split {split!r} (weights {weights}) holds {end - first}"
                f" of {self.data.document_count} documents with {self.token_count} tokens, expected"
                f" at least seq_length + 1 = {seq_length + 1}; use more or smaller documents, a"
                " larger weight for this split, or a smaller seq_length"
            )
        self._cache_folder = cache_folder or with_extension(self.data.prefix, ".index-cache")
        self._cache_minimum = cache_minimum
        self._epochs: OrderedDict[int, EpochIndex] = OrderedDict()

    @property
    def fingerprint(self) -> str:
        return self._digest("fingerprint")

    def read(self, ids: Ids) -> npt.NDArray[np.int32]:
        """Read samples. ids: (n,) numbers >= 0 in any order. Returns (n, seq_length + 1) int32
        tokens.
        """
        ids = np.asarray(ids, dtype=np.int64)
        out = np.empty((len(ids), self.seq_length + 1), dtype=np.int32)
        epochs = ids // self.samples_per_epoch
        for epoch in np.unique(epochs):
            mine = np.flatnonzero(epochs == epoch)
            windows = self._windows(int(epoch), ids[mine] % self.samples_per_epoch)
            whole = len(mine) == len(ids)
            rows = out if whole else np.empty((len(mine), self.seq_length + 1), dtype=np.int32)
            index = self._epoch(int(epoch))
            gather_windows(self.data.tokens, index, windows, self.seq_length, rows, self.stride)
            if not whole:
                out[mine] = rows
        return out

    def identities(self, ids: Ids) -> Ids:
        """Return (n, 2) for sample numbers (n,): 0, and epoch * samples_per_epoch + window."""
        ids = np.asarray(ids, dtype=np.int64)
        result = np.zeros((len(ids), 2), dtype=np.int64)
        epochs = ids // self.samples_per_epoch
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            result[mine, 1] = epoch * self.samples_per_epoch + self._windows(
                int(epoch), ids[mine] % self.samples_per_epoch
            )
        return result

    def source(self, sample: int) -> Path:
        return self.data.prefix

    def _windows(self, epoch: int, places: Ids) -> Ids:
        if not self.shuffle:
            return places
        shuffle = self._epoch(epoch).shuffle
        assert shuffle is not None
        return shuffle[places].astype(np.int64)

    def _epoch(self, epoch: int) -> EpochIndex:
        """Return the order of an epoch. The last two stay in memory, since a batch may span two
        epochs.
        """
        key = epoch if self.shuffle else 0
        index = self._epochs.get(key)
        if index is None:
            index = self._make_epoch(key)
            self._epochs[key] = index
            if len(self._epochs) > _EPOCHS_HELD:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(key)
        return index

    def _make_epoch(self, epoch: int) -> EpochIndex:
        if not self.shuffle:
            return ordered_epoch(self._offsets, self.samples_per_epoch)

        def build() -> EpochIndex:
            return shuffled_epoch(
                self._offsets, self.seq_length, self.seed, epoch, self.split, self.stride
            )

        if len(self._offsets) + self.samples_per_epoch < self._cache_minimum:
            return build()

        def fits(index: EpochIndex) -> bool:
            return is_epoch_of(index, self._offsets, self.seq_length, self.stride)

        return cached_epoch(self._cache_folder, self._digest(f"epoch {epoch}"), build, fits=fits)

    def _digest(self, purpose: str) -> str:
        parts = (
            ORDER_VERSION,
            self.data.content_key,
            self.split,
            self.split_weights,
            self.seq_length,
            self.seed if self.shuffle else None,
            purpose,
            *(() if self.stride is None else ("stride", self.stride)),
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
