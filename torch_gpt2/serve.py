"""Serve completions of a checkpoint over HTTP."""

from __future__ import annotations

from common.cluster.environment import ALONE, Process
from common.parallel.resolved_run import ResolvedRun
from common.serving.server import serve as serve_slots
from common.training.data import describe_tokenizer, open_tokenizer
from torch_gpt2.predict import open_runner
from torch_gpt2.slots import Slots


def serve(config: ResolvedRun, process: Process = ALONE) -> None:
    tokenizer, config = open_tokenizer(config)

    def open_slots(count: int) -> Slots:
        runner = open_runner(config, describe_tokenizer(tokenizer), process)
        return Slots(runner.model, runner.device, count)

    serve_slots(config, tokenizer, open_slots)
