"""Serve completions of a checkpoint over HTTP."""

from __future__ import annotations

from common.cluster.environment import ALONE, Process
from common.parallel.resolved_run import ResolvedRun
from common.planner.room import check_memory
from common.serving.server import serve as serve_slots
from common.training.data import describe_tokenizer, open_tokenizer
from common.training.start import weights_to_use
from torch_gpt2.checkpoint import load_weights
from torch_gpt2.device import open_device
from torch_gpt2.model import build_model
from torch_gpt2.slots import Slots


def serve(config: ResolvedRun, process: Process = ALONE) -> None:
    device = open_device(config, process)
    check_memory(config, process, device)
    tokenizer, config = open_tokenizer(config)
    checkpoint = weights_to_use(config, describe_tokenizer(tokenizer))

    def open_slots(count: int) -> Slots:
        model = build_model(config, device)
        load_weights(dict(model.named_parameters()), config.model, checkpoint)
        return Slots(model, device, count)

    serve_slots(config, tokenizer, open_slots)
