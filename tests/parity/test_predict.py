"""torch and MindSpore continue the same prompts with the same tokens, whatever their lengths and
batches.
"""

import os
from functools import partial
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("GLOG_v", "3")
ms = pytest.importorskip(
    "mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'"
)
torch = pytest.importorskip("torch")

import mindformers_gpt2.device  # noqa: E402
import mindformers_gpt2.model  # noqa: E402
import mindformers_gpt2.predict  # noqa: E402
import torch_gpt2.device  # noqa: E402
import torch_gpt2.model  # noqa: E402
import torch_gpt2.predict  # noqa: E402
from common.config.schema import PredictConfig  # noqa: E402
from common.generation.beam_search import search_beams  # noqa: E402
from common.generation.generate import generate  # noqa: E402
from common.generation.prompts import Prompt  # noqa: E402
from common.generation.stop_strings import GrowingText  # noqa: E402
from common.tokenizer.streams import ByteStream  # noqa: E402
from tests.tiny import tiny_config  # noqa: E402
from tests.twins import mindspore_twin  # noqa: E402

VOCABULARY, POSITIONS = 101, 24


@pytest.fixture(scope="module")
def decoders() -> dict[str, Any]:
    """By backend and rows, of one set of random weights."""
    config = tiny_config(model__seq_length=POSITIONS, model__num_heads=4)
    device = torch_gpt2.device.select_device("cpu")
    one = torch_gpt2.model.build_model(config, device)
    torch.manual_seed(0)
    for parameter in one.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    # or a tied model of random weights repeats itself
    torch.nn.init.normal_(one.wpe.weight, std=2.0)
    other, other_device = mindspore_twin(config, one), mindformers_gpt2.device.select_device("cpu")
    return {f"torch {rows}": torch_gpt2.predict.Decoder(one, device, rows) for rows in (1, 4)} | {
        "mindspore 4": mindformers_gpt2.predict.Decoder(other, other_device, 4),
        "mindspore 1": mindformers_gpt2.predict.Decoder(other, other_device, 1),
    }


@pytest.mark.parametrize("window", [POSITIONS, 10])
def test_a_sliding_window_gives_equal_tokens(decoders: dict[str, Any], window: int) -> None:
    """Two lengths of the positions, from prompts below and above the window; one row ends early."""
    random = np.random.default_rng(4)
    prompts = [
        Prompt(text="", ids=random.integers(0, VOCABULARY, n).tolist(), new_tokens=new)
        for n, new in ((1, 2 * POSITIONS), (12, 40), (30, 3))
    ]
    found = {
        name: [
            each.tokens
            for each in generate(one, prompts, PredictConfig(), seed=5, ends=(), window=window)
        ]
        for name, one in decoders.items()
    }
    assert [len(tokens) for tokens in found["torch 1"]] == [2 * POSITIONS, 40, 3]
    assert all(tokens == found["torch 1"] for tokens in found.values()), found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3, "min_new_tokens": 5},
        {"strategy": "sampling", "num_sequences": 2, "top_k": 20, "top_p": 0.9},
        {"strategy": "sampling", "temperature": 0.7},
    ],
)
def test_tokens_are_equal_on_both_backends_and_in_every_batch(
    decoders: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Prompts of 1, 5 and 17 tokens, one of which fills the last position; when sampling, some stop
    at the end of text.

    float32: logits agree to 1e-5, so draws agree.
    """
    random = np.random.default_rng(3)
    prompts = [
        Prompt(text="", ids=random.integers(0, VOCABULARY, n).tolist(), new_tokens=new)
        for n, new in ((1, 12), (5, 9), (17, 7))
    ]
    config = PredictConfig.model_validate(settings)
    found = {
        name: [each.tokens for each in generate(one, prompts, config, seed=5, ends=(7,))]
        for name, one in decoders.items()
    }
    if config.strategy == "greedy":
        assert [len(tokens) for tokens in found["torch 1"]] == [12, 9, 7]
    assert len({tuple(tokens) for tokens in found["torch 1"]}) == 3 * config.num_sequences
    assert all(tokens == found["torch 1"] for tokens in found.values()), found


@pytest.mark.parametrize("groups", [1, 2])
def test_beams_are_equal_on_both_backends(decoders: dict[str, Any], groups: int) -> None:
    random = np.random.default_rng(4)
    prompts = [
        Prompt(text="", ids=random.integers(0, VOCABULARY, n).tolist(), new_tokens=8)
        for n in (3, 9)
    ]
    settings = {"num_beam_groups": groups, "diversity_rate": 0.8 * (groups - 1)}
    config = PredictConfig(strategy="beam_search", num_beams=4, num_sequences=3, **settings)
    found = {
        name: list(search_beams(decoders[name], prompts, config, ends=(7,)))
        for name in ("torch 4", "mindspore 4")
    }
    one, other = found.values()
    assert [each.tokens for each in one] == [each.tokens for each in other]
    assert np.allclose([each.score for each in one], [each.score for each in other], atol=1e-5)
    assert len({tuple(each.tokens) for each in one}) == 6


@pytest.mark.parametrize("strategy", ["sampling", "beam_search"])
def test_rules_stop_strings_and_log_probabilities_are_equal(
    decoders: dict[str, Any], strategy: str
) -> None:
    """Log-probabilities within 1e-4: logits to 30 agree to 1e-5."""
    prompts = [Prompt(text="", ids=ids, new_tokens=15) for ids in ([3, 1, 4], [15])]
    changes = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    config = PredictConfig.model_validate(
        {"strategy": strategy, "num_sequences": 2, "stop": [*"ABCDEFGH1234"], "logprobs": 2}
        | changes
    )
    words: dict[str, Any] = {
        "ends": (7,),
        "biases": {(5,): 3.0, (9, 5): -4.0, (11,): -np.inf, (5, 12): -np.inf},
        "read": lambda prompt: GrowingText(ByteStream(bytes), config.stop),
    }
    search = {"sampling": partial(generate, seed=5), "beam_search": search_beams}[strategy]
    found = [
        list(search(decoders[name], prompts, config, **words))
        for name in ("torch 4", "mindspore 4")
    ]
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens and one.finish_reason == other.finish_reason
        pairs = zip(one.scored, other.scored, strict=True)
        assert all(abs(left.logprob - right.logprob) < 1e-4 for left, right in pairs)
        assert len(one.scored) == len(one.tokens) and len(one.scored[0].top) == 2
    assert any(each.finish_reason == "stop_string" for each in found[0])
