"""torch and MindSpore continue the same prompts with the same tokens, whatever their lengths and batches."""

import tests.needs_both  # noqa: F401

# isort: split
from typing import Any

import numpy as np
import pytest
import torch

import mindformers_gpt2.device
import mindformers_gpt2.predict
import torch_gpt2.device
import torch_gpt2.predict
from common.config.schema import PredictConfig
from common.generation.beam_search import search_beams
from common.generation.generate import generate
from common.generation.logit_rules import LogitRules
from common.generation.prompts import Prompt
from common.serving.engine import Engine
from tests.mixed_load import Greedy, prompts as mixed_load
from tests.tiny import tiny_config
from tests.twins import mindspore_twin, random_model

VOCABULARY, POSITIONS = 101, 24


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(seq_length=POSITIONS, positions=6.0)


@pytest.fixture(scope="module")
def decoders(model: Any) -> dict[str, Any]:
    """By backend and rows, of one set of random weights."""
    device = torch_gpt2.device.select_device("cpu")
    other = mindspore_twin(tiny_config(model__seq_length=POSITIONS, model__vocab_multiple=16), model)
    other_device = mindformers_gpt2.device.select_device("cpu")
    found = {f"torch {rows}": torch_gpt2.predict.Decoder(model, device, rows) for rows in (1, 4)}
    return found | {
        f"mindspore {rows}": mindformers_gpt2.predict.make_decoder(other, other_device, rows) for rows in (4, 1)
    }


def prompts_of(*lengths: tuple[int, int], seed: int = 3) -> list[Prompt]:
    """Prompts of so many random tokens, and so many to add."""
    random = np.random.default_rng(seed)
    return [Prompt(text="", ids=random.integers(0, VOCABULARY, n).tolist(), new_tokens=new) for n, new in lengths]


@pytest.mark.parametrize(
    ("window", "settings"),
    [
        (None, {"repetition_penalty": 1.3, "min_new_tokens": 5}),
        (None, {"strategy": "sampling", "num_sequences": 2, "top_k": 20, "top_p": 0.9}),
        pytest.param(POSITIONS, {"stop_at_end_of_text": False}, marks=pytest.mark.long),
        pytest.param(10, {"stop_at_end_of_text": False}, marks=pytest.mark.long),
    ],
)
def test_tokens_are_equal_on_both_backends_and_in_every_batch(
    decoders: dict[str, Any], window: int | None, settings: dict[str, Any]
) -> None:
    """Prompts of which one fills the last position, or texts of two lengths of the positions; when
    sampling, some stop at the end of text. float32: logits agree to 1e-5, so draws agree.
    """
    lengths = [(1, 2 * POSITIONS), (12, 40), (30, 3)] if window else [(1, 12), (5, 9), (17, 7)]
    config = PredictConfig.model_validate(settings)
    rules = LogitRules(config, ends=(7,))
    found = {
        name: [each.tokens for each in generate(one, prompts_of(*lengths), rules, seed=5, window=window)]
        for name, one in decoders.items()
    }
    if config.strategy == "greedy":
        assert [len(tokens) for tokens in found["torch 1"]] == [new for _, new in lengths]
    assert len({tuple(tokens) for tokens in found["torch 1"]}) == 3 * config.num_sequences
    assert all(tokens == found["torch 1"] for tokens in found.values()), found


@pytest.mark.parametrize("window", [None, 12])
def test_a_mixed_load_in_slots_is_what_torch_generates(
    model: Any, decoders: dict[str, Any], window: int | None
) -> None:
    given = mixed_load(VOCABULARY, None if window else POSITIONS)[:10]
    rules = LogitRules(PredictConfig(stop_at_end_of_text=False), ends=())
    alone = generate(decoders["torch 1"], given, rules, seed=0, window=window)
    device = mindformers_gpt2.device.select_device("cpu")
    twin = mindspore_twin(tiny_config(model__seq_length=POSITIONS, model__vocab_multiple=16), model)
    slots = mindformers_gpt2.predict.make_slots(twin, device, 3)
    engine, jobs = Engine(slots, queue_limit=10), [Greedy(each, window) for each in given]
    rows: dict[int, Any] = {}
    jobs[1].observe = lambda first, logits: rows.update(enumerate(logits, first))
    engine.submit(jobs)
    while engine.turn():
        pass
    assert [job.tokens for job in jobs] == [each.tokens for each in alone]
    assert (engine.counts["reused_prompt_tokens"] > 0) == (window is None)
    if window is None:
        ids = given[1].ids
        with torch.no_grad():
            expected = model.logits(model(torch.tensor([ids])))[0].numpy()
        found = np.stack([rows[place] for place in range(len(ids))])
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2])
def test_beams_are_equal_on_both_backends(decoders: dict[str, Any], groups: int) -> None:
    prompts = prompts_of((3, 8), (9, 8), seed=4)
    settings = {"num_beam_groups": groups, "diversity_rate": 0.8 * (groups - 1)}
    config = PredictConfig(strategy="beam_search", num_beams=4, num_sequences=3, **settings)
    rules = LogitRules(config, ends=(7,))
    one, other = (list(search_beams(decoders[name], prompts, rules)) for name in ("torch 4", "mindspore 4"))
    assert [each.tokens for each in one] == [each.tokens for each in other]
    assert np.allclose([each.score for each in one], [each.score for each in other], atol=1e-5)
    assert len({tuple(each.tokens) for each in one}) == 6
