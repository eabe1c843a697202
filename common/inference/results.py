"""What a language model answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.generation.log_probabilities import ScoredToken


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A continuation of a prompt. As text it is the prompt and what follows."""

    prompt: str
    text: str
    """What follows the prompt."""
    prompt_tokens: list[int]
    tokens: list[int]
    """Those of the continuation, without end-of-text."""
    finish_reason: str
    """length, end_of_text, or another reason of ``Continuation.finish_reason``."""
    score: float | None = None
    """Of beam search: the sum of the tokens' log-probabilities / length ** length_penalty."""
    logprobs: Sequence[ScoredToken] = ()
    """A record of each token, where the setting logprobs asks for them."""
    index: int = 0
    """Which prompt it continues."""
    number: int = 0
    """Which continuation of its prompt it is."""

    def __str__(self) -> str:
        return self.prompt + self.text


class Generations(tuple[Generation, ...]):
    """Continuations, those of one prompt after those of the one before. As text they have an empty
    line in between.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """How probable n tokens are, each after those before it."""

    tokens: list[int]
    """The scored ones."""
    logprobs: NDArray[np.float32]
    """(n,): natural logarithm of the probability of each."""
    greedy: NDArray[np.bool_]
    """(n,): whether each is the most probable token in its place."""

    @property
    def logprob(self) -> float:
        """Of all tokens together."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """Whether greedy generation would have chosen all of them."""
        return bool(self.greedy.all())

    @property
    def loss(self) -> float:
        """Mean cross-entropy of a token in nats; NaN of no token."""
        return -self.logprob / len(self.tokens) if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss))
