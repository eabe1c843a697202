"""Biases, bad words and penalties against transformers' processors and closed forms, and as
generation_config.json holds them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from common.config.schema import PredictConfig
from common.conversion import export
from common.errors import ConfigError
from common.generation.logit_rules import LogitRules, bad_words_ids, sequence_biases
from common.tokenizer import Framing
from tests.common.generation.test_output import config

VOCABULARY, END = 12, 11


def settings(**changes: Any) -> PredictConfig:
    return PredictConfig.model_validate(changes)


def random_words(generator: np.random.Generator) -> list[list[int]]:
    """Sequences of up to three ids, each once."""
    words = {
        tuple(generator.integers(0, VOCABULARY - 1, int(generator.integers(1, 4))).tolist())
        for _ in range(int(generator.integers(1, 6)))
    }
    return [list(word) for word in words]


def cases() -> Iterator[tuple[np.random.Generator, dict[str, Any]]]:
    generator = np.random.default_rng(0)
    for _ in range(300):
        chosen: dict[str, Any] = {}
        if generator.random() < 0.6:
            chosen["sequence_bias"] = [
                [word, float(np.float32(generator.normal() * 3))] for word in random_words(generator)
            ]
        if generator.random() < 0.6:
            chosen["bad_words_ids"] = random_words(generator)
        if generator.random() < 0.5:
            chosen["repetition_penalty"] = 1.5
        if generator.random() < 0.5:
            chosen["min_new_tokens"] = 3
        if generator.random() < 0.4:
            chosen["no_repeat_ngram_size"] = int(generator.integers(1, 4))
        yield generator, chosen


def test_300_random_cases_equal_transformers_processors_in_its_order() -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    banned = 0
    for generator, chosen in cases():
        prompt = generator.integers(0, VOCABULARY, int(generator.integers(1, 5))).tolist()
        tokens = generator.integers(0, VOCABULARY - 1, int(generator.integers(0, 6))).tolist()
        logits = (generator.normal(size=VOCABULARY) * 3).astype(np.float32)
        theirs = processors.LogitsProcessorList()
        if "sequence_bias" in chosen:
            theirs.append(processors.SequenceBiasLogitsProcessor(chosen["sequence_bias"]))
        if "repetition_penalty" in chosen:
            theirs.append(processors.RepetitionPenaltyLogitsProcessor(1.5))
        if "no_repeat_ngram_size" in chosen:
            size = chosen["no_repeat_ngram_size"]
            theirs.append(processors.NoRepeatNGramLogitsProcessor(size))
        if "bad_words_ids" in chosen:
            theirs.append(processors.NoBadWordsLogitsProcessor(chosen["bad_words_ids"], END))
        if "min_new_tokens" in chosen:
            theirs.append(processors.MinNewTokensLengthLogitsProcessor(len(prompt), 3, END))
        ids = torch.tensor([prompt + tokens])
        expected = theirs(ids, torch.from_numpy(logits.copy())[None])[0].numpy()
        shared = {"repetition_penalty", "min_new_tokens", "no_repeat_ngram_size"} & chosen.keys()
        ours = settings(**{key: chosen[key] for key in shared})
        biases = {tuple(word): value for word, value in chosen.get("sequence_bias", [])}
        biases |= {tuple(word): -np.inf for word in chosen.get("bad_words_ids", [])}
        before = logits.copy()
        found = LogitRules(ours, ends=(END,), biases=biases).apply(logits, prompt, tokens)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)  # order of sums
        assert np.array_equal(logits, before)
        banned += int(np.isinf(expected).sum())
    assert banned > 200


def test_presence_and_frequency_by_openais_formula() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, of what was generated."""
    logits = np.linspace(-2, 2, VOCABULARY).astype(np.float32)
    tokens, prompt = [3, 5, 3, 3, 0], [7, 7, 3]
    counts = np.array([tokens.count(token) for token in range(VOCABULARY)])
    for presence, frequency in ((0.6, 0.0), (0.0, 0.25), (-1.5, 2.0), (0.0, 0.0)):
        config = settings(presence_penalty=presence, frequency_penalty=frequency)
        found = LogitRules(config, ends=(END,)).apply(logits, prompt, tokens)
        expected = logits - counts * frequency - (counts > 0) * presence
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


