"""Beam search with any decoder, in numpy, the same on both backends.

Tokens and scores are those of transformers 5 (``GenerationMixin._beam_search``). Groups of beams
that avoid each other's tokens follow Vijayakumar et al. 2016, as PaddleFleetX has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from common.errors import RunError
from common.generation.generate import Continuation, Decoder, GrowingText, Stream, without_text
from common.generation.logit_rules import LogitRules
from common.generation.prompts import Prompt
from common.generation.sampling import NOTHING_LEFT, Logits, ScoredToken, ranked_ids, score_token
from common.processes.heartbeat import beat

_NEVER = np.float32(-1e9)
"""The score of a beam that does not exist yet."""


def search_beams(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    rules: LogitRules,
    *,
    vocab_size: int | None = None,
    stream: Stream = without_text,
) -> Iterator[Continuation]:
    """Yield the num_sequences best continuations of each prompt, the best one first.

    vocab_size: ids from this one upwards are not chosen. Raises RunError when logits are not finite, and when rules
    leave too few sequences.
    """
    beams = rules.settings.num_beams
    at_once = max(1, decoder.rows // beams)
    for first in range(0, len(prompts), at_once):
        batch = [_Search(prompt, rules, stream, row * beams) for row, prompt in enumerate(prompts[first:][:at_once])]
        groups = [group for search in batch for group in search.groups]
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
            parents = [parent for group in groups for parent in group.parents]
            if parents != list(range(len(parents))):
                decoder.reorder(parents)
            # any token where a group has ended
            logits = decoder.step([tokens[-1] if tokens else 0 for group in groups for tokens in group.running])
        for index, search in enumerate(batch, first):
            yield from search.results(index)


class _Search:
    """The search for continuations of one prompt: one group of beams, or several."""

    def __init__(self, prompt: Prompt, rules: LogitRules, stream: Stream, row: int) -> None:
        """Begin a search. row: the decoder's row of the first beam."""
        self.prompt, self.rules, self.settings = prompt, rules, rules.settings
        self._stream = stream
        self._size = self.settings.num_beams // self.settings.num_beam_groups
        self.groups = [
            _Group(self, self._size, row + number * self._size) for number in range(self.settings.num_beam_groups)
        ]
        self.end_ids = rules.ends if self.settings.stop_at_end_of_text else ()
        # enough that beams are left where every end is a candidate (transformers)
        self.kept = max(2, 1 + len(self.end_ids)) * self._size

    @property
    def is_done(self) -> bool:
        return all(group.is_done for group in self.groups)

    def advance(self, logits: Logits) -> None:
        """Choose the next token of each beam from logits (num_beams, vocab_size).

        diversity_rate is subtracted from a token's score for each beam of an earlier group that
        has chosen it at this place.
        """
        chosen: list[int] = []
        for number, group in enumerate(self.groups):
            if not group.is_done:
                rows = logits[number * self._size : (number + 1) * self._size]
                scores = group.log_probabilities(rows)
                if chosen:
                    counts = np.bincount(chosen, minlength=scores.shape[1]).astype(np.float32)
                    scores -= np.float32(self.settings.diversity_rate) * counts
                chosen += group.advance(scores, rows)

    def is_stopped(self, tokens: list[int]) -> bool:
        if not self.settings.stop:
            return False
        text = GrowingText(self._stream(self.prompt.ids), self.settings.stop)
        text.advance(tokens)
        return text.is_stopped

    def results(self, index: int) -> Iterator[Continuation]:
        finished = [each for group in self.groups for each in group.finished]
        finished.sort(key=lambda each: -each[0])
        for number, (score, tokens, scored) in enumerate(finished[: self.settings.num_sequences]):
            if score == -np.inf:
                raise RunError(NOTHING_LEFT)
            ended = bool(tokens) and tokens[-1] in self.end_ids
            kept = tokens[:-1] if ended else tokens
            growing = GrowingText(self._stream(self.prompt.ids), self.settings.stop)
            growing.advance(kept)
            yield Continuation(
                prompt=self.prompt,
                index=index,
                number=number,
                generator=np.random.default_rng((0, index, number)),
                end=tokens[-1] if ended else None,
                tokens=kept,
                finish_reason="end_of_text" if ended else "stop_string" if growing.is_stopped else "length",
                growing=growing,
                scored=scored[: len(kept)],
                score=score,
            )


