"""The engine's job for one continuation of a completion."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.config.schema import PredictConfig
from common.generation.generate import Continuation, grow
from common.generation.logit_rules import LogitRules
from common.generation.sampling import Logits, ScoredToken, score_token
from common.serving.engine import Observer
from common.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The new part of a sequence. choice: its number among the sequences of a request."""

    choice: int
    text: str = ""
    scored: tuple[ScoredToken, ...] = ()
    """Log-probabilities, if asked for. Those of the prompt come with the first piece."""
    tokens: int = 0
    seconds: float = 0.0
    """Time since the piece before, or since the job was made."""
    is_first: bool = False
    finish_reason: str | None = None
    """Reason in OpenAI's words: stop or length."""
    error: Exception | None = None


class CompletionJob:
    """Implements ``common.serving.engine.Job``. With one seed it draws what ``generate`` draws.

    The engine's thread calls ``emit`` with each piece; the last one has a reason or an error.
    """

    def __init__(
        self,
        sequence: Continuation,
        *,
        choice: int,
        settings: PredictConfig,
        rules: LogitRules,
        tokenizer: Tokenizer,
        window: int | None,
        scores_prompt: bool,
        emit: Callable[[Piece], None],
    ) -> None:
        """window: as in ``generate``."""
        self.is_cancelled = False
        self.sequence = sequence
        self._choice, self._settings, self._rules = choice, settings, rules
        self._tokenizer, self._window, self._emit = tokenizer, window, emit
        self._scores_prompt = scores_prompt
        self._prompt_scores: dict[int, ScoredToken] = {}
        self._shown = self._scored = self._pieces = 0
        self._since = time.monotonic()

    @property
    def observe(self) -> Observer | None:
        return self._score_prompt if self._scores_prompt and not self._pieces else None

    def context(self) -> list[int]:
        return self.sequence.context(self._window)

    def advance(self, logits: Logits) -> bool:
        sequence, logits = self.sequence, logits[: self._tokenizer.vocab_size]
        tokens = len(sequence.tokens)
        if sequence.prompt.new_tokens == 0:
            sequence.finish_reason = "length"
        else:
            grow(sequence, logits, self._settings, self._rules, self._tokenizer.ends)
        sequence.read()
        if sequence.end is not None and self._settings.logprobs is not None:
            sequence.scored.append(score_token(logits, sequence.end, self._settings.logprobs))
        self._say(len(sequence.tokens) - tokens)
        return sequence.finish_reason is not None

    def fail(self, error: Exception) -> None:
        self._emit(Piece(choice=self._choice, error=error))

    def _say(self, tokens: int) -> None:
        sequence, now = self.sequence, time.monotonic()
        scored = tuple(sequence.scored[self._scored :])
        if not self._pieces:
            scored = (*(score for _, score in sorted(self._prompt_scores.items())), *scored)
        reason = sequence.finish_reason
        piece = Piece(
            choice=self._choice,
            text=sequence.text[self._shown :],
            scored=scored,
            tokens=tokens,
            seconds=now - self._since,
            is_first=not self._pieces,
            finish_reason="length" if reason == "length" else "stop" if reason else None,
        )
        self._shown, self._scored = len(sequence.text), len(sequence.scored)
        self._pieces, self._since = self._pieces + 1, now
        self._emit(piece)

    def _score_prompt(self, first: int, logits: Logits) -> None:
        """Score prompt tokens. logits: those after its tokens from place ``first`` onwards."""
        ids, count = self.sequence.prompt.ids, self._settings.logprobs or 0
        self._prompt_scores[0] = ScoredToken(id=ids[0], logprob=math.nan, top=[])
        for place, row in enumerate(logits, first + 1):
            if place < len(ids):
                row = row[: self._tokenizer.vocab_size]
                self._prompt_scores[place] = score_token(row, ids[place], count)
