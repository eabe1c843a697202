"""The run mode predict, whatever opens the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.generation.generate import rows_at_once
from common.generation.output import write_continuations
from common.generation.prompts import encode_prompts
from common.inference.runner import Runner
from common.parallel.resolved_run import ResolvedRun
from common.training.data import describe_tokenizer, open_tokenizer


def continue_prompts(
    config: ResolvedRun, open_runner: Callable[[ResolvedRun, dict[str, Any]], Runner]
) -> None:
    """Continue the prompts of the config and write what follows.

    open_runner: called with the config, whose vocabulary is settled, and the record of the
    tokenizer, once the prompts are known to be in order.
    """
    tokenizer, config = open_tokenizer(config)
    prompts = encode_prompts(config, tokenizer)
    runner = open_runner(config, describe_tokenizer(tokenizer))
    rows = rows_at_once(config.predict, len(prompts))
    write_continuations(runner.decoder(rows), prompts, config, tokenizer)
