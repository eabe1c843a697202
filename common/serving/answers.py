"""Completions in the form of OpenAI's objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from common.generation.prompts import Prompt
from common.generation.sampling import ScoredToken, token_text
from common.serving.completion_task import Piece
from common.tokenizer import Tokenizer


class Choice:
    """One continuation of a completion, built from pieces as they arrive."""

    def __init__(
        self,
        number: int,
        tokenizer: Tokenizer,
        prompt: Prompt,
        *,
        echoes: bool,
        has_logprobs: bool,
    ) -> None:
        """echoes: whether the text begins with the prompt."""
        self.finish_reason: str | None = None
        self.tokens = 0
        self._number, self._tokenizer = number, tokenizer
        self._echo, self._has_logprobs = prompt.text * echoes, has_logprobs
        self._stream = tokenizer.stream(() if echoes else prompt.ids)
        self._offset = 0

    def part(self, piece: Piece) -> dict[str, Any]:
        """Return the object for one piece."""
        self.finish_reason = piece.finish_reason
        self.tokens += piece.tokens
        return self._object(self._echo * piece.is_first + piece.text, piece.scored)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the object for all pieces."""
        self.finish_reason = pieces[-1].finish_reason
        self.tokens = sum(piece.tokens for piece in pieces)
        return self._object(
            self._echo + "".join(piece.text for piece in pieces),
            [each for piece in pieces for each in piece.scored],
        )

    def _object(self, text: str, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        return {
            "index": self._number,
            "text": text,
            "logprobs": self._logprobs(scored) if self._has_logprobs else None,
            "finish_reason": self.finish_reason,
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        """Return four lists with an entry for each token.

        The first token of a text has no probability. The chosen token is always among the top ones.
        text_offset: place in the text of the first character that the token is a part of.
        """
        words = [token_text(self._tokenizer, each.id) for each in scored]
        offsets = []
        for each in scored:
            offsets.append(self._offset)
            self._offset += len(self._stream.push([each.id]))
        top: list[dict[str, float] | None] = []
        for word, each in zip(words, scored, strict=True):
            found: dict[str, float] = {}
            for token, value in each.top:  # the first of tokens with equal text
                found.setdefault(token_text(self._tokenizer, token), value)
            found.setdefault(word, each.logprob)
            top.append(None if math.isnan(each.logprob) else found)
        values = [None if math.isnan(each.logprob) else each.logprob for each in scored]
        return {
            "tokens": words,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": offsets,
        }


def usage(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, int]:
    completion_tokens = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
