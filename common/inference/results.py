"""Results of a language model: generated text and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.generation.log_probabilities import ScoredToken


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
