"""generation_config.json: what transformers reads back, and what it has no name for."""

from typing import Any

import pytest

from common.errors import ConfigError
from common.generation import transformers_config
from common.generation.transformers_config import generation_config
from tests.common.generation.test_logit_rules import WORDS
from tests.common.generation.test_output import config


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_config, "load_given_tokenizer", lambda run: (WORDS, run))


def test_words_are_written_as_ids() -> None:
    generation = pytest.importorskip("transformers").GenerationConfig
    words: dict[str, Any] = {"bad_words": ["New York"], "logit_bias": {"bad": 2, "5": -1.5}}
    fields = generation_config(config(stop="\n", strategy="beam_search", num_beams=3, **words))
    assert fields["bad_words_ids"] == [[2, 4], [3, 4]]
    assert fields["sequence_bias"] == [[[0], 2.0], [[5], -1.5]]
    assert (fields["stop_strings"], fields["num_beams"]) == (["\n"], 3)
    read = generation(**fields)
    assert all(getattr(read, name) == value for name, value in fields.items())
    read.validate(strict=True)
    assert generation_config(config()) == {
        "do_sample": False, "num_return_sequences": 1, "repetition_penalty": 1.0,
    }  # fmt: skip


def test_content_that_it_cannot_hold_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert "presence_penalty" not in generation_config(config(presence_penalty=0.5))
    assert "predict.presence_penalty=0.5 has no name in" in caplog.text
    with pytest.raises(ConfigError, match=r"predict\.bad_words: '#' holds text"):
        generation_config(config(bad_words="#"))
