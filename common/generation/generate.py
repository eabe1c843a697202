"""Continue prompts in batches with any decoder, a backend's or that of an exported program.

All share the loop and the random draws.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.config.schema import PredictConfig
from common.generation.logit_rules import LogitRules
from common.generation.prompts import Prompt
from common.generation.sampling import Logits, ScoredToken, choose_token, score_token
from common.processes.heartbeat import beat
from common.tokenizer.base import TextStream

Stream: TypeAlias = Callable[[Sequence[int]], TextStream]
"""Returns a decoder of what follows such ids."""


class GrowingText:
    """The text of a sequence of tokens that grows, up to the first stop string.

    The stop string that is complete first counts. If several end at the same character, the
    longest one counts. So it does not matter into which pieces the text is cut.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str] = ()) -> None:
        """stream: decodes the sequence. stop: strings of at least one character."""
        self.text = ""
        """Whole characters, and no part of a stop string."""
        self.is_stopped = False
        self._stream, self._stop = stream, stop
        self._read = 0
        self._held = ""
        """The end of the text, which may begin a stop string."""

    def advance(self, tokens: Sequence[int], final: bool = False) -> None:
        """Read the new part of ``tokens``, the whole sequence. final: it will not grow."""
        text = self._held + self._stream(tokens[self._read :], final)
        self._read = len(tokens)
        if self.is_stopped:
            return
        matches = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if matches:
            _, place = min(matches)
            self.is_stopped, self._held = True, ""
            self.text += text[:place]
            return
        held = 0  # characters at the end that may begin a stop string
        for stop in () if final else self._stop:
            most = min(len(text), len(stop) - 1)
            held = max(held, next((size for size in range(most, 0, -1) if stop.startswith(text[-size:])), 0))
        self.text += text[: len(text) - held]
        self._held = text[len(text) - held :]


class Decoder(Protocol):
    """A model that remembers up to ``rows`` sequences of different lengths.

    Each step adds one token to each of them.
    """

    @property
    def rows(self) -> int: ...
    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Logits:
        """Forget earlier sequences and read these prompts; return the logits (B, vocab_size) of
        the token that follows each. room: most tokens to add; with 0 no step comes after it.
        """

    def step(self, tokens: Sequence[int]) -> Logits:
        """Add a token to each sequence; return the logits (B, vocab_size) of the next ones. A
        sequence at its last position may be given any token.
        """

    def reorder(self, parents: list[int]) -> None:
        """Put into row i the sequence that row ``parents[i]`` remembers."""


@dataclass(kw_only=True)
class Continuation:
    """One sequence that grows. End-of-text is not among its tokens.

    index: number of its prompt, from 0. number: its number among the continuations of this prompt, from 0.
    """

    prompt: Prompt
    index: int
    number: int
    generator: np.random.Generator = field(repr=False)
    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["length", "end_of_text", "stop_string"] | None = None
    end: int | None = None
    """The token that ended it, if one did."""
    growing: GrowingText = field(repr=False)
    """Its text, which ends before a stop string; the tokens include the stop string."""
    scored: list[ScoredToken] = field(default_factory=list, repr=False)
    """A record of each token, where predict.logprobs asks for them."""
    score: float | None = None
    """Score in beam search: sum of the tokens' log-probabilities / length ** length_penalty."""

    @property
    def text(self) -> str:
        """The part of its text that can no longer change, as far as its tokens have been read."""
        return self.growing.text

    def read(self) -> str:
        """Read the new tokens and return ``text``, the whole text once the sequence is finished."""
        self.growing.advance(self.tokens, final=self.finish_reason is not None)
        return self.text

    def context(self, window: int | None) -> list[int]:
        """Return the tokens after which the next one is chosen."""
        ids = self.prompt.ids + self.tokens
        return ids if window is None else ids[1 - window :]

    def room(self, window: int | None) -> int:
        """Return how many tokens can be added before the length limit or the window is reached."""
        left = self.prompt.new_tokens - len(self.tokens)
        length = len(self.prompt.ids) + len(self.tokens)
        return left if window is None else min(left, max(0, window - length))


