"""The stages of DeepSpeed's pipeline, made of the model's own blocks."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from common.parallel.resolved_run import ResolvedRun
from torch_gpt2.device import DTYPES, TorchDevice
from torch_gpt2.loss import cross_entropy_sum
from torch_gpt2.model import GPT2, build_meta_model


class _Positions(nn.Module):
    """Between the tied token embedding and the first block."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.wpe = model.wpe
        self.dropout, self.dtype = model.dropout, model.compute_dtype

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.wpe(torch.arange(x.shape[1], device=x.device))  # (B, T, C)
        return F.dropout(x.to(self.dtype), self.dropout, self.training)


class _StageBlocks(nn.Module):
    """The blocks of one stage; DeepSpeed cuts the list of layers so that each rank has one of
    these.
    """

    def __init__(self, model: GPT2, layers: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.h[layer] for layer in layers)
        self.recompute = model.recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = (
                recompute(block, x, use_reentrant=False)
                if self.recompute and torch.is_grad_enabled()
                else block(x)
            )
        return x


def build_pipeline(
    deepspeed: Any, config: ResolvedRun, device: TorchDevice, rank: int
) -> tuple[nn.Module, GPT2]:
    """DeepSpeed's pipeline over the model's own blocks, and the model: only what this rank's stage
    uses has memory.

    The first and the last stage each have ``wte``, whose gradients DeepSpeed adds up.
    """
    topology = config.topology
    stage, last = topology.coordinates(rank).pipeline, topology.pipeline - 1
    model = build_meta_model(config)
    positions = _Positions(model)
    stages = [
        _StageBlocks(model, topology.layers_of_stage(number, config.model.num_layers))
        for number in range(topology.pipeline)
    ]
    for module in (
        stages[stage],
        *([positions] if stage == 0 else []),
        *([model.ln_f] if stage == last else []),
    ):
        module.to_empty(device=device.torch_device)
    tied = ("wte", nn.Embedding, *model.wte.weight.shape)
    place = {"device": device.torch_device, "dtype": DTYPES[config.precision.parameters]}

    def mean_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        total = cross_entropy_sum(
            hidden.flatten(0, 1), model.wte.weight, targets.flatten(), config.model.vocab_size
        )
        return total / targets.numel()

    pipe = deepspeed.pipe
    with contextlib.redirect_stdout(io.StringIO()):
        pipeline = pipe.PipelineModule(
            layers=[
                pipe.TiedLayerSpec(*tied, **place),
                positions,
                *stages,
                model.ln_f,
                # the loss multiplies by it
                pipe.TiedLayerSpec(*tied, forward_fn=lambda wte, hidden: hidden, **place),
            ],
            num_stages=topology.pipeline,
            loss_fn=mean_loss,
            partition_method=f"type:{_StageBlocks.__name__}",
            dynamic_shape=True,  # validation may have other shapes
        )
    if "wte" in pipeline.tied_modules:
        model.wte = pipeline.tied_modules["wte"]
    return pipeline, model
