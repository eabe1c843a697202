"""Changes that the settings make to logits before a token is chosen, by any strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from common.config.schema import PredictConfig
from common.errors import ConfigError
from common.generation.sampling import Logits
from common.structured_files import shown
from common.tokenizer import Tokenizer
from common.tokenizer.text_tokenizer import encode_words

Biases = Mapping[tuple[int, ...], float]
"""Sequence of ids -> number added to the logit of its last id where the others precede it.

Minus infinity forbids the last id.
"""


class LogitRules:
    """Changes logits, or log-probabilities in beam search, in the order of transformers.

    The order is: biases (logit_bias and bad_words), repetition penalty, no_repeat_ngram_size,
    presence and frequency penalties, min_new_tokens.
    """

    def __init__(self, settings: PredictConfig, *, ends: Sequence[int], biases: Biases | None = None) -> None:
        """settings: also those of the choice. ends: ids that end a sequence. biases: see ``sequence_biases``."""
        self.settings, self.ends = settings, ends
        biases = biases or {}
        single = {sequence[0]: value for sequence, value in biases.items() if len(sequence) == 1}
        self._ids = np.array(list(single), np.int64)
        self._values = np.array(list(single.values()), np.float32)
        self._longer = [
            (list(sequence[:-1]), sequence[-1], np.float32(value))
            for sequence, value in biases.items()
            if len(sequence) > 1
        ]
        self._least = settings.min_new_tokens if ends else 0
        self._repetition = np.float32(settings.repetition_penalty)
        self._counts = bool(settings.presence_penalty or settings.frequency_penalty)
        self._looks_back = bool(self._longer or self._repetition != 1 or settings.no_repeat_ngram_size)
        self._is_active = bool(biases) or self._looks_back or self._counts

    def apply(self, logits: Logits, prompt: Sequence[int], tokens: Sequence[int]) -> Logits:
        """Return the changed logits (vocab_size,) of the token after prompt and tokens.

        ``logits`` itself is not changed. The penalties for presence and frequency count only ``tokens``, as OpenAI
        defines them. The repetition penalty counts the prompt too (Keskar et al. 2019).
        """
        is_early = len(tokens) < self._least
        if not (self._is_active or is_early):
            return logits
        logits = logits.copy()
        logits[self._ids] += self._values
        if self._looks_back:
            seen = [*prompt, *tokens]
            for before, last, value in self._longer:
                if seen[-len(before) :] == before:
                    logits[last] += value
        if self._repetition != 1:
            found = logits[seen]
            logits[seen] = np.where(found > 0, found / self._repetition, found * self._repetition)
        if size := self.settings.no_repeat_ngram_size:
            newest = seen[len(seen) - size + 1 :]
            starts = [at for at in range(len(seen) - size + 1) if seen[at : at + size - 1] == newest]
            logits[[seen[at + size - 1] for at in starts]] = -np.inf
        if self._counts and tokens:
            ids, counts = np.unique(tokens, return_counts=True)
            presence, frequency = map(np.float32, (self.settings.presence_penalty, self.settings.frequency_penalty))
            logits[ids] -= presence + frequency * counts.astype(np.float32)
        if is_early:
            logits[[*self.ends]] = -np.inf
        return logits


def sequence_biases(settings: PredictConfig, tokenizer: Tokenizer) -> dict[tuple[int, ...], float]:
    """Return predict.logit_bias and predict.bad_words by ids. The unknown token is never chosen.

    Raises ConfigError for an id outside the vocabulary and for text without tokens or with unknown ones.
    """
    words = bad_words_ids(settings, tokenizer)
    if tokenizer.unknown_id is not None:
        words.append((tokenizer.unknown_id,))
    return logit_biases(settings, tokenizer) | dict.fromkeys(words, -np.inf)


def logit_biases(settings: PredictConfig, tokenizer: Tokenizer) -> dict[tuple[int, ...], float]:
    """Return predict.logit_bias by ids. Biases of an id and of a text with this id are added up.

    Raises ConfigError as ``sequence_biases`` does.
    """
    name = "predict.logit_bias"
    found: dict[tuple[int, ...], float] = {}
    for key, value in settings.logit_bias.items():
        is_id = key.isascii() and key.isdigit()
        ids = known_ids([int(key[:19])], name, tokenizer) if is_id else _ids_of(key, name, tokenizer)
        found[ids] = found.get(ids, 0.0) + value
    return found


def bad_words_ids(settings: PredictConfig, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return predict.bad_words by ids.

    A text that does not begin with white space is forbidden after a space, too. One that is only an end of text is left
    out, as by transformers' NoBadWordsLogitsProcessor. Raises ConfigError as ``sequence_biases`` does.
    """
    name = "predict.bad_words"
    found = []
    for word in settings.bad_words:
        text = word if isinstance(word, str) else ""
        ids = _ids_of(text, name, tokenizer) if text else known_ids(map(int, word), name, tokenizer)
        if len(ids) == 1 and ids[0] in tokenizer.ends:
            continue
        found.append(ids)
        spaced = encode_words(tokenizer, f" {text}").tolist() if text.lstrip() == text != "" else []
        if spaced and tokenizer.unknown_id not in spaced:
            found.append(tuple(spaced))
    return list(dict.fromkeys(found))


def _ids_of(text: str, name: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tuple(encode_words(tokenizer, text).tolist())
    if not ids or tokenizer.unknown_id in ids:
        reason = "holds text that the vocabulary lacks" if ids else "has no token"
        raise ConfigError(f"{name}: {shown(text)} {reason}; leave it out")
    return ids


def known_ids(ids: Iterable[int], name: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return ids. Raises ConfigError, which begins with ``name``, for one outside the vocabulary."""
    for each in (ids := tuple(ids)):
        if not 0 <= each < tokenizer.vocab_size:
            raise ConfigError(
                f"{name}: id {shown(each)} is outside the vocabulary; expected 0 to {tokenizer.vocab_size - 1}"
            )
    return tuple(map(int, ids))
