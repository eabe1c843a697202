"""Logits of the weights in a folder, to compare converted weights with their source."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.conversion.logits import config_of
from common.training.opened_checkpoint import Checkpoint
from mindformers_gpt2.checkpoint import load_weights
from mindformers_gpt2.device import select_device
from mindformers_gpt2.model import build_model


def logits(folder: Path, model: ResolvedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of a checkpoint folder in our own format."""
    net = build_model(config_of(model, folder), select_device("cpu"))
    load_weights(
        {parameter.name: parameter for parameter in net.get_parameters()}, model, Checkpoint(folder)
    )
    hidden = net(ms.Tensor(ids.astype(np.int32)))
    found: NDArray[np.float32] = net.logits(hidden.reshape((-1, model.hidden_size))).asnumpy()
    return found.reshape(*ids.shape, model.vocab_size)
