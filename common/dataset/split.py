"""Train, validation and test parts of a data set: whole documents, by weight, in file order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from common.errors import DataError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse ``"949,50,1"`` into weights of train, valid and test. Missing ones are 0. Raises
    DataError.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise DataError(
            f"split {text!r}: expected numbers with commas between, for example 949,50,1"
        ) from None
    if len(values) > 3:
        raise DataError(
            f"split {text!r}: has {len(values)} weights, expected up to 3: train,valid,test"
        )
    train, valid, test = (*values, 0.0, 0.0)[:3]
    return check_weights((train, valid, test))


def check_weights(weights: Sequence[float]) -> tuple[float, float, float]:
    """Return the weights. Raises DataError unless they are three finite numbers >= 0 with a
    positive sum.
    """
    if (
        len(weights) != 3
        or not all(math.isfinite(weight) and weight >= 0 for weight in weights)
        or sum(weights) <= 0
    ):
        raise DataError(
            f"split weights {list(weights)}: expected three numbers >= 0, not all 0, for train,"
            " valid and test, like 949,50,1"
        )
    if not math.isfinite(sum(weights)):
        raise DataError(
            f"split weights {list(weights)}: their sum is beyond the range of a float; give smaller"
            " numbers, like 949,50,1"
        )
    return float(weights[0]), float(weights[1]), float(weights[2])


def document_range(
    split: Split, weights: tuple[float, float, float], documents: int
) -> tuple[int, int]:
    """Return the first document of the split and the one after its last.

    The three splits cover all documents without overlap.
    """
    bounds = np.rint(np.cumsum([0.0, *weights]) / sum(weights) * documents).astype(np.int64)
    n = SPLITS.index(split)
    return int(bounds[n]), int(bounds[n + 1])
