"""Windows against the loop of Hugging Face's guide, and scores against a model in plain numpy."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from common.evaluation.rows import RowBatch, ScoredRow, TokenScores, score_rows, sliding_windows


def guide(length: int, max_length: int, stride: int) -> list[tuple[int, int, int]]:
    """begin, end and number of new tokens of each window, as the guide on perplexity of
    fixed-length models has them.
    """
    found, previous_end = [], 0
    for begin in range(0, length, stride):
        end = min(begin + max_length, length)
        found.append((begin, end, end - previous_end))
        previous_end = end
        if end == length:
            break
    return found


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 80), st.integers(1, 20), st.data())
def test_every_token_but_the_first_is_scored_once_in_the_guides_windows(
    length: int, window: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, window))
    rows = sliding_windows(np.arange(length, dtype=np.int32), window, stride)
    scored = np.concatenate([row.tokens[-row.scored :] for row in rows])
    np.testing.assert_array_equal(scored, np.arange(1, length))
    for row in rows:
        inputs, first = len(row.tokens) - 1, int(row.tokens[-row.scored])
        assert row.scored <= inputs <= window
        assert inputs - row.scored + 1 >= min(first, window - stride + 1), "tokens before the first scored one"
    expected = guide(length, window + 1, stride)
    # the guide counts the very first token, whose loss it then shifts away
    expected[0] = (0, expected[0][1], expected[0][2] - 1)
    assert [(int(row.tokens[0]), int(row.tokens[-1]) + 1, row.scored) for row in rows] == expected


def numpy_scores(batch: RowBatch) -> TokenScores:
    """A model that predicts from the running sum of its inputs; it gives nonsense for padding."""
    state = np.cumsum(batch.ids, axis=1, dtype=np.int64).reshape(-1)[batch.places]
    losses = ((state * 7 + batch.targets) % 13).astype(np.float32)
    hits = losses < 4
    losses[len(batch.owners) :], hits[len(batch.owners) :] = np.nan, True
    return TokenScores(losses=losses, hits=hits)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_scores_do_not_depend_on_the_batch(batch_size: int) -> None:
    generator = np.random.default_rng(0)
    rows = []
    for length in (2, 9, 5, 3, 9):
        tokens = generator.integers(0, 50, length).astype(np.int32)
        rows.append(ScoredRow(tokens=tokens, scored=int(generator.integers(1, length))))
    shapes = set()

    def scorer(batch: RowBatch) -> TokenScores:
        shapes.add((batch.ids.shape, batch.targets.shape))
        return numpy_scores(batch)

    found = score_rows(rows, scorer, batch_size)
    for row, nats, hits in zip(rows, found.nats, found.hits, strict=True):
        each = [(int(row.tokens[:at].sum()) * 7 + int(row.tokens[at])) % 13 for at in range(1, len(row.tokens))][
            -row.scored :
        ]
        assert nats == sum(each) and hits == sum(loss < 4 for loss in each)
    assert len(shapes) == 1, "a graph is compiled for one shape"


@pytest.mark.parametrize("batch_size", [1, 8])
def test_few_positions_without_a_target_pass_the_head(batch_size: int) -> None:
    """Padding is up to the batch with the most targets: the one with the first window, which is
    scored whole.
    """
    rows = sliding_windows(np.arange(1000, dtype=np.int32), 64, 16)
    sizes, scored = [], 0

    def scorer(batch: RowBatch) -> TokenScores:
        nonlocal scored
        sizes.append(len(batch.targets))
        scored += len(batch.owners)
        return numpy_scores(batch)

    score_rows(rows, scorer, batch_size)
    assert scored == 999 and set(sizes) == {64 + (batch_size - 1) * 16}
    assert batch_size == 1 or sum(sizes) < 2 * scored