def rows_at_once(settings: PredictConfig, prompts: int) -> int:
    """Return how many rows a decoder needs for this number of prompts in batches of batch_size.

    There is a row for each sequence, or for each beam.
    """
    if settings.method == "beam_search":
        return settings.num_beams * min(prompts, max(1, settings.batch_size // settings.num_beams))
    return min(settings.batch_size, prompts * settings.num_sequences)


def without_text(ids: Sequence[int]) -> TextStream:
    """Decode nothing: the ``Stream`` of callers that want only tokens, and have no stop strings."""
    return lambda tokens, final=False: ""


def new_sequences(
    prompts: Sequence[Prompt],
    count: int,
    seed: int,
    stop: Sequence[str],
    stream: Stream,
    done: Container[tuple[int, int]] = (),
) -> list[Continuation]:
    """Return ``count`` empty continuations of each prompt, in order, without those whose index and number are done.

    Each draws from a generator of its own, keyed by seed, prompt and number, so that its text does not depend on its
    batch.
    """
    return [
        Continuation(
            prompt=prompt,
            index=index,
            number=number,
            generator=np.random.default_rng((seed, index, number)),
            growing=GrowingText(stream(prompt.ids), stop),
        )
        for index, prompt in enumerate(prompts)
        for number in range(count)
        if (index, number) not in done
    ]


def generate(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    rules: LogitRules,
    *,
    seed: int,
    vocab_size: int | None = None,
    window: int | None = None,
    stepwise: bool = False,
    done: Container[tuple[int, int]] = (),
    stream: Stream = without_text,
) -> Iterator[Continuation]:
    """Yield the finished continuations, num_sequences of each prompt, in order.

    seed: as in ``new_sequences``. vocab_size: ids from this one upwards are not chosen. window: once a sequence is
    longer, its last window - 1 tokens are computed again for each new token; None if no sequence is. stepwise: while a
    sequence is the only one at work, also yield it unfinished after each token. done: index and number of those that
    are left out.
    """
    waiting = new_sequences(prompts, rules.settings.num_sequences, seed, rules.settings.stop, stream, done)
    for first in range(0, len(waiting), decoder.rows):
        batch = waiting[first : first + decoder.rows]
        at_work = batch
        logits = decoder.start([each.context(window) for each in batch], max(each.room(window) for each in batch))
        while True:
            for each, row in zip(at_work, logits, strict=True):
                if each.finish_reason is None:
                    grow(each, row[:vocab_size], rules)
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
                logits = decoder.step([each.tokens[-1] if each.tokens else 0 for each in batch])
        yield from batch


def grow(sequence: Continuation, logits: Logits, rules: LogitRules) -> None:
    """Add the next token to ``sequence``. logits: (vocab_size,), those after its last token."""
    tokens, prompt, settings = sequence.tokens, sequence.prompt, rules.settings
    changed = rules.apply(logits, prompt.ids, tokens)
    token = choose_token(changed, settings, sequence.generator)
    if settings.stop_at_end_of_text and token in rules.ends:
        sequence.end = token
        sequence.finish_reason = "end_of_text"
        return
    tokens.append(token)
    if settings.logprobs is not None:
        sequence.scored.append(score_token(logits, token, settings.logprobs))
    if settings.stop:
        sequence.growing.advance(tokens)
        if sequence.growing.is_stopped:
            sequence.finish_reason = "stop_string"
            return
    if len(tokens) == prompt.new_tokens:
        sequence.finish_reason = "length"


class ExportedModel(Protocol):
    """A program that computes logits. It may have been exported with a cache of keys and values."""

    @property
    def has_cache(self) -> bool: ...
    def reorder(self, rows: list[int]) -> None:
        """Put into row i the sequence that row ``rows[i]`` remembers."""

    def run(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        """Add tokens (B, T) to what is remembered; return logits (B, T, vocab_size).

        mask: (B, all tokens so far), 0 for padding on the left; as wide as ``ids`` where new sequences begin.
        """


class ExportedDecoder:
    """Implements ``Decoder``. Prompts are padded on the left."""

    def __init__(self, model: ExportedModel, rows: int) -> None:
        """rows: limit of sequences at once."""
        self.rows = rows
        self._model = model

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> NDArray[np.float32]:
        longest = max(map(len, prompts))
        self._ids = np.zeros((len(prompts), longest), np.int64)
        self._mask = np.zeros_like(self._ids)
        for row, prompt in enumerate(prompts):
            self._ids[row, longest - len(prompt) :] = prompt
            self._mask[row, longest - len(prompt) :] = 1
        return self._model.run(self._ids, self._mask)[:, -1]

    def step(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        new = np.array(tokens, np.int64)[:, None]
        self._mask = np.concatenate([self._mask, np.ones_like(new)], 1)
        self._ids = new if self._model.has_cache else np.concatenate([self._ids, new], 1)
        return self._model.run(self._ids, self._mask)[:, -1]

    def reorder(self, parents: list[int]) -> None:
        self._mask, self._ids = self._mask[parents], self._ids[parents]
        self._model.reorder(parents)
