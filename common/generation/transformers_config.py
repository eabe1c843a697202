"""The settings of predict in the words of transformers' generation_config.json."""

from __future__ import annotations

from typing import Any

from common.generation.logit_rules import bad_words_ids, logit_biases
from common.log import LOG
from common.parallel.run import Run
from common.training.data import load_given_tokenizer


def generation_config(config: Run) -> dict[str, Any]:
    """Return all fields but the ids of special tokens. Warns of settings without a name there.

    Raises ConfigError and TokenizerError where texts of bad_words or logit_bias have no ids.
    """
    settings = config.predict
    fields: dict[str, Any] = {
        "do_sample": settings.method == "sampling",
        "max_new_tokens": settings.max_new_tokens,
        "min_new_tokens": settings.min_new_tokens or None,
        "num_return_sequences": settings.num_sequences,
        "repetition_penalty": settings.repetition_penalty,
        "no_repeat_ngram_size": settings.no_repeat_ngram_size or None,
        "stop_strings": settings.stop or None,
    }
    if settings.bad_words or settings.logit_bias:
        tokenizer, _ = load_given_tokenizer(config)
        words, biases = bad_words_ids(settings, tokenizer), logit_biases(settings, tokenizer)
        fields |= {
            "bad_words_ids": [list(ids) for ids in words] or None,
            "sequence_bias": [[list(ids), value] for ids, value in biases.items()] or None,
        }
    if settings.method == "sampling":
        fields |= {
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": settings.min_p or None,
        }
    if settings.method == "beam_search":
        fields |= {
            "num_beams": settings.num_beams,
            "length_penalty": settings.length_penalty,
            "early_stopping": settings.early_stopping,
        }
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(settings, name):
            LOG.warning(f"predict.{name}={value} has no name in generation_config.json; left out")
    return {key: value for key, value in fields.items() if value is not None}
