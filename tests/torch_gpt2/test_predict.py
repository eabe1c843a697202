"""Generation against transformers.generate on the same weights."""

import numpy as np
import pytest
import torch

from common.config.schema import ModelConfig, PrecisionConfig, PredictConfig
from common.training.setup import Prompt
from tests.reference import hugging_face_model
from torch_gpt2.device import select_device
from torch_gpt2.model import GPT2
from torch_gpt2.predict import generate

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, seq_length=48, vocab_size=101, ffn_hidden_size=128, max_positions=48)


@pytest.fixture
def model() -> GPT2:
    torch.manual_seed(0)
    made = GPT2(MODEL, PrecisionConfig(), vocab_rows=128)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.normal_(made.wpe.weight, std=2.0)  # or a tied model of random weights repeats itself
    return made


def ours(model: GPT2, ids: list[int], new_tokens: int = 30, end: int = -1, **settings: object) -> list[int]:
    prompt = Prompt(text="", ids=ids, new_tokens=new_tokens)
    config = PredictConfig.model_validate(settings)
    return list(generate(model, prompt, config, end, select_device("cpu"), np.random.default_rng(0)))


@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("length", [1, 7, 18])
def test_greedy_equals_transformers_token_for_token(model: GPT2, length: int, penalty: float) -> None:
    ids = np.random.default_rng(length).integers(0, 101, length).tolist()
    reference = hugging_face_model(MODEL, dict(model.named_parameters()))
    # pad and end beyond the vocabulary's use: transformers would mask or stop at them
    expected = reference.generate(
        torch.tensor([ids]), max_new_tokens=30, do_sample=False, repetition_penalty=penalty, eos_token_id=None, pad_token_id=0,
        attention_mask=torch.ones(1, length, dtype=torch.long),
    )  # fmt: skip
    found = ours(model, ids, repetition_penalty=penalty)
    assert found == expected[0, length:].tolist()
    assert len(set(found)) > 3


def test_padded_ids_are_never_chosen(model: GPT2) -> None:
    with torch.no_grad():
        model.wte.weight[101:] = 100.0 * model.wte.weight[0]
    assert max(ours(model, [1, 2, 3], strategy="sampling", temperature=50.0)) < 101


def test_stops_at_the_end_of_text(model: GPT2) -> None:
    found = ours(model, [5, 6])
    end = found[4]
    assert ours(model, [5, 6], end=end) == found[: found.index(end)]
    assert ours(model, [5, 6], end=end, stop_at_end_of_text=False) == found
