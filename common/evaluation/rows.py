"""Rows of tokens of which the last few are scored.

They are cut from long texts, packed into batches of one shape and scored by a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.log import progress_bar
from common.processes.heartbeat import beat
from common.tokenizer.base import Ids


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredRow:
    """A row to score. tokens: int32 (n + 1,), n inputs, each followed by its target.

    scored: how many targets count, from the end of the row.
    """

    tokens: Ids
    scored: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RowBatch:
    """B rows padded on the right to T inputs, and their scored targets, padded to N.

    ids: int32 (B, T). targets: int32 (N,), those of the first row first. places: int32 (N,), index
    of each target's input among the B x T inputs of all rows. owners: int64 (n,), the row of each
    of the first n targets. The rest is padding, for a backend that compiles a graph for each shape.
    """

    ids: Ids
    places: Ids
    targets: Ids
    owners: NDArray[np.int64]


class Scores(NamedTuple):
    """Scores of the targets of a RowBatch, (n,) or with the padding (N,), or sums over the targets of each row.

    losses: in nats, float32, the sums float64. hits: whether the target is the most probable token, or how many are.
    """

    losses: NDArray[Any]
    hits: NDArray[Any]


Scorer = Callable[[RowBatch], Scores]
"""A model that scores batches. All batches of one ``score_rows`` have the same shape, so that a graph is compiled once.
"""


def sliding_windows(tokens: Ids, window: int, stride: int) -> list[ScoredRow]:
    """Cut windows of ``window`` inputs, ``stride`` apart, that score each token but the first once.

    Each token has ``window - stride + 1`` or more tokens before it, unless it is nearer to the beginning. The windows
    are those of Megatron's tasks/zeroshot_gpt (seq_length, overlapping_eval). They are also those of Hugging Face's
    guide on the perplexity of fixed-length models, with max_length = window + 1, since it also feeds the last target.
    Without overlap that guide leaves out the first token of each window. Here windows share that token, and no token is
    left out.
    """
    last = len(tokens) - 1
    rows, done = [], 0
    for start in range(0, last, stride):
        end = min(start + window, last)
        rows.append(ScoredRow(tokens=tokens[start : end + 1], scored=end - done))
        done = end
        if end == last:
            break
    return rows


def score_rows(rows: Sequence[ScoredRow], scorer: Scorer, batch_size: int, unit: str = "row") -> Scores:
    """Return the sums of all rows (N,), ``batch_size`` computed at once. unit: name of a row in the progress bar."""
    nats, hits = np.zeros(len(rows), np.float64), np.zeros(len(rows), np.int64)
    for number, scores in enumerate(score_tokens(rows, scorer, batch_size, unit)):
        np.add.at(nats, np.full(len(scores.losses), number), scores.losses)
        hits[number] = scores.hits.sum()
    return Scores(nats, hits)


def score_tokens(rows: Sequence[ScoredRow], scorer: Scorer, batch_size: int, unit: str = "row") -> Iterator[Scores]:
    """Yield the scores of each row's scored targets. ``batch_size`` rows are computed at once.

    unit: name of a row in the progress bar.
    """
    size = min(batch_size, len(rows))
    batches = [rows[first : first + size] for first in range(0, len(rows), size)]
    length = max(len(row.tokens) - 1 for row in rows)
    width = max(sum(row.scored for row in batch) for batch in batches)
    with progress_bar(total=len(rows), unit=unit, description="evaluation") as bar:
        for first, some in zip(range(0, len(rows), size), batches, strict=True):
            beat(first, "evaluating")
            scores = scorer(_pack(some, size, length, width))
            ends = np.cumsum([row.scored for row in some])
            for end, row in zip(ends, some, strict=True):
                own = slice(end - row.scored, end)
                yield Scores(scores.losses[own], scores.hits[own])
            bar.update(len(some))


def _pack(rows: Sequence[ScoredRow], size: int, length: int, width: int) -> RowBatch:
    """Return a batch of ``size`` rows and ``width`` targets, padded with 0 at the end.

    Earlier positions do not see the padding.
    """
    ids = np.zeros((size, length), np.int32)
    places, targets = np.zeros(width, np.int32), np.zeros(width, np.int32)
    done = 0
    for index, row in enumerate(rows):
        inputs, mine = len(row.tokens) - 1, slice(done, done + row.scored)
        ids[index, :inputs] = row.tokens[:-1]
        places[mine] = index * length + np.arange(inputs - row.scored, inputs)
        targets[mine] = row.tokens[-row.scored :]
        done += row.scored
    owners = np.repeat(np.arange(len(rows)), [row.scored for row in rows])
    return RowBatch(ids=ids, places=places, targets=targets, owners=owners)
