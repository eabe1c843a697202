"""Token batches from numpy to the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.dataset import Batch, Tokens
from common.parallel.packing import UNCOUNTED, Packing
from torch_gpt2.device import TorchDevice


def inputs_and_targets(tokens: Tokens, device: TorchDevice, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
    """(B, T + 1) token ids -> ids (B, T) and the tokens that follow them (B, T), int64 on the
    device.
    """
    return split(to_device(tokens, device), packing)


def to_device(tokens: Tokens, device: TorchDevice) -> Tensor:
    """(B, T + 1) token ids -> int64 on the device, in one copy of int32. The host does not wait for
    an accelerator.
    """
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


def pin_batch(batch: Batch, device: TorchDevice) -> Batch:
    """Return the batch in pinned memory, as ``to_device`` needs it for an accelerator."""
    if not device.runs_ahead:
        return batch
    tokens = torch.from_numpy(np.require(batch.tokens, np.int32, ["C", "W"]))
    return replace(batch, tokens=device.pin(tokens).numpy())
