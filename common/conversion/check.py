"""Compare an exported program with the model that it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from common.errors import RunError
from common.generation.exported import ExportedModel

TOLERANCE = 1e-4
"""Largest difference of logits in float32, of logits up to 10; a part of the largest above that."""
_MOST_NOISE = 0.5
"""Of smaller weights: largest deviation, as a part of the deviation of the logits themselves. A
wrong order or scale is off by all of it.
"""


def random_rows(vocabulary: int, positions: int) -> NDArray[np.int64]:
    """Return ids (3, T) to compare logits of."""
    shape = (3, min(positions, 48))
    return np.random.default_rng(0).integers(0, vocabulary, shape)


def compare(
    model: ExportedModel, ids: NDArray[np.int64], expected: NDArray[np.float32], *, is_exact: bool
) -> Mapping[str, float]:
    """Return the largest difference of logits by case, for ids (B, T) whose logits are ``expected``
    (B, T, vocab_size).

    Cases: all tokens at once, a first part and then token by token, rows of different lengths with
    padding on the left. is_exact: whether the weights are float32; else the noise of rounding is
    allowed. Raises RunError where a case differs by more.
    """
    everywhere = np.ones(ids.shape, bool)
    cases = {
        "all tokens at once": (_whole(model, ids), everywhere),
        "padding on the left": _padded(model, ids),
    }
    if model.has_cache:
        cases["token by token"] = (_stepwise(model, ids), everywhere)
    largest = float(np.abs(expected).max())  # a NaN stays, and fails every case
    differences = {}
    for name, (found, compared) in cases.items():
        difference = np.abs(found - expected)[compared]
        differences[name] = float(difference.max())
        noise = float(np.sqrt((difference**2).mean()) / expected.std())
        limit = TOLERANCE * max(1.0, largest / 10)
        is_right = differences[name] <= limit if is_exact else noise <= _MOST_NOISE
        if not is_right:
            raise RunError(
                f"the export, {name}: its logits differ from the model's by"
                f" {differences[name]:.3g} of {largest:.3g}, more than rounding does; nothing was"
                " exported, an older export is untouched; try another version of what runs it, or"
                " export.weights=float32"
            )
    return differences


def _whole(model: ExportedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    model.forget()
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return model.run(ids, np.ones_like(ids), positions)


def _stepwise(model: ExportedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Logits of all tokens: the first half at once, each other one after those before it."""
    model.forget()
    length = ids.shape[1]
    bounds = [0, *range(max(1, length // 2), length + 1)]
    parts = []
    for first, last in pairwise(bounds):
        positions = np.broadcast_to(np.arange(first, last), (len(ids), last - first))
        mask = np.ones((len(ids), last), np.int64)
        parts.append(model.run(ids[:, first:last], mask, positions))
    return np.concatenate(parts, 1)


def _padded(
    model: ExportedModel, ids: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Logits of the first tokens of each row, whose lengths differ, and where they stand."""
    model.forget()
    rows, length = ids.shape
    lengths = [max(1, length - row * (length // rows)) for row in range(rows)]
    padded, mask, positions = (np.zeros_like(ids) for _ in range(3))
    for row, own in enumerate(lengths):
        padded[row, length - own :] = ids[row, :own]
        mask[row, length - own :] = 1
        positions[row, length - own :] = np.arange(own)
    logits = model.run(padded, mask, positions)
    found, there = np.zeros_like(logits), np.zeros(ids.shape, bool)
    for row, own in enumerate(lengths):
        found[row, :own], there[row, :own] = logits[row, length - own :], True
    return found, there
