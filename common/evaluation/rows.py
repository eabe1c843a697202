"""Rows of tokens of which the last few are scored: cut from long texts, packed into batches of one
shape, scored by a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.log import progress_bar
from common.processes.heartbeat import beat
from common.tokenizer.base import Ids


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredRow:
    """tokens: int32 (n + 1,), n inputs and behind each its target. scored: how many of the targets
    count, the last ones.
    """

    tokens: Ids
    scored: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RowBatch:
    """B rows padded on the right to T inputs, and their scored targets one row after the other,
    padded to N.

    ids: int32 (B, T). targets: int32 (N,), the scored ones. places: int32 (N,), where each is
    predicted among the B x T inputs laid end to end. owners: int64 (n,), the row of each of the
    first n targets; those behind are padding, for a backend that compiles a shape.
    """

    ids: Ids
    places: Ids
    targets: Ids
    owners: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    """Of each target of a RowBatch, (n,) or with the padding (N,): its loss in nats, float32, and
    whether it is the most probable token.
    """

    losses: NDArray[np.float32]
    hits: NDArray[np.bool_]


Scorer = Callable[[RowBatch], TokenScores]
"""A model as evaluation sees it. All batches of one ``score_rows`` have the same shape, so that a
graph is compiled once.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowScores:
    """Of each of N rows: the loss summed over its scored targets in nats, float64 (N,), and how
    many were most probable, int64 (N,).
    """

    nats: NDArray[np.float64]
    hits: NDArray[np.int64]


def sliding_windows(tokens: Ids, window: int, stride: int) -> list[ScoredRow]:
    """Score every token of ``tokens`` but the first, once, in windows of ``window`` inputs that
    start ``stride`` apart.

    Each has ``window - stride + 1`` or more tokens before it, where there are so many. The windows
    are those of Megatron's tasks/zeroshot_gpt (seq_length, overlapping_eval), and of Hugging Face's
    guide on the perplexity of fixed-length models with max_length = window + 1: it also feeds the
    last target. Where nothing overlaps, that guide leaves out the first token of each of its
    windows; here the windows share that token, and none is left out.
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


def score_rows(
    rows: Sequence[ScoredRow], scorer: Scorer, batch_size: int, unit: str = "row"
) -> RowScores:
    """Scores of all rows, ``batch_size`` at once. unit: what the progress bar counts."""
    nats, hits = np.zeros(len(rows), np.float64), np.zeros(len(rows), np.int64)
    for number, scores in enumerate(score_tokens(rows, scorer, batch_size, unit)):
        np.add.at(nats, np.full(len(scores.losses), number), scores.losses)
        hits[number] = scores.hits.sum()
    return RowScores(nats=nats, hits=hits)


def score_tokens(
    rows: Sequence[ScoredRow], scorer: Scorer, batch_size: int, unit: str = "row"
) -> Iterator[TokenScores]:
    """Yield the scores of each row's scored targets, which ``batch_size`` rows at once have got.
    unit: what the progress bar counts.
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
                yield TokenScores(losses=scores.losses[own], hits=scores.hits[own])
            bar.update(len(some))


def _pack(rows: Sequence[ScoredRow], size: int, length: int, width: int) -> RowBatch:
    """``rows`` and empty ones up to ``size``, their targets up to ``width``; padding is 0, which no
    earlier position sees.
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
