"""The choice of a token against transformers' logits processors and sums of probabilities."""

import numpy as np
import pytest

from common.config.schema import PredictConfig
from common.errors import RunError
from common.generation.logit_rules import LogitRules
from common.generation.sampling import choose_token, token_weights


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
    allowed = LogitRules(settings(), ends=(), unknown=1).apply(logits, [], [])
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
        ({"min_p": 0.1}, "sampling"),
        ({"temperature": 1.0}, "sampling"),
        ({"temperature": 0.0, "strategy": "sampling"}, "greedy"),
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
