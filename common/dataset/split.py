"""Train, validation and test parts of a data set: whole documents, by weight, in file order."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


def document_range(
    split: Split, weights: tuple[float, float, float], documents: int
) -> tuple[int, int]:
    """Return the first document of the split and the one after its last.

    The three splits cover all documents without overlap.
    """
    bounds = np.rint(np.cumsum([0.0, *weights]) / sum(weights) * documents).astype(np.int64)
    n = SPLITS.index(split)
    return int(bounds[n]), int(bounds[n + 1])
