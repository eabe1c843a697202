"""Compilation of the model by torch.compile: one graph on one device, else a graph for each region.

One process compiles the model and its loss as one graph. With several processes, and for deep
models, the regions are a block (one graph for all blocks), the embedding, the last norm and the
loss. Messages between ranks then run between the graphs, and gradients of the last blocks are sent
while the first ones go backward. Blocks that keep their activations on the host are regions too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from common.log import LOG
from common.parallel.kernels import compile_error, in_regions
from common.parallel.run import Run
from torch_gpt2.device import TorchDevice
from torch_gpt2.model import GPT2
from torch_gpt2.parallel.data_parallel import LossSum
from torch_gpt2.private_api import ASYNC_TENSOR_PARALLEL, keep_graphs_whole

BACKEND = "inductor"


def is_compiled(config: Run, device: TorchDevice) -> bool:
    """Return whether the run compiles its model. auto does where torch generates kernels for the
    device and the layout allows it.
    """
    if config.train.compile != "auto":
        return config.train.compile
    return device.compiles and compile_error(config) is None


def compile_model(parts: Sequence[GPT2], config: Run) -> LossSum:
    """Compile the parts in place and return the loss of a batch. The first calls compile.

    Every graph is for one shape of batch.
    """
    options: dict[str, Any] = {"backend": BACKEND, "dynamic": False}
    if BACKEND == "inductor" and config.train.compile_mode != "default":
        options["mode"] = config.train.compile_mode
    model = parts[0]
    whole = not in_regions(config)
    LOG.info(
        f"compile: {'the model as one graph' if whole else 'a graph for each kind of region'}; the"
        " first step takes longer"
    )
    if whole:
        compiled: LossSum = torch.compile(model.loss_sum, **options)
        return compiled
    keep_graphs_whole()
    overlap = {"options": ASYNC_TENSOR_PARALLEL} if config.parallel.async_tensor_parallel else {}
    for part in parts:
        for block in part.h:
            block.compile(**options, **overlap)
        part.ln_f.compile(**options)
        part.begin = torch.compile(part.begin, **options)  # type: ignore[method-assign]
        part.loss_of = torch.compile(part.loss_of, **options)  # type: ignore[method-assign]
    return model.loss_sum
