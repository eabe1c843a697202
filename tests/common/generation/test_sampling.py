"""The choice of a token against transformers' logits processors and sums of probabilities. Biases, bad
words and penalties against them and closed forms, and as generation_config.json holds them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.config.schema import PredictConfig
from common.conversion import export
from common.conversion.export import generation_config
from common.errors import ConfigError, RunError
from common.generation.logit_rules import LogitRules, bad_words_ids, sequence_biases
from common.generation.sampling import choose_token, token_weights
from common.tokenizer import Framing
from tests.common.generation.test_output import config


def settings(**changes: object) -> PredictConfig:
    return PredictConfig.model_validate({"strategy": "sampling", **changes})


def transformers_probabilities(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> np.ndarray:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    for kind, value, is_off in (
        (processors.TemperatureLogitsWarper, temperature, temperature == 1),
        (processors.TopKLogitsWarper, top_k, top_k == 0),
        (processors.TopPLogitsWarper, top_p, top_p == 1),
        (processors.MinPLogitsWarper, min_p, min_p == 0),
    ):
        scores = scores if is_off else kind(value)(None, scores)
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize("vocabulary", [50, 50257])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0), (0.7, 0, 1.0, 0), (1.0, 5, 1.0, 0), (1.0, 0, 0.8, 0), (1.5, 10, 0.6, 0),
     (1.0, 1000, 1.0, 0), (1.0, 1, 1.0, 0), (0.2, 0, 1e-6, 0),
     (1.0, 0, 1.0, 0.05), (1.5, 20, 0.9, 0.1), (1.0, 0, 1.0, 1.0)],
)  # fmt: skip
def test_probabilities_equal_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, vocabulary: int
) -> None:
    logits = (np.random.default_rng(0).normal(size=vocabulary) * 3).astype(np.float32)
    expected = transformers_probabilities(logits, temperature, top_k, top_p, min_p)
    words = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    ids, weights = token_weights(logits, settings(**words))
    assert np.all(np.diff(ids) > 0)
    np.testing.assert_allclose(weights / weights.sum(), expected[ids], rtol=1e-9, atol=0)
    assert np.delete(expected, ids).max(initial=0.0) == 0.0


def test_ties_at_the_last_of_top_k_are_kept_and_a_forbidden_token_has_no_probability() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, -np.inf], np.float32)
    expected = transformers_probabilities(logits, 1.0, 2, 1.0)
    assert token_weights(logits, settings(top_k=2))[0].tolist() == [1, 2, 3]
    assert np.flatnonzero(expected).tolist() == [1, 2, 3]
    assert 4 not in token_weights(logits, settings(top_p=0.999))[0]
    allowed = LogitRules(settings(), ends=(), biases={(1,): -np.inf}).apply(logits, [], [])
    hot = settings(temperature=9.0)
    draws = {choose_token(allowed, hot, np.random.default_rng(seed)) for seed in range(200)}
    assert draws == {0, 2, 3}


class Given:
    """A generator whose numbers are given."""

    def __init__(self, *numbers: float) -> None:
        self.random = iter(numbers).__next__


def test_a_draw_is_the_place_where_the_sum_of_probabilities_reaches_the_number() -> None:
    """Beside a sum of one probability after another, for numbers over the whole vocabulary and at
    its ends, between tokens without probability.
    """
    logits = (np.random.default_rng(4).normal(size=50257) * 3).astype(np.float32)
    logits[:40] = logits[1000:1500] = logits[50200:] = -np.inf
    ladder = np.exp(logits.astype(np.float64)).cumsum()
    numbers = [0.0, *np.random.default_rng(5).random(300), 1 - 2**-53]
    expected = [int(ladder.searchsorted(part * ladder[-1], side="right")) for part in numbers]
    found = [choose_token(logits, settings(temperature=1.0), Given(part)) for part in numbers]  # type: ignore[arg-type]
    assert found[0] == 40 and found[-1] <= 50199
    assert found[:-1] == expected[:-1]


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({}, "greedy"),
        ({"repetition_penalty": 1.2, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, "greedy"),
        ({"top_k": 40}, "sampling"),
        ({"top_p": 0.9}, "sampling"),
        ({"min_p": 0.1}, "sampling"),
        ({"temperature": 1.0}, "sampling"),
        ({"temperature": 0.0, "strategy": "sampling"}, "greedy"),
        ({"temperature": 1e-9, "top_k": 40}, "greedy"),
        ({"top_k": 40, "strategy": "greedy"}, "greedy"),
        ({"top_k": 40, "strategy": "beam_search"}, "beam_search"),
    ],
)
def test_settings_of_sampling_choose_it(given: dict[str, object], method: str) -> None:
    """A configuration that is written and read again chooses the same."""
    found = PredictConfig.model_validate(given)
    assert found.method == method
    assert PredictConfig.model_validate(found.model_dump()).method == method
    logits = np.zeros(1000, np.float32)
    logits[7] = 0.1
    drawn = {choose_token(logits, found, np.random.default_rng(seed)) for seed in range(20)}
    assert method == "beam_search" or (drawn == {7}) == (method == "greedy")


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("strategy", ["greedy", "sampling"])
def test_logits_that_are_not_finite_are_refused(broken: float, strategy: str) -> None:
    logits = np.array([0.0, broken, 1.0], np.float32)
    with pytest.raises(RunError, match="logits hold"):
        choose_token(logits, settings(strategy=strategy), np.random.default_rng(0))


VOCABULARY, END = 12, 11


def words(draw: np.random.Generator) -> list[list[int]]:
    """Return sequences of up to three ids, each once."""
    drawn = (draw.integers(0, VOCABULARY - 1, int(draw.integers(1, 4))) for _ in range(int(draw.integers(1, 6))))
    return [list(word) for word in {tuple(each.tolist()) for each in drawn}]


CHANCES: dict[str, tuple[float, Callable[[np.random.Generator], Any]]] = {
    "sequence_bias": (0.6, lambda draw: [[word, float(np.float32(draw.normal() * 3))] for word in words(draw)]),
    "bad_words_ids": (0.6, words),
    "repetition_penalty": (0.5, lambda draw: 1.5),
    "min_new_tokens": (0.5, lambda draw: 3),
    "no_repeat_ngram_size": (0.4, lambda draw: int(draw.integers(1, 4))),
}


def test_300_random_cases_equal_transformers_processors_in_its_order() -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    banned, generator = 0, np.random.default_rng(0)
    for _ in range(300):
        chosen = {name: make(generator) for name, (chance, make) in CHANCES.items() if generator.random() < chance}
        prompt = generator.integers(0, VOCABULARY, int(generator.integers(1, 5))).tolist()
        tokens = generator.integers(0, VOCABULARY - 1, int(generator.integers(0, 6))).tolist()
        logits = (generator.normal(size=VOCABULARY) * 3).astype(np.float32)
        theirs = processors.LogitsProcessorList()
        if "sequence_bias" in chosen:
            theirs.append(processors.SequenceBiasLogitsProcessor(chosen["sequence_bias"]))
        if "repetition_penalty" in chosen:
            theirs.append(processors.RepetitionPenaltyLogitsProcessor(1.5))
        if "no_repeat_ngram_size" in chosen:
            theirs.append(processors.NoRepeatNGramLogitsProcessor(chosen["no_repeat_ngram_size"]))
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

    def decode_bytes(self, ids: list[int]) -> bytes:
        piece = self.pieces[ids[0]]
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
        (6, 5): -inf, (5, 6): -inf, (5, 8): -inf, (6, 8): -inf, (9,): -inf,
    }  # fmt: skip
    assert sequence_biases(settings(logit_bias={"5": -3, "x": 1.0, "9": 4}), WORDS) == {(5,): -2.0, (9,): -inf}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bad_words": ["bad?"]}, r"predict.bad_words: 'bad\?' holds text that the vocabulary"),
        ({"bad_words": [[1, 10]]}, "predict.bad_words: id 10 is outside .* expected 0 to 9"),
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
        rules = LogitRules(settings(), ends=WORDS.ends, biases=biases)
        assert np.array_equal(rules.apply(logits, prompt, []), expected)


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "load_given_tokenizer", lambda run: (WORDS, run))


def test_words_are_written_as_ids() -> None:
    words: dict[str, Any] = {"bad_words": ["New York"], "logit_bias": {"bad": 2, "5": -1.5}}
    fields = generation_config(config(stop="\n", strategy="beam_search", num_beams=3, **words))
    assert fields["bad_words_ids"] == [[2, 4], [3, 4]]
    assert fields["sequence_bias"] == [[[0], 2.0], [[5], -1.5]]
    assert (fields["stop_strings"], fields["num_beams"]) == (["\n"], 3)
    read = pytest.importorskip("transformers").GenerationConfig(**fields)
    assert all(getattr(read, name) == value for name, value in fields.items())
    read.validate(strict=True)
    assert generation_config(config()) == {"do_sample": False, "num_return_sequences": 1, "repetition_penalty": 1.0}
    assert {"top_k": 5, "min_p": 0.1}.items() <= generation_config(config(top_k=5, top_p=0.9, min_p=0.1)).items()


def test_content_that_it_cannot_hold_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert "presence_penalty" not in generation_config(config(presence_penalty=0.5))
    assert "predict.presence_penalty=0.5 has no name in" in caplog.text
    with pytest.raises(ConfigError, match=r"predict\.bad_words: '#' holds text"):
        generation_config(config(bad_words="#"))
