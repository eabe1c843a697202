"""Token batches from numpy to MindSpore."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray


def inputs_and_targets(tokens: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
    """(B, T + 1) token ids -> ids (B, T) and the tokens that follow them (B, T), int32."""
    return Tensor(np.ascontiguousarray(tokens[:, :-1])), Tensor(np.ascontiguousarray(tokens[:, 1:]))
