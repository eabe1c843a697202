"""Sequences that come and go in the rows of one cache, against ``generate``, which has them one at
a time.
"""

from typing import Any

import numpy as np
import pytest
import torch

from common.config.schema import PrecisionConfig, PredictConfig
from common.generation.generate import generate
from common.generation.sampling import Logits
from tests.mixed_load import prompts, run
from tests.twins import random_model
from torch_gpt2.device import select_device
from torch_gpt2.predict import Decoder, Slots

POSITIONS = 48


@pytest.mark.parametrize("window", [None, POSITIONS, 20])
def test_a_mixed_load_equals_single_requests(window: int | None) -> None:
    """24 sequences in four slots, float32."""
    model = random_model()
    given, device = prompts(101, None if window else POSITIONS), select_device("cpu")
    settings = PredictConfig(stop_at_end_of_text=False)
    alone = generate(Decoder(model, device, 1), given, settings, seed=0, ends=(), window=window)
    found, engine = run(Slots(model, device, 4), given, window)
    assert found == [each.tokens for each in alone]
    assert (engine.counts.reused_tokens > 100) == (window != 20)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("bfloat16", 0.5)])
def test_logits_after_every_token_of_a_prompt_are_the_models(dtype: Any, tolerance: float) -> None:
    """With nothing taken over, and with the first 20 of 40 tokens. Sums are in another order: one
    step of bfloat16 at the largest logits, of size 60, is 0.25.
    """
    model = random_model(precision=PrecisionConfig(compute=dtype, softmax=dtype))
    device = select_device("cpu")
    slots = Slots(model, device, 3)
    ids = np.random.default_rng(1).integers(0, 101, 40).tolist()
    with torch.no_grad():
        expected = model.logits(model(torch.tensor([ids])))[0].numpy()
    for slot, reuse in ((1, 0), (2, 20)):
        rows: dict[int, Logits] = {}
        slots.copy(1, 2, reuse)

        def observe(first: int, logits: Logits, rows: dict[int, Logits] = rows) -> None:
            rows.update({first + n: row for n, row in enumerate(logits)})

        last = slots.admit(slot, ids, reuse, observe)
        assert sorted(rows) == list(range(reuse, 40))
        np.testing.assert_allclose(np.stack(list(rows.values())), expected[reuse:], atol=tolerance)
        assert np.abs(expected).max() < 64
        np.testing.assert_array_equal(last, rows[39])
