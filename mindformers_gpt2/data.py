"""Token batches from numpy to the device."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from common.dataset import Tokens
from common.parallel.packing import UNCOUNTED, Packing


def inputs_and_targets(tokens: Tokens, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
    """(B, T + 1) token ids -> ids (B, T) and the tokens that follow them (B, T), int32.

    packing: may leave out the losses of some, whose targets then are UNCOUNTED.
    """
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    if packing is not None and packing.masks_loss:
        targets = np.where(packing.uncounted(tokens), np.int32(UNCOUNTED), targets)
    return Tensor(np.ascontiguousarray(ids)), Tensor(np.ascontiguousarray(targets))
