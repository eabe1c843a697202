"""Copy windows out of the token file with a few numpy calls for all of them.

No Python code runs per window or per document.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from common.dataset.epoch_index import EpochIndex, window_begins

# Tokens per round. The position arrays (8 bytes per token each) then stay in the processor's cache.
_ROUND = 1 << 16


def gather_windows(
    tokens: npt.NDArray[Any],
    index: EpochIndex,
    windows: npt.NDArray[np.int64],
    seq_length: int,
    out: npt.NDArray[np.int32],
    stride: int | None = None,
) -> None:
    """Fill ``out``, (n, seq_length + 1), with the tokens of ``windows``, (n,) window numbers of the
    epoch.

    stride: the epoch's, below seq_length. None: seq_length. Raises OverflowError for a token beyond
    32 bits.
    """
    width = seq_length + 1
    step = max(1, _ROUND // width)
    for start in range(0, len(windows), step):
        part = windows[start : start + step]
        found = tokens[_positions(index, part, seq_length, stride)]
        if not np.can_cast(found.dtype, np.int32):
            for token in (int(found.min()), int(found.max())):
                if not -(2**31) <= token < 2**31:
                    raise OverflowError(f"token id {token}")
        out[start : start + step] = found.reshape(len(part), width)


def _positions(
    index: EpochIndex, windows: npt.NDArray[np.int64], seq_length: int, stride: int | None
) -> npt.NDArray[np.int64]:
    """Return the position (n * (seq_length + 1),) in the .bin of each token of the windows."""
    width = seq_length + 1
    begin = window_begins(windows, int(index.stream[-1]), seq_length, stride)
    first = index.first_piece[windows].astype(np.int64)
    # Without a stride, the last token of a window is the first of the next window. The piece of
    # the next window therefore ends the list of pieces.
    last = (
        index.first_piece[windows + 1]
        if stride is None
        else np.searchsorted(index.stream, begin + seq_length, side="right") - 1
    )
    counts = last - first + 1
    ends = np.cumsum(counts)
    local = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    pieces = np.repeat(first, counts) + local
    window_begin = np.repeat(begin, counts)
    start = np.maximum(index.stream[pieces], window_begin)
    stop = np.minimum(index.stream[pieces + 1], window_begin + width)
    # Within a piece, place in the file minus place in the output is constant.
    source = index.sources[pieces] + start - index.stream[pieces]
    lengths = stop - start
    target = np.cumsum(lengths) - lengths
    positions = np.repeat(source - target, lengths)
    positions += np.arange(len(positions))
    return positions