class Words:
    """A tokenizer of words and of spaces in front of them, as byte-level ones have them."""

    framing = Framing()
    ends, unknown_id, vocab_size = (8, 7), 9, 10
    pieces = ("bad", " bad", "New", " New", " York", "x", " ", "é".encode()[:1], "<e>")

    def encode(self, text: str, allow_special: bool = False) -> Any:
        ids, at = [], 0
        while at < len(text):
            fits = [piece for piece in self.pieces if isinstance(piece, str) and piece and text.startswith(piece, at)]
            best = max(fits, key=len, default="")
            ids.append(self.pieces.index(best) if best else self.unknown_id)
            at += len(best) or 1
        return np.array(ids, np.int32)

    def token_bytes(self, token: int) -> bytes:
        piece = self.pieces[token]
        return piece if isinstance(piece, bytes) else piece.encode()


WORDS: Any = Words()


def test_words_become_ids_as_they_are_written_and_behind_a_space() -> None:
    config = settings(
        bad_words=["bad", "New York", " York", "x", [5, 6], [8], [7], [5, 8], "<e>", " <e>"],
        logit_bias={"New York": 2.0, 5: -3, "x": 1.0, "7": 4.0},
    )
    single = [(0,), (1,), (2, 4), (3, 4), (4,), (5,), (6, 5)]
    assert bad_words_ids(config, WORDS) == [*single, (5, 6), (5, 8), (6, 8)]
    inf = np.inf
    assert sequence_biases(config, WORDS) == {
        (2, 4): -inf, (5,): -inf, (7,): 4.0, (0,): -inf, (1,): -inf, (3, 4): -inf, (4,): -inf,
        (6, 5): -inf, (5, 6): -inf, (5, 8): -inf, (6, 8): -inf,
    }  # fmt: skip
    assert sequence_biases(settings(logit_bias={"5": -3, "x": 1.0}), WORDS) == {(5,): -2.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bad_words": ["bad?"]}, r"predict.bad_words: 'bad\?' holds text that the vocabulary"),
        ({"bad_words": [[1, 10]]}, "predict.bad_words: id 10 is outside .* expected 0 to 9"),
        ({"bad_words": [[-1]]}, "id -1 is outside"),
        ({"logit_bias": {10: 1.0}}, "predict.logit_bias: id 10 is outside"),
        ({"logit_bias": {"?": 1.0}}, r"predict.logit_bias: '\?' holds text"),
    ],
)
def test_ids_and_texts_outside_the_vocabulary(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sequence_biases(settings(**changes), WORDS)


def test_an_end_among_bad_words_is_chosen_as_by_transformers() -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    words = [[8], [5, 8], [3], [7]]
    logits = np.zeros(10, np.float32)
    theirs = processors.NoBadWordsLogitsProcessor(words, list(WORDS.ends))
    biases = sequence_biases(settings(bad_words=words), WORDS)
    for prompt in ([1, 2], [1, 5]):
        expected = theirs(torch.tensor([prompt]), torch.zeros(1, 10))[0].numpy()
        expected[WORDS.unknown_id] = -np.inf
        rules = LogitRules(settings(), ends=WORDS.ends, unknown=WORDS.unknown_id, biases=biases)
        assert np.array_equal(rules.apply(logits, prompt, []), expected)


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "load_given_tokenizer", lambda run: (WORDS, run))


def test_words_are_written_as_ids() -> None:
    generation = pytest.importorskip("transformers").GenerationConfig
    words: dict[str, Any] = {"bad_words": ["New York"], "logit_bias": {"bad": 2, "5": -1.5}}
    fields = export.generation_config(config(stop="\n", strategy="beam_search", num_beams=3, **words))
    assert fields["bad_words_ids"] == [[2, 4], [3, 4]]
    assert fields["sequence_bias"] == [[[0], 2.0], [[5], -1.5]]
    assert (fields["stop_strings"], fields["num_beams"]) == (["\n"], 3)
    read = generation(**fields)
    assert all(getattr(read, name) == value for name, value in fields.items())
    read.validate(strict=True)
    assert export.generation_config(config()) == {
        "do_sample": False, "num_return_sequences": 1, "repetition_penalty": 1.0,
    }  # fmt: skip


def test_content_that_it_cannot_hold_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert "presence_penalty" not in export.generation_config(config(presence_penalty=0.5))
    assert "predict.presence_penalty=0.5 has no name in" in caplog.text
    with pytest.raises(ConfigError, match=r"predict\.bad_words: '#' holds text"):
        export.generation_config(config(bad_words="#"))
