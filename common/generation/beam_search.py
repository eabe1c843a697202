"""Beam search over whatever decodes, in numpy, the same on both backends.

Tokens and scores are those of transformers 5 (``GenerationMixin._beam_search``). Groups of beams
that avoid each other's tokens follow Vijayakumar et al. 2016, as PaddleFleetX has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.config.schema import PredictConfig
from common.errors import RunError
from common.generation.generate import Continuation, Decoder
from common.generation.prompts import Prompt
from common.generation.sampling import Logits
from common.processes.heartbeat import beat

_NEVER = np.float32(-1e9)
"""The score of a beam that does not exist yet."""


def search_beams(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    settings: PredictConfig,
    *,
    end_of_text: int,
    vocab_size: int | None = None,
    unknown: int | None = None,
) -> Iterator[Continuation]:
    """Yield the num_sequences best continuations of each prompt, the best one first.

    vocab_size: ids from here on are not chosen, nor is unknown. Raises RunError when logits are not
    finite.
    """
    beams = settings.num_beams
    at_once = max(1, decoder.rows // beams)
    for first in range(0, len(prompts), at_once):
        batch = [
            _Search(prompt, settings, end_of_text, unknown) for prompt in prompts[first:][:at_once]
        ]
        rows = [search.prompt.ids for search in batch for _ in range(beams)]
        logits = decoder.start(rows, max(search.prompt.new_tokens for search in batch))
        while True:
            for number, search in enumerate(batch):
                if not search.is_done:
                    own = logits[number * beams : (number + 1) * beams, :vocab_size]
                    search.advance(own, end_of_text)
            if all(search.is_done for search in batch):
                break
            beat(first, "generating")
            decoder.reorder(
                [
                    number * beams + parent
                    for number, search in enumerate(batch)
                    for parent in search.parents
                ]
            )
            logits = decoder.step([token for search in batch for token in search.last_tokens])
        for index, search in enumerate(batch, first):
            yield from search.results(index, end_of_text)


class _Search:
    """The search for continuations of one prompt: one group of beams, or several."""

    def __init__(
        self, prompt: Prompt, settings: PredictConfig, end_of_text: int, unknown: int | None
    ) -> None:
        self.prompt = prompt
        self._unknown = unknown
        self._settings = settings
        self._size = settings.num_beams // settings.num_beam_groups
        self._groups = [_Group.of(self._size) for _ in range(settings.num_beam_groups)]
        self._end = end_of_text if settings.stop_at_end_of_text else None

    @property
    def is_done(self) -> bool:
        return all(group.is_done for group in self._groups)

    @property
    def parents(self) -> list[int]:
        """The rows, within the prompt's, that the beams continue."""
        return [
            number * self._size + parent
            for number, group in enumerate(self._groups)
            for parent in group.parents
        ]

    @property
    def last_tokens(self) -> list[int]:
        """The newest token of each beam; any token where a group has ended."""
        return [tokens[-1] if tokens else 0 for group in self._groups for tokens in group.running]

    def advance(self, logits: Logits, end_of_text: int) -> None:
        """Choose the next token of each beam from logits (num_beams, vocab_size).

        A token that beams of earlier groups have chosen at this place costs diversity_rate for
        each of them.
        """
        chosen: list[int] = []
        for number, group in enumerate(self._groups):
            if not group.is_done:
                rows = logits[number * self._size : (number + 1) * self._size]
                scores = self._log_probabilities(rows, group, end_of_text)
                if chosen:
                    counts = np.bincount(chosen, minlength=scores.shape[1]).astype(np.float32)
                    scores -= np.float32(self._settings.diversity_rate) * counts
                group.advance(scores, self._end, self.prompt.new_tokens, self._settings)
                chosen += group.chosen

    def _log_probabilities(self, logits: Logits, group: _Group, end_of_text: int) -> Logits:
        settings = self._settings
        largest = logits.max(-1, keepdims=True)
        if not np.isfinite(largest).all():
            raise RunError(
                "the model's logits are not finite; its weights are broken or precision.compute is"
                " too narrow for them"
            )
        shifted = logits - largest
        scores: Logits = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        if settings.repetition_penalty != 1.0:
            penalty = np.float32(settings.repetition_penalty)
            for row, tokens in zip(scores, group.running, strict=True):
                seen = self.prompt.ids + tokens
                row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        if group.length < settings.min_new_tokens:
            scores[:, end_of_text] = -np.inf
        if self._unknown is not None:
            scores[:, self._unknown] = -np.inf
        return scores

    def results(self, index: int, end_of_text: int) -> Iterator[Continuation]:
        finished = [each for group in self._groups for each in group.finished]
        finished.sort(key=lambda each: -each[0])
        for number, (score, tokens) in enumerate(finished[: self._settings.num_sequences]):
            ended = self._end is not None and tokens[-1:] == [end_of_text]
            yield Continuation(
                prompt=self.prompt,
                index=index,
                number=number,
                generator=np.random.default_rng((0, index, number)),
                tokens=tokens[:-1] if ended else tokens,
                finish_reason="end_of_text" if ended else "length",
                score=score,
            )


