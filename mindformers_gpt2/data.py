"""Token batches from numpy to the device."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from common.dataset import Tokens


def inputs_and_targets(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """(B, T + 1) token ids -> ids (B, T) and the tokens that follow them (B, T), int32."""
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    return Tensor(np.ascontiguousarray(ids)), Tensor(np.ascontiguousarray(targets))
