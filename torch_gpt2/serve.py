"""Serve completions of a checkpoint over HTTP."""

from __future__ import annotations

from common.cluster.environment import ALONE, Process
from common.inputs import Inputs
from common.parallel.run import Run
from common.serving.server import serve as serve_slots
from common.training.data import describe_tokenizer
from torch_gpt2.predict import open_runner
from torch_gpt2.slots import Slots


def serve(config: Run, inputs: Inputs, process: Process = ALONE) -> None:
    checkpoint, tokenizer = inputs.checkpoint, inputs.tokenizer
    assert checkpoint is not None and tokenizer is not None
    record = describe_tokenizer(tokenizer)

    def open_slots(count: int) -> Slots:
        runner = open_runner(config, inputs.device, checkpoint, record)
        return Slots(runner.model, runner.device, count)

    serve_slots(config, tokenizer, open_slots)
