"""Weights of the training, validation and test parts of a data set."""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.errors import DataError


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse ``"949,50,1"`` or ``"949/50/1"`` into weights of train, valid and test. Missing ones
    are 0. Raises DataError.

    Source of both forms: Megatron-LM, parse_and_normalize_split of
    megatron/core/datasets/blended_megatron_dataset_config.py.
    """
    try:
        values = [float(part) for part in text.split("," if "," in text else "/")]
    except ValueError:
        raise DataError(f"{text!r}: expected numbers with commas between, for example 949,50,1") from None
    if len(values) > 3:
        raise DataError(f"{text!r}: has {len(values)} weights, expected up to 3: train,valid,test")
    train, valid, test = (*values, 0.0, 0.0)[:3]
    return check_weights((train, valid, test))


def check_weights(weights: Sequence[float]) -> tuple[float, float, float]:
    """Return the weights. Raises DataError unless they are three finite numbers >= 0 with a
    positive sum.
    """
    if len(weights) != 3 or not all(weight >= 0 for weight in weights) or not 0 < sum(weights) < math.inf:
        raise DataError(
            f"split weights {list(weights)}: expected three numbers >= 0, not all 0, for train,"
            " valid and test, like 949,50,1"
        )
    return float(weights[0]), float(weights[1]), float(weights[2])
