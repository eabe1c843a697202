"""Token batches from numpy to the device, and documents of a window kept apart: their numbers and positions.

The rules are in ``common.parallel.run``. Everything follows from the token ids, so a stage of a pipeline needs
nothing else.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from common.dataset.sampler import Tokens
from common.parallel.run import UNCOUNTED, Packing


def inputs_and_targets(tokens: Tokens, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
    """(B, T + 1) token ids -> ids (B, T) and the tokens that follow them (B, T), int32.

    packing: may leave out the losses of some, whose targets then are UNCOUNTED.
    """
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    if packing is not None and packing.masks_loss:
        targets = np.where(packing.uncounted(tokens), np.int32(UNCOUNTED), targets)
    return Tensor(np.ascontiguousarray(ids)), Tensor(np.ascontiguousarray(targets))


def document_numbers(ids: Tensor, eod: int) -> Tensor:
    """Return the number of each token's document in its window, (B, T) -> (B, T) int32.

    The end-of-document token belongs to the document that it ends.
    """
    return ops.CumSum(exclusive=True)(ops.cast(ids == eod, ms.int32), 1)


def document_positions(ids: Tensor, eod: int) -> Tensor:
    """Return the position of each token in its document, (B, T) -> (B, T) int32.

    It is the number of earlier tokens of the document: not every device has a running maximum.
    """
    numbers, places = document_numbers(ids, eod), ops.arange(ids.shape[1], dtype=ms.int32)
    own = numbers.reshape((*ids.shape, 1)) == numbers.reshape((ids.shape[0], 1, ids.shape[1]))
    earlier = places.reshape((1, -1)) < places.reshape((-1, 1))
    return ops.ReduceSum()(ops.cast(ops.logical_and(own, earlier), ms.int32), 2)
