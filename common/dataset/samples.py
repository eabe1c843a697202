"""Endless training samples of seq_length + 1 tokens over one .bin/.idx pair.

Sample n is a pure function of the data and the settings. Nothing is built for it: the documents of a split lie one
after the other in the .bin, so a window is a place in it. Window w of an epoch covers tokens w * seq_length ... (w + 1)
* seq_length of the split, both ends included. Neighbours share a token: the last target of one is the first input of
the next. Each epoch begins at a token drawn for it, and goes on at the first token of the split behind the last. So
windows begin elsewhere in each epoch, and other tokens are left over at its end. With a stride below seq_length, window
w begins at token w * stride, and the last one ends with the epoch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack, get_args

import numpy as np
import numpy.typing as npt

from common.config.values import check_weights
from common.dataset.indexed import IndexedDataset
from common.dataset.token_files import TokenFiles
from common.errors import DataError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
"""Train, validation and test parts of a data set: whole documents, by weight, in file order."""
_ROUND = 1 << 16
"""Tokens that are copied together, so that they stay in the processor's cache."""


class EmptySplitError(DataError):
    """Raised where a split of a data set has no whole window."""


class Order(TypedDict, total=False):
    """Which samples a split has, and their order."""

    seed: Required[int]
    split_weights: Sequence[float]
    """Weights of train, valid and test."""
    shuffle: bool
    """Another order in each epoch; that of the files if False."""


