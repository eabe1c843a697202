"""Compare an exported program with the model that it was made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from common.errors import RunError
from common.generation.exported import ExportedModel

TOLERANCE = 1e-4
"""Largest accepted difference of float32 logits: absolute for logits up to 10, relative to the
largest logit above that.
"""
_ROUNDING = {"float16": 2.0e-4, "int8": 0.0077, "int4": 0.087}
"""Standard deviation of the rounding error of a weight, relative to that of the weights.

float16 has 11 bits. In blocks of 32 the largest weight is 2.4 deviations, and a step is 1/128
(int8) or 1/8 (int4) of it. The inputs that such weights multiply are rounded to 8 bits as well.
"""
_MARGIN = 4
"""Safety factor: trained layers have outliers, and their blocks have larger steps."""
_MOST_NOISE = 0.5
"""Upper limit of the noise: a wrong order or scale makes an error as large as the logits."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between two arrays of logits."""

    largest: float
    noise: float
    """Standard deviation of the difference, relative to that of the logits."""


def allowed_noise(weights: str, layers: int) -> float | None:
    """Return the largest noise that rounding explains; None for float32, which is not rounded.

    weights: type of the exported weights. Each of the 4 products of a layer, the embedding and the
    head add the noise of one rounding; their squares are summed.
    """
    if weights == "float32":
        return None
    return min(_MARGIN * _ROUNDING[weights] * math.sqrt(4 * layers + 2), _MOST_NOISE)


def random_rows(vocabulary: int, positions: int) -> NDArray[np.int64]:
    """Return token ids (3, T) whose logits are compared."""
    shape = (3, min(positions, 48))
    return np.random.default_rng(0).integers(0, vocabulary, shape)


def compare(
    model: ExportedModel,
    ids: NDArray[np.int64],
    expected: NDArray[np.float32],
    allowed: float | None,
) -> dict[str, Difference]:
    """Return the differences of logits by case, for ids (B, T) whose logits are ``expected`` (B, T,
    vocab_size).

    There are three cases: all tokens at once, a first part and then token by token, and rows of
    different lengths with padding on the left. allowed: the noise that rounding explains; None if
    weights are not rounded, and two orders of adding in float32 may differ by TOLERANCE. Raises
    RunError if the difference of a case is larger.
    """
    everywhere = np.ones(ids.shape, bool)
    cases = {
        "all tokens at once": (_whole(model, ids), everywhere),
        "padding on the left": _padded(model, ids),
    }
    if model.has_cache:
        cases["token by token"] = (_stepwise(model, ids), everywhere)
    largest = float(np.abs(expected).max())  # a NaN stays a NaN, and fails every case
    differences = {}
    for name, (found, compared) in cases.items():
        errors = np.abs(found - expected)[compared]
        noise = float(np.sqrt((errors**2).mean()) / expected.std())
        differences[name] = difference = Difference(largest=float(errors.max()), noise=noise)
        limit = TOLERANCE * max(1.0, largest / 10)
        is_right = difference.largest <= limit if allowed is None else noise <= allowed
        if not is_right:
            raise RunError(
                f"the export, {name}: its logits differ from the model's by"
                f" {difference.largest:.3g} of {largest:.3g} (noise {noise:.2g}), more than"
                " rounding does; nothing was exported, an older export is untouched; try another"
                " version of what runs it, or export.weights=float32"
            )
    return differences


def _whole(model: ExportedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    model.forget()
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return model.run(ids, np.ones_like(ids), positions)


def _stepwise(model: ExportedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of all tokens: the first half at once, then one token at a time."""
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
    """Return the logits of the first tokens of each row, and where they stand. Row lengths
    differ.
    """
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
