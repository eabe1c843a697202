"""A model and its tokenizer, with one interface for text and scores on every backend."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from common.config.hints import explain_all
from common.config.schema import PredictConfig
from common.errors import ConfigError, RunError
from common.evaluation.rows import ScoredRow, Scorer, score_tokens, sliding_windows
from common.generation.generate import Decoder, rows_at_once
from common.generation.output import continuations, unused_by_greedy
from common.generation.prompts import Given, Prompt, encode_prompts
from common.generation.sampling import ScoredToken
from common.inference.runner import Runner
from common.inference.source import Source
from common.log import LOG
from common.parallel.run import Run
from common.resolve.derive import resolve_other
from common.tokenizer import Tokenizer
from common.tokenizer.text_tokenizer import encode_prompt, encode_words
from common.training.export import OF_A_COMMAND
from common.weights.names import count_parameters


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A continuation of a prompt. ``str`` gives the prompt and its continuation."""

    prompt: str
    text: str
    """The continuation, without the prompt."""
    prompt_tokens: list[int]
    tokens: list[int]
    """Tokens of the continuation, without end-of-text."""
    finish_reason: str
    """length, end_of_text, or another reason of ``Continuation.finish_reason``."""
    score: float | None = None
    """Score in beam search: sum of the tokens' log-probabilities / length ** length_penalty."""
    logprobs: Sequence[ScoredToken] = ()
    """A record of each token, where the setting logprobs asks for them."""
    index: int = 0
    """Number of its prompt, from 0."""
    number: int = 0
    """Its number among the continuations of its prompt, from 0."""

    def __str__(self) -> str:
        return self.prompt + self.text


