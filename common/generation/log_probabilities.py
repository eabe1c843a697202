"""Log-probabilities of tokens as OpenAI and vLLM report them.

They are the model's own, before biases, penalties, temperature, top-k and top-p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from common.generation.sampling import Logits, largest_ids
from common.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ScoredToken:
    """A token of a text, generated or given."""

    id: int
    logprob: float
    """Natural logarithm of its probability after what precedes it."""
    top: list[tuple[int, float]]
    """The most probable ids at its place, the best first, and their log-probabilities."""


def score_token(logits: Logits, token: int, count: int) -> ScoredToken:
    """Score a token. logits: (vocab_size,) at its place, of the vocabulary without padding.

    count: how many of the most probable tokens to name; equal ones in order of their ids.
    """
    largest = logits.max()
    log_sum = float(np.log(np.exp(logits - largest).sum(dtype=np.float64))) + float(largest)
    ids = largest_ids(logits, min(count, logits.size)) if count else np.empty(0, np.int64)
    ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
    return ScoredToken(
        id=token,
        logprob=float(logits[token]) - log_sum,
        top=[(int(each), float(logits[each]) - log_sum) for each in ids],
    )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return what a token adds to a text; ``bytes:\\xe2\\x80`` for a part of a character."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def as_record(scored: ScoredToken, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a scored token as a JSON object."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"id": token, "token": token_text(tokenizer, token), "logprob": logprob}

    top = [entry(*each) for each in scored.top]
    return entry(scored.id, scored.logprob) | ({"top": top} if top else {})
