"""Token batches from numpy to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.dataset import Tokens
from torch_gpt2.device import TorchDevice


def inputs_and_targets(tokens: Tokens, device: TorchDevice) -> tuple[Tensor, Tensor]:
    """(B, T + 1) token ids -> ids (B, T) and the tokens that follow them (B, T), int64 on the
    device.
    """
    tensor = torch.from_numpy(tokens.astype(np.int64)).to(device.torch_device)
    return tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous()