class Generations(tuple[Generation, ...]):
    """Continuations in the order of their prompts. ``str`` puts an empty line between them."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """Log-probabilities of n tokens, each after the tokens before it."""

    tokens: list[int]
    """Ids of the scored tokens."""
    logprobs: NDArray[np.float32]
    """(n,): natural logarithm of the probability of each."""
    greedy: NDArray[np.bool_]
    """(n,): whether each is the most probable token in its place."""

    @property
    def logprob(self) -> float:
        """Log-probability of all tokens together."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """Whether greedy generation would have chosen all of them."""
        return bool(self.greedy.all())

    @property
    def loss(self) -> float:
        """Mean cross-entropy of a token in nats; NaN if there is no token."""
        return -self.logprob / len(self.tokens) if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss))


class LanguageModel:
    """An open GPT-2. One call works at a time; a second call meanwhile raises RunError."""

    def __init__(self, source: Source, backend: str, config: Run, tokenizer: Tokenizer, runner: Runner) -> None:
        """backend: torch, mindspore or onnx. config: for one device, with the model's sizes."""
        self.source = source
        self.backend = backend
        self.config = config
        self.tokenizer = tokenizer
        self.runner = runner
        self._decoder: Decoder | None = None
        self._rows = 0
        self._scorer: Scorer | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        model = self.config.model
        return (
            f"LanguageModel({str(self.source.path)!r}, {model.num_layers} layers x"
            f" {model.hidden_size}, {count_parameters(model):,} parameters, {self.backend})"
        )

    @property
    def max_positions(self) -> int:
        """Number of tokens that the model sees at once."""
        return self.config.model.max_positions

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; <|endoftext|> in it is that token."""
        ids: list[int] = encode_prompt(self.tokenizer, text).tolist()
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    # ---- generating ----

    def generate(self, prompt: Given | Sequence[Given], **settings: Any) -> Generations:
        """Continue one prompt or several. A prompt is a text or a list of ids.

        settings: keys of the section predict, such as max_new_tokens, strategy, temperature, top_k,
        seed; their defaults are the section's. Returns num_sequences continuations of each prompt,
        in order. Raises ConfigError for settings and prompts that the model cannot follow.
        """
        config, prompts = self._prepared(prompt, settings)
        with self._working():
            decoder = self._decoder_for(config, prompts)
            return Generations(
                Generation(
                    prompt=each.prompt.text,
                    text=each.read(),
                    prompt_tokens=each.prompt.ids,
                    tokens=each.tokens,
                    finish_reason=str(each.finish_reason),
                    score=each.score,
                    logprobs=each.scored,
                    index=each.index,
                    number=each.number,
                )
                for each in continuations(decoder, prompts, config, self.tokenizer)
            )

    def stream(self, prompt: Given, **settings: Any) -> Iterator[str]:
        """Return the text that follows a prompt in pieces of whole characters, as it comes.

        settings: as for ``generate``, for one continuation. Raises ConfigError.
        """
        config, prompts = self._prepared(prompt, settings)
        if len(prompts) > 1 or config.predict.num_sequences > 1:
            raise ConfigError("stream: continues one prompt once; use generate for several")
        return self._pieces(config, prompts)

    def _pieces(self, config: Run, prompts: Sequence[Prompt]) -> Iterator[str]:
        shown = 0
        with self._working():
            decoder = self._decoder_for(config, prompts)
            for each in continuations(decoder, prompts, config, self.tokenizer, stepwise=True):
                text = each.read()
                if text[shown:]:
                    yield text[shown:]
                shown = len(text)

    def _prepared(self, prompt: Given | Sequence[Given], settings: dict[str, Any]) -> tuple[Run, list[Prompt]]:
        if wrong := [name for name in (*OF_A_COMMAND, "stream") if name in settings]:
            raise ConfigError(f"{wrong[0]}: belongs to --run_mode predict; leave it out here")
        section = checked_settings({"batch_size": self.config.predict.batch_size, **settings})
        config = resolve_other(self.config, world_size=1, predict=section)
        if remark := unused_by_greedy(config.predict):
            LOG.warning(remark)
        is_one = isinstance(prompt, str) or all(isinstance(each, Integral) for each in prompt)
        given = [prompt] if is_one else prompt
        return config, encode_prompts(config, self.tokenizer, cast("Sequence[Given]", given))

    # ---- scoring ----

    @overload
    def score(self, text: str, *, stride: int | None = None) -> Score: ...
    @overload
    def score(self, text: list[str], *, stride: int | None = None) -> list[Score]: ...
    def score(self, text: str | list[str], *, stride: int | None = None) -> Score | list[Score]:
        """Score every token of one text or several.

        The context of the first token is end-of-text, as in lm-eval and in the perplexity of .jsonl
        files. stride: tokens from one window to the next in a text that is longer than the model's
        positions; without it windows do not overlap. Raises ConfigError.
        """
        window, framing = self.max_positions, self.tokenizer.framing
        if stride is not None and not 1 <= stride <= window:
            raise ConfigError(f"stride={stride}: expected 1 to {window}, the model's positions")
        texts = [text] if isinstance(text, str) else text
        rows, counts = [], []
        for each in texts:
            words = encode_words(self.tokenizer, each)
            tokens = np.array([*(framing.begin or framing.suffix[-1:]), *words], np.int32)
            windows = sliding_windows(tokens, window, stride or window)
            counts.append(len(windows))
            rows += windows
        parts = iter(self._scored(rows))
        found = [_joined([next(parts) for _ in range(count)]) for count in counts]
        return found[0] if isinstance(text, str) else found

    def score_ids(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Score]:
        """Score the tokens of each row from the place in ``starts`` to the end of the row.

        starts: 1 or more each; the first token of a row has nothing before it. If a row is longer
        than the model's positions + 1 tokens, its first ones are left out. Raises ConfigError.
        """
        longest, size, scored = self.max_positions + 1, self.config.model.vocab_size, []
        for number, (ids, start) in enumerate(zip(rows, starts, strict=True)):
            if not 1 <= start < len(ids):
                raise ConfigError(
                    f"row {number}: starts at {start} of {len(ids)} tokens; expected a place from 1 to the last token"
                )
            tokens = np.asarray(ids, np.int64)
            if tokens.min() < 0 or tokens.max() >= size:
                raise ConfigError(f"row {number}: holds an id outside 0 to {size - 1}")
            kept = tokens[-longest:].astype(np.int32)
            scored.append(ScoredRow(tokens=kept, scored=min(len(ids) - start, len(kept) - 1)))
        return self._scored(scored)

    def _scored(self, rows: Sequence[ScoredRow]) -> list[Score]:
        """Return the scores of all rows, in their order. Long rows run first, to save padding."""
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number].tokens))
        size = len(rows) if self.runner.has_fixed_shapes else self.config.predict.batch_size
        found: dict[int, Score] = {}
        with self._working():
            self._scorer = self._scorer or self.runner.scorer()
            for first in range(0, len(rows), size or 1):
                some = [rows[number] for number in order[first : first + size]]
                scores = score_tokens(some, self._scorer, self.config.predict.batch_size)
                for number, row, score in zip(order[first:], some, scores, strict=False):
                    found[number] = Score(
                        tokens=row.tokens[len(row.tokens) - row.scored :].tolist(),
                        logprobs=-score.losses,
                        greedy=score.hits.astype(np.bool_),
                    )
        return [found[number] for number in range(len(rows))]

    # ---- the model ----

    @contextmanager
    def _working(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise RunError("the model is at work; finish or close its stream first, or open it twice")
        try:
            yield
        finally:
            self._lock.release()

    def _decoder_for(self, config: Run, prompts: Sequence[Prompt]) -> Decoder:
        """Return a decoder with as many rows as these prompts need. The last one is kept."""
        rows = max(1, rows_at_once(config.predict, len(prompts)))
        if self._decoder is None or self._rows != rows:
            self._decoder = None  # its memory is free before another one is made
            self._decoder, self._rows = self.runner.decoder(rows), rows
        return self._decoder


def checked_settings(settings: Mapping[str, Any]) -> PredictConfig:
    """Return the section predict. Raises ConfigError for unknown keys and forbidden values."""
    try:
        return PredictConfig.model_validate(dict(settings))
    except ValidationError as error:
        faults = [{**fault, "loc": ("predict", *fault["loc"])} for fault in error.errors()]
        raise ConfigError("\n".join(explain_all(faults, {}))) from None


def _joined(parts: Sequence[Score]) -> Score:
    return Score(
        tokens=[token for part in parts for token in part.tokens],
        logprobs=np.concatenate([np.zeros(0, np.float32), *(part.logprobs for part in parts)]),
        greedy=np.concatenate([np.zeros(0, np.bool_), *(part.greedy for part in parts)]),
    )
