"""Continue prompts in batches with whatever decodes them: the same loop, and the same draws, on
both backends.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from common.config.schema import PredictConfig
from common.generation.log_probabilities import ScoredToken, score_token
from common.generation.logit_rules import Biases, LogitRules
from common.generation.prompts import Prompt
from common.generation.sampling import Logits, choose_token
from common.generation.stop_strings import GrowingText
from common.processes.heartbeat import beat


class Decoder(Protocol):
    """A model that remembers up to ``rows`` sequences, of different lengths, and takes one more
    token of each.
    """

    @property
    def rows(self) -> int: ...
    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Logits:
        """Forget what was, take these prompts in, with room for so many more tokens; logits (B,
        vocab_size) of what follows each. With room 0 there is no step after it.
        """

    def step(self, tokens: Sequence[int]) -> Logits:
        """Add a token to each; logits (B, vocab_size) of what follows. A sequence at its last
        position may be given any token.
        """

    def reorder(self, parents: Sequence[int]) -> None:
        """Let row i be followed by what row ``parents[i]`` remembers."""


@dataclass(kw_only=True)
class Continuation:
    """One sequence that grows; ``number`` counts those of one prompt from 0, and ``index`` the
    prompts. End-of-text is not among its tokens.
    """

    prompt: Prompt
    index: int
    number: int
    generator: np.random.Generator = field(repr=False)
    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["length", "end_of_text", "stop_string"] | None = None
    growing: GrowingText | None = field(default=None, repr=False)
    """Its text, which stop strings end; the tokens go on to the end of the stop string."""
    scored: list[ScoredToken] = field(default_factory=list, repr=False)
    """A record of each token, where predict.logprobs asks for them."""
    score: float | None = None
    """Of beam search: the sum of the tokens' log-probabilities / length ** length_penalty."""

    @property
    def text(self) -> str:
        """What is sure of its text, as far as it has been read."""
        return self.growing.text if self.growing else ""

    def context(self, window: int | None) -> list[int]:
        """The tokens after which the next one is chosen."""
        ids = self.prompt.ids + self.tokens
        return ids if window is None else ids[1 - window :]

    def room(self, window: int | None) -> int:
        """How many tokens can be added before the length or the window ends it."""
        left = self.prompt.new_tokens - len(self.tokens)
        length = len(self.prompt.ids) + len(self.tokens)
        return left if window is None else min(left, max(0, window - length))


def rows_at_once(settings: PredictConfig, prompts: int) -> int:
    """Return how many rows a decoder needs for so many prompts, in batches of batch_size: a row for
    each sequence, or for each beam.
    """
    if settings.strategy == "beam_search":
        return settings.num_beams * min(prompts, max(1, settings.batch_size // settings.num_beams))
    return min(settings.batch_size, prompts * settings.num_sequences)


def generate(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    settings: PredictConfig,
    *,
    seed: int,
    end_of_text: int,
    vocab_size: int | None = None,
    unknown: int | None = None,
    window: int | None = None,
    stepwise: bool = False,
    done: Container[tuple[int, int]] = (),
    biases: Biases | None = None,
    read: Callable[[Prompt], GrowingText] | None = None,
) -> Iterator[Continuation]:
    """Yield the finished continuations, num_sequences of each prompt, in order.

    Each draws from a generator of its own, keyed by seed, prompt and number: neither its batch nor
    its neighbours change what it says. vocab_size: ids from here on are not chosen, nor is unknown,
    the id of text that the vocabulary lacks. window: a sequence that outgrows it is followed by its
    last window - 1 tokens, taken in anew for each token; None: none does. stepwise: also yield a
    sequence after each of its tokens, unfinished, while it is the only one at work. done: index and
    number of those that are left out. biases: what ``sequence_biases`` makes of the settings. read:
    makes the text of a continuation, which stop strings need.
    """
    assert read is not None or not settings.stop
    rules = LogitRules(settings, end_of_text=end_of_text, unknown=unknown, biases=biases)
    waiting = [
        Continuation(
            prompt=prompt,
            index=index,
            number=number,
            generator=np.random.default_rng((seed, index, number)),
            growing=read(prompt) if read else None,
        )
        for index, prompt in enumerate(prompts)
        for number in range(settings.num_sequences)
        if (index, number) not in done
    ]
    for first in range(0, len(waiting), decoder.rows):
        batch = waiting[first : first + decoder.rows]
        at_work = batch
        logits = decoder.start(
            [each.context(window) for each in batch], max(each.room(window) for each in batch)
        )
        while True:
            for each, row in zip(at_work, logits, strict=True):
                if each.finish_reason is None:
                    grow(each, row[:vocab_size], settings, rules, end_of_text)
            unfinished = [each for each in batch if each.finish_reason is None]
            if not unfinished:
                break
            if stepwise and len(batch) == 1:
                yield batch[0]
            beat(first, "generating")
            if at_work is not batch or any(each.room(window) == 0 for each in unfinished):
                at_work = unfinished
                logits = decoder.start([each.context(window) for each in unfinished], 0)
            else:
                logits = decoder.step(
                    [each.tokens[-1] if each.tokens else end_of_text for each in batch]
                )
        yield from batch


def grow(
    sequence: Continuation,
    logits: Logits,
    settings: PredictConfig,
    rules: LogitRules,
    end_of_text: int,
) -> None:
    """Choose what follows where logits (vocab_size,) are those after all of ``sequence``."""
    tokens, prompt = sequence.tokens, sequence.prompt
    changed = rules.apply(logits, prompt.ids, tokens)
    token = choose_token(changed, settings, sequence.generator)
    if settings.stop_at_end_of_text and token == end_of_text:
        sequence.finish_reason = "end_of_text"
        return
    tokens.append(token)
    if settings.logprobs is not None:
        sequence.scored.append(score_token(logits, token, settings.logprobs))
    if settings.stop and sequence.growing:
        sequence.growing.advance(tokens)
        if sequence.growing.is_stopped:
            sequence.finish_reason = "stop_string"
            return
    if len(tokens) == prompt.new_tokens:
        sequence.finish_reason = "length"