class _Group:
    """Beams that compete with each other.

    running: tokens of the running beams, best first. scores: sums of their log-probabilities. scored: records of their
    tokens, where predict.logprobs asks for them. finished: score, tokens and records of the sequences that ended, best
    first, at most one for each beam. parents: the decoder's row that each beam continues.
    """

    def __init__(self, search: _Search, size: int, row: int) -> None:
        self._search, self._row = search, row
        self.scores = np.full(size, _NEVER, np.float32)
        self.scores[0] = 0  # before its first token, only its first beam counts
        self.running: list[list[int]] = [[] for _ in range(size)]
        self.scored: list[list[ScoredToken]] = [[] for _ in range(size)]
        self.parents = list(range(row, row + size))
        self.finished: list[tuple[float, list[int], list[ScoredToken]]] = []
        self.length = 0
        self.is_done = False

    def log_probabilities(self, logits: Logits) -> Logits:
        """Return the log-probabilities of the next tokens (beams, vocab_size), changed by the rules."""
        largest = logits.max(-1, keepdims=True)
        if not np.isfinite(largest).all():
            raise RunError(
                "the model's logits are not finite; its weights are broken or precision.compute is too narrow for them"
            )
        shifted = logits - largest
        scores: Logits = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        for row, tokens in zip(scores, self.running, strict=True):
            row[:] = self._search.rules.apply(row, self._search.prompt.ids, tokens)
        return scores

    def advance(self, scores: Logits, logits: Logits) -> list[int]:
        """Choose and return the next tokens by their scores (beams, vocab_size).

        logits: of the model, of the same shape.
        """
        search, settings = self._search, self._search.settings
        size, vocabulary = scores.shape
        sums = (scores + self.scores[:, None]).ravel()
        best = ranked_ids(sums, search.kept)
        self.length += 1
        places = [(int(place // vocabulary), int(place % vocabulary)) for place in best]
        tokens = [[*self.running[row], token] for row, token in places]
        scored: list[list[ScoredToken]] = [[]] * len(places)
        if settings.logprobs is not None:
            scored = [[*self.scored[row], score_token(logits[row], token, settings.logprobs)] for row, token in places]
        is_last = self.length == search.prompt.new_tokens
        ended = [is_last or each[-1] in search.end_ids or search.is_stopped(each) for each in tokens]
        full = len(self.finished) == size and settings.early_stopping is True
        divisor = float(self.length) ** settings.length_penalty
        for number, place in enumerate(best[:size]):
            if ended[number] and not full:
                self.finished.append((float(sums[place]) / divisor, tokens[number], scored[number]))
        self.finished = sorted(self.finished, key=lambda each: -each[0])[:size]
        order = sorted(range(len(best)), key=lambda number: ended[number])[:size]  # stable
        going = [number for number in order if not ended[number]]
        self.is_done = not going or self._is_decided(float(sums[best[going[0]]]))
        if not self.is_done:
            # stop strings may end so many beams that an ended one fills the place of a running one
            self.scores = np.array([_NEVER if ended[number] else sums[best[number]] for number in order], np.float32)
            self.running = [tokens[number] for number in order]
            self.scored = [scored[number] for number in order]
            self.parents = [self._row + places[number][0] for number in order]
        return [tokens[number][-1] for number in order]

    def _is_decided(self, best_running: float) -> bool:
        """Return whether no running beam is expected to beat the worst finished one."""
        settings = self._search.settings
        if len(self.finished) < len(self.running):
            return False
        if settings.early_stopping is True:
            return True
        longest = settings.early_stopping == "never" and settings.length_penalty > 0
        length = float(self._search.prompt.new_tokens if longest else self.length)
        return bool(best_running / length**settings.length_penalty <= self.finished[-1][0])