class SplitSamples:
    """Windows of one split of a data set. fingerprint: 16 hex digits that are equal for equal data and settings."""

    samples_per_epoch: int
    _unit = "windows"

    def __init__(
        self,
        *,
        split: Split,
        seq_length: int,
        seed: int,
        split_weights: Sequence[float] = (949, 50, 1),
        shuffle: bool = True,
    ) -> None:
        self.split = split
        self.seq_length = seq_length
        self.seed = seed
        self.shuffle = shuffle
        self.split_weights = check_weights(split_weights)

    def identities(self, ids: Ids) -> Ids:
        """Return (n, 2) for sample numbers (n,): 0, and epoch * samples_per_epoch + window."""
        epochs, windows = self._windows(ids)
        return np.stack([np.zeros_like(windows), epochs * self.samples_per_epoch + windows], axis=1)

    def _digest(self, *content: object, settings: tuple[object, ...] = ()) -> str:
        shape = (self.split, self.split_weights, self.seq_length)
        parts = (ORDER_VERSION, *content, *shape, self.seed if self.shuffle else None, *settings)
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def _windows(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the epochs (n,) and the windows (n,) of sample numbers (n,)."""
        ids = np.asarray(ids, dtype=np.int64)
        if not self.shuffle:
            epochs, windows = np.divmod(ids, self.samples_per_epoch)
            return epochs, windows
        return shuffled(ids, self.samples_per_epoch, self._purpose(self._unit))

    def _purpose(self, what: str, *epoch: int) -> str:
        return "/".join(map(str, (what, self.split, self.seed, *epoch)))


class GPTDataset(SplitSamples):
    """Windows over the documents of one split.

    prefix: of a .bin/.idx pair, or opened token files of any format.
    Splits are of documents, in ``_sentence`` pairs too. Without shuffling, each epoch begins at the
    first token, for validation.
    stride: tokens between the starts of windows; seq_length if None.
    Raises EmptySplitError if the split holds fewer than seq_length + 1 tokens.
    """

    def __init__(
        self,
        prefix: str | Path | TokenFiles,
        *,
        split: Split,
        seq_length: int,
        stride: int | None = None,
        **order: Unpack[Order],
    ) -> None:
        self.data = prefix if isinstance(prefix, TokenFiles) else IndexedDataset(prefix)
        super().__init__(split=split, seq_length=seq_length, **order)
        assert stride is None or 1 <= stride <= seq_length
        self.stride = None if stride == seq_length else stride
        first, end = document_range(split, self.split_weights, self.data.document_count)
        self._first = self.data.tokens_before(first)
        self.token_count = self.data.tokens_before(end) - self._first
        # windows overlap by one token; with a stride below seq_length the last one ends with the split
        if self.stride is None or self.token_count <= seq_length:
            self.samples_per_epoch = max(0, (self.token_count - 1) // seq_length)
        else:
            self.samples_per_epoch = -(-(self.token_count - seq_length - 1) // self.stride) + 1
        if self.samples_per_epoch < 1:
            weights = ",".join(f"{weight:g}" for weight in self.split_weights)
            raise EmptySplitError(
                f"{self.data.prefix}: the split {split!r} (weights {weights}) holds {end - first}"
                f" of {self.data.document_count} documents with {self.token_count} tokens, expected"
                f" at least seq_length + 1 = {seq_length + 1}; use more or smaller documents, a"
                " larger weight for this split, or a smaller seq_length"
            )
        settings = () if self.stride is None else ("stride", self.stride)
        self.fingerprint = self._digest(self.data.content_key, settings=settings)

    def read(self, ids: Ids) -> npt.NDArray[np.int32]:
        """Read samples. ids: (n,) numbers >= 0 in any order. Returns (n, seq_length + 1) int32 tokens."""
        epochs, windows = self._windows(ids)
        begins = windows * (self.stride or self.seq_length)
        if self.stride is not None:
            begins = np.minimum(begins, self.token_count - self.seq_length - 1)
        if self.shuffle:
            for epoch in np.unique(epochs):
                digest = hashlib.shake_256(self._purpose("shift", epoch).encode()).digest(16)
                begins[epochs == epoch] += int.from_bytes(digest, "little") % self.token_count
            begins %= self.token_count
        out = np.empty((len(begins), self.seq_length + 1), dtype=np.int32)
        step = max(1, _ROUND // out.shape[1])
        for start in range(0, len(out), step):
            found = self._tokens(begins[start : start + step])
            out[start : start + step] = found
            if not np.can_cast(found.dtype, np.int32) and (wrong := found != out[start : start + step]).any():
                raise DataError(
                    f"{self.data.prefix}: holds the token id {found[wrong][0]}, which no vocabulary has; preprocess"
                    " again with the tokenizer of this model"
                )
        return out

    def source(self, sample: int) -> Path:
        return self.data.prefix

    def _tokens(self, begins: Ids) -> npt.NDArray[Any]:
        """Return (n, seq_length + 1) tokens from the places (n,) of the split on."""
        width = self.seq_length + 1
        tokens = self.data.tokens[self._first : self._first + self.token_count]
        if int(begins.max()) > self.token_count - width:  # one goes on at the first token
            places = (begins[:, None] + np.arange(width)) % self.token_count
            return np.take(tokens, places)
        # a view of each window; as_strided and sliding_window_view are slow to make it
        shape, size = (self.token_count - width + 1, width), tokens.itemsize
        every: npt.NDArray[Any] = np.ndarray(shape, tokens.dtype, tokens.data, 0, (size, size))
        windows: npt.NDArray[Any] = every[begins]
        return windows


def document_range(split: Split, weights: tuple[float, float, float], documents: int) -> tuple[int, int]:
    """Return the first document of the split and the one after its last.

    The three splits cover all documents without overlap.
    """
    bounds = np.rint(np.cumsum([0.0, *weights]) / sum(weights) * documents).astype(np.int64)
    n = SPLITS.index(split)
    return int(bounds[n]), int(bounds[n + 1])


# ---- the order ----


Ids = npt.NDArray[np.int64]
ORDER_VERSION = 2
"""Part of every fingerprint: raise it when the order of samples changes."""
_ROUNDS = 16
"""With 12, some orders of six numbers come more often than others."""
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Factors of SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
_BLOCK = 512


def shuffled(ids: Ids, n: int, purpose: str) -> tuple[Ids, Ids]:
    """Return the epochs (m,) of sample numbers (m,), and what is read there.

    An epoch reads each of 0 ... n - 1 once, in an order that depends only on its number, ``n`` and ``purpose``.
    """
    blocks, places = np.divmod(ids, _BLOCK)
    found = np.empty((2, len(ids)), dtype=np.int64)
    for block in np.unique(blocks):
        mine = blocks == block
        found[:, mine] = _block(int(block), n, purpose)[:, places[mine]]
    return found[0], found[1]


@lru_cache(maxsize=2**14)
def _block(number: int, n: int, purpose: str) -> Ids:
    """Return ``shuffled`` of consecutive sample numbers, since numpy is slow for few at a time."""
    epochs, places = np.divmod(np.arange(number * _BLOCK, (number + 1) * _BLOCK), n)
    for epoch in np.unique(epochs):
        mine = epochs == epoch
        places[mine] = permuted(places[mine], n, f"{purpose}/{epoch}")
    return np.stack([epochs, places])


def permuted(places: Ids, n: int, purpose: str) -> Ids:
    """Return where a permutation of 0 ... n - 1 takes ``places``, (m,) numbers below n.

    A keyed bijection is computed for single numbers without a table: a Feistel network over pairs of numbers below a
    and b, whose product is at least n (Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002). Since a
    and b are close to the root of n, nearly all results lie below n. The others go through the network again until they
    do (cycle walking). NIST's FF1 (SP 800-38G) has the same rounds. Only whole numbers are computed, so it is equal on
    every machine.
    """
    digest = hashlib.shake_256(purpose.encode()).digest(8 * _ROUNDS)
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    a = math.isqrt(n - 1) + 1
    a += a % 2  # by an odd a and b, only even permutations could be made
    b = -(-n // a)
    found, walking = places.astype(np.uint64), np.arange(len(places))
    while len(walking):
        this, other = np.uint64(a), np.uint64(b)
        left, right = np.divmod(found[walking], other)
        for key in keys:  # each round moves one half by a hash of the other
            bits = right + key
            bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
            bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
            left, right = right, (left + (bits >> np.uint64(16))) % this
            this, other = other, this
        found[walking] = left * other + right
        walking = walking[found[walking] >= n]
    return found.astype(np.int64)
