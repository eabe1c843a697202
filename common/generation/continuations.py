"""Continuations of prompts, by the strategy that the settings name."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

from common.errors import ConfigError
from common.generation.beam_search import search_beams
from common.generation.generate import Continuation, Decoder, generate
from common.generation.logit_rules import sequence_biases
from common.generation.prompts import Prompt, sliding_window
from common.generation.stop_strings import GrowingText
from common.parallel.run import Run
from common.tokenizer import Tokenizer


def continuations(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    config: Run,
    tokenizer: Tokenizer,
    *,
    stepwise: bool = False,
    done: Container[tuple[int, int]] = (),
) -> Iterator[Continuation]:
    """Return the finished continuations, predict.num_sequences of each prompt, in order.

    stepwise: as in ``generate``; beam search knows its sequences only at the end. done: index and
    number of those that may be left out. Raises ConfigError if there are more beams than the
    decoder has rows.
    """
    settings = config.predict
    limits: dict[str, Any] = {
        "ends": tokenizer.ends,
        "vocab_size": tokenizer.vocab_size,
        "unknown": tokenizer.unknown_id,
        "biases": sequence_biases(settings, tokenizer),
        "read": lambda prompt: GrowingText(tokenizer.stream(prompt.ids), settings.stop),
    }
    if settings.method == "beam_search":
        if decoder.rows < settings.num_beams:
            raise ConfigError(
                f"predict.num_beams={settings.num_beams}: this export takes {decoder.rows} rows at"
                " once; lower it, or leave export.batch_size out when you export"
            )
        return search_beams(decoder, prompts, settings, **limits)
    return generate(
        decoder,
        prompts,
        settings,
        seed=config.seed if settings.seed is None else settings.seed,
        window=sliding_window(config),
        done=done,
        stepwise=stepwise,
        **limits,
    )


def read_text(sequence: Continuation) -> str:
    """Return the part that can no longer change of the text that a sequence adds to its prompt.

    It is the whole text once the sequence is finished.
    """
    assert sequence.growing is not None
    sequence.growing.advance(sequence.tokens, final=sequence.finish_reason is not None)
    return sequence.text
