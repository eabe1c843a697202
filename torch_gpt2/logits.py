"""Logits of the weights in a folder, ours or transformers', to compare converted weights with their
source.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.conversion.logits import config_of
from common.training.opened_checkpoint import Checkpoint
from torch_gpt2.checkpoint import load_weights
from torch_gpt2.device import select_device
from torch_gpt2.model import build_model


@torch.no_grad()
def logits(folder: Path, model: ResolvedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of a checkpoint folder in our own format."""
    net = build_model(config_of(model, folder), select_device("cpu")).eval()
    load_weights(dict(net.named_parameters()), model, Checkpoint(folder))
    found: NDArray[np.float32] = net.logits(net(torch.from_numpy(ids))).numpy()
    return found


@torch.no_grad()
def hugging_face_logits(
    folder: Path, model: ResolvedModel, ids: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the logits of a folder in the format of transformers, computed by transformers."""
    for name in ("torchao", "torch.utils._pytree"):  # warnings of a torchao for another torch
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers import GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    net: Any = GPT2LMHeadModel.from_pretrained(
        folder if folder.is_dir() else folder.parent, local_files_only=True
    )
    net = net.float().eval()
    found: NDArray[np.float32] = net(torch.from_numpy(ids)).logits.numpy()
    return found
