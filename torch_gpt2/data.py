"""Token batches from numpy to the device, and documents of a window kept apart: their positions, and the
mask that keeps attention within them.

The rules are in ``common.parallel.run``. Everything follows from the token ids, so a stage of a
pipeline needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.dataset.sampler import Tokens
from common.parallel.run import UNCOUNTED, Packing, Run
from torch_gpt2.device import TorchDevice


def inputs_and_targets(tokens: Tokens, device: TorchDevice, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
    """(B, T + 1) token ids -> ids (B, T) and the tokens that follow them (B, T), int64 on the device."""
    return split(to_device(tokens, device), packing)


def to_device(tokens: Tokens, device: TorchDevice) -> Tensor:
    """(B, T + 1) token ids -> int64 on the device, in one copy of int32. The host does not wait for an accelerator."""
    if not device.runs_ahead:
        return torch.from_numpy(tokens.astype(np.int64))
    return device.send(torch.from_numpy(np.require(tokens, np.int32, ["C", "W"]))).long()


def split(tokens: Tensor, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
    """(B, T + 1) -> all but the last, and all but the first, of each row.

    packing: may leave out the losses of some, whose targets then are UNCOUNTED.
    """
    ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if packing is not None and packing.masks_loss:
        targets = targets.masked_fill(packing.uncounted(tokens), UNCOUNTED)
    return ids, targets


_MIN_HEAD_SIZE = 16
"""Smallest size of a head for which torch generates kernels of BlockAttention."""


def document_numbers(ids: Tensor, eod: int) -> Tensor:
    """Return the number of each token's document in its window, (B, T) -> (B, T).

    The end-of-document token belongs to the document that it ends.
    """
    # a sum comes last, which torch's compiler keeps: flex_attention takes no formula of its graph
    return _follows(ids, eod).long().cumsum(1)


def document_positions(ids: Tensor, eod: int) -> Tensor:
    """Return the position of each token in its document, (B, T) -> (B, T)."""
    places = torch.arange(ids.shape[1], device=ids.device)
    starts = torch.where(_follows(ids, eod), places, 0).cummax(1).values
    return places - starts


def _follows(ids: Tensor, eod: int) -> Tensor:
    """Return whether each token follows the end of a document, (B, T) -> (B, T)."""
    return (ids == eod).roll(1, 1) & (torch.arange(ids.shape[1], device=ids.device) > 0)


def document_mask(documents: Tensor) -> Tensor:
    """Return what each query sees, bool: its document up to itself, (B, T) -> (B, 1, T, T)."""
    length = documents.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & earlier)[:, None]


class BlockAttention:
    """torch's flex_attention, whose kernels skip blocks of pairs of different documents.

    fused: compile it to those kernels; otherwise it runs operator by operator.
    """

    @staticmethod
    def suits(config: Run, device: TorchDevice) -> bool:
        """Return whether torch generates the kernels here. They have no dropout."""
        model = config.model
        return (
            config.train.fused_attention
            and device.compiles
            and not model.attention_dropout
            and config.precision.softmax == "float32"
            and model.hidden_size // model.num_heads >= _MIN_HEAD_SIZE
        )

    def __init__(self, *, fused: bool) -> None:
        # importing it takes a tenth of a second, and few runs need it
        module = import_module("torch.nn.attention.flex_attention")
        compiled: Any = torch.compile if fused else lambda function, **_: function
        self._make_mask: Callable[..., Any] = compiled(module.create_block_mask, dynamic=False)
        self.attend: Callable[..., Tensor] = compiled(module.flex_attention, dynamic=False)

    def mask(self, documents: Tensor) -> Any:
        """Return the blocks of a micro batch (B, T) that have pairs of one document."""

        def is_seen(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents[row, query] == documents[row, key])

        rows, length = documents.shape
        return self._make_mask(is_seen, rows, None, length, length, device=str(documents.device))
