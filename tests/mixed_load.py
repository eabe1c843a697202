"""Sequences of all lengths, of which many begin alike, to be generated in few slots."""

from __future__ import annotations

import numpy as np

from common.generation.prompts import Prompt
from common.generation.sampling import Logits
from common.serving.engine import Engine, Observer, Slots


class Greedy:
    """A job that takes the most probable token."""

    is_cancelled = False

    def __init__(self, prompt: Prompt, window: int | None) -> None:
        self.prompt, self.window = prompt, window
        self.tokens: list[int] = []
        self.observe: Observer | None = None

    def context(self) -> list[int]:
        ids = self.prompt.ids + self.tokens
        return ids if self.window is None else ids[1 - self.window :]

    def advance(self, logits: Logits) -> bool:
        self.tokens.append(int(logits.argmax()))
        return len(self.tokens) == self.prompt.new_tokens

    def fail(self, error: Exception) -> None:
        raise error


def prompts(vocab_size: int, limit: int | None) -> list[Prompt]:
    """24 of 1 to 40 tokens; limit: most tokens together with those to add."""
    random = np.random.default_rng(0)
    common = random.integers(0, vocab_size, 32).tolist()
    found = []
    for number in range(24):
        ids = random.integers(0, vocab_size, random.integers(1, 9)).tolist()
        ids = common[: random.integers(16, 32)] + ids if number % 2 else ids
        new = int(random.integers(1, 40))
        room = new if limit is None else max(1, min(new, limit - len(ids)))
        found.append(Prompt(text="", ids=ids[: (limit or 99) - 1], new_tokens=room))
    return found


def run(slots: Slots, given: list[Prompt], window: int | None) -> tuple[list[list[int]], Engine]:
    """Return the tokens of each, and the engine that has made them."""
    engine = Engine(slots, queue_limit=len(given))
    jobs = [Greedy(prompt, window) for prompt in given]
    for job in jobs:
        engine.submit([job])
    while engine.turn():
        pass
    return [job.tokens for job in jobs], engine
