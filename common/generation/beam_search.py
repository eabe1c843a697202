"""Beam search with any decoder, in numpy, the same on both backends.

Tokens and scores are those of transformers 5 (``GenerationMixin._beam_search``). Groups of beams
that avoid each other's tokens follow Vijayakumar et al. 2016, as PaddleFleetX has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from common.config.schema import PredictConfig
from common.errors import RunError
from common.generation.generate import Continuation, Decoder, GrowingText
from common.generation.logit_rules import Biases, LogitRules
from common.generation.prompts import Prompt
from common.generation.sampling import NOTHING_LEFT, Logits, ScoredToken, largest_ids, score_token
from common.processes.heartbeat import beat

_NEVER = np.float32(-1e9)
"""The score of a beam that does not exist yet."""


def search_beams(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    settings: PredictConfig,
    *,
    ends: Sequence[int],
    vocab_size: int | None = None,
    unknown: int | None = None,
    biases: Biases | None = None,
    read: Callable[[Prompt], GrowingText] | None = None,
) -> Iterator[Continuation]:
    """Yield the num_sequences best continuations of each prompt, the best one first.

    vocab_size: ids from this one upwards are not chosen. unknown: an id that is not chosen. biases, read: as in
    ``generate``. Raises RunError when logits are not finite, and when rules leave too few sequences.
    """
    assert read is not None or not settings.stop
    rules = LogitRules(settings, ends=ends, unknown=unknown, biases=biases)
    beams = settings.num_beams
    at_once = max(1, decoder.rows // beams)
    for first in range(0, len(prompts), at_once):
        batch = [_Search(prompt, settings, rules, ends, read) for prompt in prompts[first:][:at_once]]
        rows = [search.prompt.ids for search in batch for _ in range(beams)]
        logits = decoder.start(rows, max(search.prompt.new_tokens for search in batch))
        while True:
            for number, search in enumerate(batch):
                if not search.is_done:
                    own = logits[number * beams : (number + 1) * beams, :vocab_size]
                    search.advance(own)
            if all(search.is_done for search in batch):
                break
            beat(first, "generating")
            decoder.reorder(
                [number * beams + parent for number, search in enumerate(batch) for parent in search.parents]
            )
            logits = decoder.step([token for search in batch for token in search.last_tokens])
        for index, search in enumerate(batch, first):
            yield from search.results(index)


class _Search:
    """The search for continuations of one prompt: one group of beams, or several."""

    def __init__(
        self,
        prompt: Prompt,
        settings: PredictConfig,
        rules: LogitRules,
        ends: Sequence[int],
        read: Callable[[Prompt], GrowingText] | None,
    ) -> None:
        self.prompt = prompt
        self._settings = settings
        self._rules = rules
        self._read = read
        self._reads = bool(settings.stop)
        self._size = settings.num_beams // settings.num_beam_groups
        self._groups = [_Group.of(self._size) for _ in range(settings.num_beam_groups)]
        self._end_ids = ends if settings.stop_at_end_of_text else ()
        # enough that beams are left where every end is a candidate (transformers)
        self._kept = max(2, 1 + len(self._end_ids)) * self._size

    @property
    def is_done(self) -> bool:
        return all(group.is_done for group in self._groups)

    @property
    def parents(self) -> list[int]:
        """The row that each beam continues, counted from the first row of the prompt."""
        return [number * self._size + parent for number, group in enumerate(self._groups) for parent in group.parents]

    @property
    def last_tokens(self) -> list[int]:
        """The newest token of each beam; any token where a group has ended."""
        return [tokens[-1] if tokens else 0 for group in self._groups for tokens in group.running]

    def advance(self, logits: Logits) -> None:
        """Choose the next token of each beam from logits (num_beams, vocab_size).

        diversity_rate is subtracted from a token's score for each beam of an earlier group that
        has chosen it at this place.
        """
        chosen: list[int] = []
        for number, group in enumerate(self._groups):
            if not group.is_done:
                rows = logits[number * self._size : (number + 1) * self._size]
                scores = self._log_probabilities(rows, group)
                if chosen:
                    counts = np.bincount(chosen, minlength=scores.shape[1]).astype(np.float32)
                    scores -= np.float32(self._settings.diversity_rate) * counts
                group.advance(scores, rows, self._ends, self.prompt.new_tokens, self._settings, self._kept)
                chosen += group.chosen

    def _ends(self, tokens: list[int]) -> bool:
        """Return whether the newest token ends the sequence, by itself or by a stop string."""
        return tokens[-1] in self._end_ids or (self._reads and self._is_stopped(tokens))

    def _is_stopped(self, tokens: list[int]) -> bool:
        assert self._read is not None
        text = self._read(self.prompt)
        text.advance(tokens)
        return text.is_stopped

    def _log_probabilities(self, logits: Logits, group: _Group) -> Logits:
        largest = logits.max(-1, keepdims=True)
        if not np.isfinite(largest).all():
            raise RunError(
                "the model's logits are not finite; its weights are broken or precision.compute is too narrow for them"
            )
        shifted = logits - largest
        scores: Logits = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        for row, tokens in zip(scores, group.running, strict=True):
            changed = self._rules.apply(row, self.prompt.ids, tokens)
            if changed is not row:
                row[:] = changed
        return scores

    def results(self, index: int) -> Iterator[Continuation]:
        finished = [each for group in self._groups for each in group.finished]
        finished.sort(key=lambda each: -each.score)
        for number, each in enumerate(finished[: self._settings.num_sequences]):
            if each.score == -np.inf:
                raise RunError(NOTHING_LEFT)
            ended = bool(each.tokens) and each.tokens[-1] in self._end_ids
            stopped = not ended and self._reads and self._is_stopped(each.tokens)
            yield Continuation(
                prompt=self.prompt,
                index=index,
                number=number,
                generator=np.random.default_rng((0, index, number)),
                end=each.tokens[-1] if ended else None,
                tokens=each.tokens[:-1] if ended else each.tokens,
                finish_reason="end_of_text" if ended else "stop_string" if stopped else "length",
                growing=self._read(self.prompt) if self._read else None,
                scored=each.scored[:-1] if ended else each.scored,
                score=each.score,
            )


class _Finished(NamedTuple):
    score: float
    tokens: list[int]
    scored: list[ScoredToken]


@dataclass(kw_only=True)
class _Group:
    """Beams that compete with each other."""

    scores: Logits
    """Sums of the log-probabilities of the running beams, best first."""
    running: list[list[int]]
    scored: list[list[ScoredToken]]
    """Records of the tokens of the running beams, where predict.logprobs asks for them."""
    parents: list[int]
    finished: list[_Finished] = field(default_factory=list)
    """Finished sequences, best first, at most one for each beam."""
    chosen: list[int] = field(default_factory=list)
    """The tokens that the beams have chosen at the newest place."""
    length: int = 0
    is_done: bool = False

    @classmethod
    def of(cls, size: int) -> _Group:
        """Return a group before its first token, when only its first beam counts."""
        scores = np.full(size, _NEVER, np.float32)
        scores[0] = 0
        nothing: list[list[Any]] = [[] for _ in range(size)]
        return cls(scores=scores, running=nothing, scored=nothing, parents=list(range(size)))

    def advance(
        self,
        scores: Logits,
        logits: Logits,
        ends: Callable[[list[int]], bool],
        most: int,
        settings: PredictConfig,
        kept: int,
    ) -> None:
        """Choose the next tokens by their scores (beams, vocab_size).

        logits: of the model, of the same shape. ends: tells whether a sequence ends with its
        newest token. most: limit of new tokens in a sequence. kept: number of candidates.
        """
        size, vocabulary = scores.shape
        sums = (scores + self.scores[:, None]).ravel()
        best = _largest(sums, kept)
        self.length += 1
        places = [(int(place // vocabulary), int(place % vocabulary)) for place in best]
        tokens = [[*self.running[row], token] for row, token in places]
        scored: list[list[ScoredToken]] = [[]] * len(places)
        if settings.logprobs is not None:
            scored = [[*self.scored[row], score_token(logits[row], token, settings.logprobs)] for row, token in places]
        ended = [self.length == most or ends(each) for each in tokens]
        full = len(self.finished) == size and settings.early_stopping is True
        divisor = float(self.length) ** settings.length_penalty
        for number, place in enumerate(best[:size]):
            if ended[number] and not full:
                self.finished.append(_Finished(float(sums[place]) / divisor, tokens[number], scored[number]))
        self.finished = sorted(self.finished, key=lambda each: -each.score)[:size]
        order = sorted(range(len(best)), key=lambda number: ended[number])[:size]  # stable
        self.chosen = [tokens[number][-1] for number in order]
        going = [number for number in order if not ended[number]]
        if not going or self._is_decided(float(sums[best[going[0]]]), most, settings):
            self.is_done = True
            return
        # stop strings may end so many beams that an ended one fills the place of a running one
        self.scores = np.array([_NEVER if ended[number] else sums[best[number]] for number in order], np.float32)
        self.running = [tokens[number] for number in order]
        self.scored = [scored[number] for number in order]
        self.parents = [places[number][0] for number in order]

    def _is_decided(self, best_running: float, most: int, settings: PredictConfig) -> bool:
        """Return whether no running beam is expected to beat the worst finished one."""
        if len(self.finished) < len(self.running):
            return False
        if settings.early_stopping is True:
            return True
        longest = settings.early_stopping == "never" and settings.length_penalty > 0
        length = float(most if longest else self.length)
        return bool(best_running / length**settings.length_penalty <= self.finished[-1].score)


def _largest(values: Logits, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return places of the largest values, in descending order; equal ones in their own order."""
    places = largest_ids(values, count) if count < values.size else np.arange(values.size)
    return places[np.argsort(-values[places], kind="stable")][:count]