@dataclass(kw_only=True)
class _Group:
    """Beams that compete with each other."""

    scores: Logits
    """Sums of the log-probabilities of the running beams, best first."""
    running: list[list[int]]
    parents: list[int]
    finished: list[tuple[float, list[int]]] = field(default_factory=list)
    """Score and tokens of ended sequences, at most as many as there are beams, best first."""
    chosen: list[int] = field(default_factory=list)
    """The tokens that the beams have chosen at the newest place."""
    length: int = 0
    is_done: bool = False

    @classmethod
    def of(cls, size: int) -> _Group:
        """Return a group before its first token, in which the beams are one."""
        scores = np.full(size, _NEVER, np.float32)
        scores[0] = 0
        return cls(scores=scores, running=[[] for _ in range(size)], parents=list(range(size)))

    def advance(self, scores: Logits, end: int | None, most: int, settings: PredictConfig) -> None:
        """Take scores (beams, vocab_size) of the next tokens in.

        end: the token that ends a sequence. most: tokens that a sequence has at most.
        """
        size, vocabulary = scores.shape
        sums = (scores + self.scores[:, None]).ravel()
        best = _largest(sums, 2 * size)
        self.length += 1
        tokens = [[*self.running[place // vocabulary], int(place % vocabulary)] for place in best]
        ends = [each[-1] == end or self.length == most for each in tokens]
        full = len(self.finished) == size and settings.early_stopping is True
        divisor = float(self.length) ** settings.length_penalty
        for place, each, ended in list(zip(best, tokens, ends, strict=True))[:size]:
            if ended and not full:
                self.finished.append((float(sums[place]) / divisor, each))
        self.finished = sorted(self.finished, key=lambda each: -each[0])[:size]
        going = [number for number, ended in enumerate(ends) if not ended][:size]
        self.chosen = [tokens[number][-1] for number in going or range(size)]
        if len(going) < size or self._is_decided(float(sums[best[going[0]]]), most, settings):
            self.is_done = True
            return
        self.scores = sums[best[going]]
        self.running = [tokens[number] for number in going]
        self.parents = [int(best[number] // vocabulary) for number in going]

    def _is_decided(self, best_running: float, most: int, settings: PredictConfig) -> bool:
        """Return whether no running beam is expected to beat the worst finished one."""
        if len(self.finished) < len(self.running):
            return False
        if settings.early_stopping is True:
            return True
        longest = settings.early_stopping == "never" and settings.length_penalty > 0
        length = float(most if longest else self.length)
        return bool(best_running / length**settings.length_penalty <= self.finished[-1][0])


def _largest(values: Logits, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Places of the largest values, in descending order."""
    places = np.argpartition(-values, count)[:count] if count < values.size else np.arange(count)
    return places[np.argsort(-values[places], kind="stable")]
