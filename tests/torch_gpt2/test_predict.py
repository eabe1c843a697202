"""Generation against transformers.generate on the same weights, one prompt at a time and in batches
of different lengths.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import torch

from common.config.schema import PrecisionConfig, PredictConfig
from common.generation.generate import generate
from common.generation.prompts import Prompt
from tests.reference import hugging_face_model
from tests.twins import random_model
from torch_gpt2.device import select_device
from torch_gpt2.model import GPT2
from torch_gpt2.predict import Decoder

LENGTHS = (18, 1, 7, 12)


@pytest.fixture
def model() -> GPT2:
    return random_model()


def prompts() -> list[list[int]]:
    """Each holds token 50, by which transformers' batches are padded: a penalty for repetition then
    is the same without them.
    """
    return [
        [50, *np.random.default_rng(length).integers(0, 101, length - 1).tolist()]
        for length in LENGTHS
    ]


def ours(
    model: GPT2,
    rows: list[list[int]],
    batch: int = 1,
    new_tokens: int = 30,
    ends: Sequence[int] = (),
    window: int | None = None,
    **settings: Any,
) -> list[list[int]]:
    given = [Prompt(text="", ids=ids, new_tokens=new_tokens) for ids in rows]
    decoder = Decoder(model, select_device("cpu"), batch)
    config = PredictConfig.model_validate(settings)
    found = generate(decoder, given, config, seed=0, ends=ends, window=window)
    return [each.tokens for each in found]


def theirs(model: GPT2, rows: list[list[int]], **settings: Any) -> list[list[int]]:
    """transformers' greedy tokens of a left-padded batch; what follows the end is cut."""
    longest, ends = max(map(len, rows)), settings.get("eos_token_id") or []
    ids = torch.tensor([[50] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    reference = hugging_face_model(model.config, dict(model.named_parameters()))
    usual = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 50}
    settings = usual | settings
    found = reference.generate(ids, attention_mask=mask, **settings)[:, longest:].tolist()
    return [list(takewhile(lambda token: token not in ends, row)) for row in found]


@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_greedy_equals_transformers_token_for_token(
    model: GPT2, batch: int, penalty: float
) -> None:
    """Batches of one, of three and one, and of all four."""
    expected = theirs(model, prompts(), repetition_penalty=penalty)
    assert expected == [
        row for ids in prompts() for row in theirs(model, [ids], repetition_penalty=penalty)
    ]
    assert ours(model, prompts(), batch, repetition_penalty=penalty) == expected
    assert min(len(set(row)) for row in expected) > 3


@pytest.mark.parametrize(("batch", "window"), [(1, 48), (3, 16), (8, 16), (8, 2)])
def test_a_sliding_window_equals_a_loop_over_transformers(
    model: GPT2, batch: int, window: int
) -> None:
    """Each token follows the last window - 1 ones, as GPT2-Chinese's generate.py takes them;
    prompts of 18, 1, 7 and 12 tokens, one of which is above 16 from the start.
    """
    reference = hugging_face_model(model.config, dict(model.named_parameters()))
    expected = []
    for prompt in prompts():
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(60):
                context = torch.tensor([ids[-(window - 1) :]])
                ids.append(int(reference(context).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert ours(model, prompts(), batch, new_tokens=60, window=window) == expected
    end = expected[1][25]
    cut = [row[: row.index(end)] if end in row else row for row in expected]
    assert ours(model, prompts(), batch, new_tokens=60, window=window, ends=[end]) == cut
    assert len({len(row) for row in cut}) > 1 or window == 2


@pytest.mark.parametrize("least", [0, 3, 20])
def test_the_end_of_text_equals_transformers(model: GPT2, least: int) -> None:
    """Rows that end early do not change the others; the end does not come before min_new_tokens."""
    rows = ours(model, prompts())
    ends = [rows[0][5], rows[1][9]]
    expected = theirs(
        model, prompts(), eos_token_id=ends, **({"min_new_tokens": least} if least else {})
    )
    for batch in (1, 8):
        assert ours(model, prompts(), batch, ends=ends, min_new_tokens=least) == expected
    assert len({len(row) for row in expected}) > 1 and all(len(row) >= least for row in expected)
    assert {
        len(row) for row in ours(model, prompts(), 8, ends=ends, stop_at_end_of_text=False)
    } == {30}


def test_a_sequence_depends_only_on_seed_prompt_and_number(model: GPT2) -> None:
    """float32. Other batches, other neighbours of other lengths, more sequences: the same
    tokens.
    """
    words = {"strategy": "sampling", "temperature": 1.5, "top_p": 0.95}
    expected = ours(model, prompts(), 1, num_sequences=3, **words)
    assert len({tuple(row) for row in expected}) == 12
    for batch in (2, 5, 8, 64):
        assert ours(model, prompts(), batch, num_sequences=3, **words) == expected
    assert ours(model, prompts(), 8, **words) == expected[::3]
    assert ours(model, prompts()[:2], 8, **words) == expected[:6:3]


def test_the_last_position_is_used(model: GPT2) -> None:
    """A full row continues with its neighbours, whose tokens do not change."""
    ids = np.random.default_rng(0).integers(0, 101, 47).tolist()
    rows = [Prompt(text="", ids=ids, new_tokens=1), Prompt(text="", ids=[3], new_tokens=47)]
    found = list(
        generate(Decoder(model, select_device("cpu"), 2), rows, PredictConfig(), seed=0, ends=())
    )
    assert [each.tokens for each in found] == [
        theirs(model, [ids], max_new_tokens=1)[0],
        theirs(model, [[3]], max_new_tokens=47)[0],
    ]


@pytest.mark.parametrize(("types", "tolerance"), [("bfloat16", 2e-2), ("float16", 2e-3)])
@pytest.mark.parametrize("batch", [1, 4])
def test_narrow_types_give_the_model_s_own_logits(types: str, tolerance: float, batch: int) -> None:
    """Against the model's forward over the whole text in the same type. Both round everywhere: some
    units of the last place.
    """
    softmax = "float16" if types == "float16" else "float32"
    precision = PrecisionConfig.model_validate({"compute": types, "softmax": softmax})
    model = random_model(precision=precision)
    decoder, text = Decoder(model, select_device("cpu"), batch), prompts()[0]
    with torch.no_grad():
        expected = model.logits(model.eval()(torch.tensor([text]))).numpy()[0]
    rows = [text[: 5 + row] for row in range(batch)]
    found = [decoder.start(rows, 10)] + [
        decoder.step([text[len(ids) + at] for ids in rows]) for at in range(9)
    ]
    for at, logits in enumerate(found):
        wanted = np.stack([expected[len(ids) - 1 + at] for ids in rows])
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=tolerance * np.abs(expected).max())


def test_padded_ids_are_never_chosen(model: GPT2) -> None:
    with torch.no_grad():
        model.wte.weight[101:] = 100.0 * model.wte.weight[0]
    assert max(ours(model, [[1, 2, 3]], strategy="sampling", temperature=50.0)[0]) < 101


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cpu_without_onednn_generates_the_same(
    model: GPT2, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    expected = theirs(model, prompts())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert ours(model, prompts(), batch) == expected
    narrow = random_model(precision=PrecisionConfig(compute="bfloat16"))
    assert len(ours(narrow, [[1, 2, 3]], new_tokens=4)[0]) == 4
