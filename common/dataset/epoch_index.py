"""Order of one epoch.

Documents are shuffled into a stream, the stream is cut into windows, and the windows are shuffled.
Window w covers tokens w * seq_length ... (w + 1) * seq_length of the stream, both ends included.
Neighbours share a token: the last target of one is the first input of the next.
With a stride below seq_length, window w begins at token w * stride, and the last window ends with
the stream. The order is a pure function of (split, seed, epoch).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# int32 or int64, see ``narrow``
_Index = npt.NDArray[np.signedinteger[Any]]

# Part of every cache key: raise it when the order or the layout below changes.
ORDER_VERSION = 1
_INT32_MAX = 2**31 - 1
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochIndex:
    """Order of one epoch with d documents and w windows in the split.

    sources: (d,) start of piece i of the stream in the .bin, in tokens.
    stream: (d + 1,) start of piece i in the stream, in tokens.
    first_piece: (w + 1,) piece that holds the first token of each window. Entry w is for the token
    after the last window.
    shuffle: (w,) window that is read as the i-th of the epoch. None: file order.
    """

    sources: npt.NDArray[np.int64]
    stream: npt.NDArray[np.int64]
    first_piece: _Index
    shuffle: _Index | None


def shuffled_epoch(
    offsets: npt.NDArray[np.int64],
    seq_length: int,
    seed: int,
    epoch: int,
    split: str,
    stride: int | None = None,
) -> EpochIndex:
    """Return the shuffled order of one epoch.

    offsets: (d + 1,) token offsets of the split's documents in the .bin. They need at least
    seq_length + 1 tokens.
    Memory while building: 36 bytes per document, 24 per window.
    """
    order = permutation(len(offsets) - 1, f"documents/{split}/{seed}/{epoch}")
    stream = np.zeros(len(offsets), dtype=np.int64)
    np.cumsum(np.diff(offsets)[order], out=stream[1:])
    sources = offsets[:-1][order]
    del order
    windows = window_count(int(stream[-1]), seq_length, stride)
    first_piece = _first_pieces(stream, windows, seq_length, stride)
    return EpochIndex(
        sources=sources,
        stream=stream,
        first_piece=first_piece,
        shuffle=permutation(windows, f"windows/{split}/{seed}/{epoch}"),
    )


def ordered_epoch(offsets: npt.NDArray[np.int64], windows: int) -> EpochIndex:
    """Return documents and windows in file order.

    The stream is one piece, since documents lie one after the other in the .bin.
    """
    first, total = int(offsets[0]), int(offsets[-1] - offsets[0])
    return EpochIndex(
        sources=np.array([first], dtype=np.int64),
        stream=np.array([0, total], dtype=np.int64),
        first_piece=np.broadcast_to(np.int32(0), (windows + 1,)),
        shuffle=None,
    )


def is_epoch_of(
    index: EpochIndex,
    offsets: npt.NDArray[np.int64],
    seq_length: int,
    stride: int | None = None,
) -> bool:
    """Return whether a shuffled order read from disk has the sizes of this split and points only
    into it.

    The arguments are those of ``shuffled_epoch``. A true result does not prove that the order is
    the right one.
    """
    first, end, documents = int(offsets[0]), int(offsets[-1]), len(offsets) - 1
    windows = window_count(end - first, seq_length, stride)
    if index.shuffle is None:
        return False
    arrays = (index.sources, index.stream, index.first_piece, index.shuffle)
    if [array.shape for array in arrays] != [
        (documents,),
        (documents + 1,),
        (windows + 1,),
        (windows,),
    ]:
        return False
    if any(array.dtype not in (np.dtype("<i4"), np.dtype("<i8")) for array in arrays):
        return False
    return (
        index.stream[0] == 0
        and index.stream[-1] == end - first
        and _within(index.sources, first, end)
        and _within(index.first_piece, 0, documents - 1)
        and _within(index.shuffle, 0, windows - 1)
        and _rises(index.stream)
        and _rises(index.first_piece)
    )


def _within(values: npt.NDArray[Any], low: int, high: int) -> bool:
    return not len(values) or (int(values.min()) >= low and int(values.max()) <= high)


def _rises(values: npt.NDArray[Any]) -> bool:
    """Return whether the values never fall. They are compared in parts, to bound the memory."""
    return all(
        bool((np.diff(values[start : start + _CHUNK + 1]) >= 0).all())
        for start in range(0, len(values), _CHUNK)
    )


def window_count(tokens: int, seq_length: int, stride: int | None = None) -> int:
    """Return the number of windows of seq_length + 1 tokens that overlap by one.

    A remainder of less than seq_length tokens is unused. With a stride below seq_length there is no
    remainder.
    """
    if stride is None or tokens <= seq_length:
        return max(0, (tokens - 1) // seq_length)
    return -(-(tokens - seq_length - 1) // stride) + 1


def window_begins(
    windows: npt.NDArray[np.int64], tokens: int, seq_length: int, stride: int | None
) -> npt.NDArray[np.int64]:
    """Return the first token (n,) of windows (n,) in a stream of ``tokens`` tokens."""
    if stride is None:
        return windows * seq_length
    return np.minimum(windows * stride, tokens - seq_length - 1)


def permutation(n: int, purpose: str) -> _Index:
    """Return a permutation of 0 ... n - 1 that depends only on ``purpose``.

    It sorts raw Philox words instead of calling ``Generator.permutation``. numpy keeps the words
    stable between versions, but not its permutations (NEP 19). A run must find the same order after
    an upgrade.
    """
    key = np.frombuffer(
        hashlib.blake2b(purpose.encode(), digest_size=16).digest(), dtype="<u8"
    ).astype(np.uint64)
    words = np.random.Philox(key=key).random_raw(n)
    return narrow(np.argsort(words, kind="stable"))


def narrow(values: npt.NDArray[np.intp]) -> _Index:
    """Return values as int32 if they fit, which halves the memory and the cache file."""
    if len(values) > _INT32_MAX:
        return values
    small: npt.NDArray[np.int32] = values.astype(np.int32)
    return small


def _first_pieces(
    stream: npt.NDArray[np.int64], windows: int, seq_length: int, stride: int | None
) -> _Index:
    pieces: _Index = np.empty(
        windows + 1, dtype=np.int32 if len(stream) <= _INT32_MAX else np.int64
    )
    # in parts, so that not all positions exist at once
    for start in range(0, windows + 1, _CHUNK):
        part = np.arange(start, min(start + _CHUNK, windows + 1), dtype=np.int64)
        positions = window_begins(part, int(stream[-1]), seq_length, stride)
        pieces[start : start + _CHUNK] = np.searchsorted(stream, positions, side="right") - 1
    return pieces
