"""The choice of a token against transformers' logits processors and the exact distribution."""

import numpy as np
import pytest

from common.config.schema import PredictConfig
from common.generation.sampling import choose_token, token_probabilities


def settings(**changes: object) -> PredictConfig:
    return PredictConfig.model_validate({"strategy": "sampling", **changes})


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (1.5, 10, 0.6), (1.0, 1000, 1.0), (1.0, 1, 1.0)],
)
def test_probabilities_equal_transformers(temperature: float, top_k: int, top_p: float) -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    scores = np.random.default_rng(0).normal(size=50) * 3
    expected = torch.from_numpy(scores)[None]
    expected = processors.TemperatureLogitsWarper(temperature)(None, expected) if temperature != 1.0 else expected
    expected = processors.TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = processors.TopPLogitsWarper(top_p)(None, expected) if top_p < 1.0 else expected
    ours = token_probabilities(scores, settings(temperature=temperature, top_k=top_k, top_p=top_p))
    np.testing.assert_allclose(ours, expected.softmax(-1)[0].numpy(), rtol=1e-12, atol=0)


def test_repetition_penalty_equals_transformers() -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    generator = np.random.default_rng(1)
    for _ in range(20):
        logits = generator.normal(size=30).astype(np.float32)
        seen = generator.integers(0, 30, size=8)
        expected = processors.RepetitionPenaltyLogitsProcessor(1.7)(torch.from_numpy(seen)[None], torch.from_numpy(logits.copy())[None])
        chosen = choose_token(logits, seen, settings(strategy="greedy", repetition_penalty=1.7), generator)
        assert chosen == int(expected.argmax())


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    generator = np.random.default_rng(0)
    draws = [choose_token(logits, np.array([0]), settings(), generator) for _ in range(20_000)]
    np.testing.assert_allclose(np.bincount(draws) / 20_000, [0.5, 0.3, 0.2], atol=5 * np.sqrt(0.25 / 20_000))
