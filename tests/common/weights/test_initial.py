"""Initial weights: the same on every layout, and GPT-2's distribution."""

import hashlib
import math

import numpy as np
import pytest

from common.config.schema import ModelConfig
from common.weights.names import initial_rows, parameter_shapes

MODEL = ModelConfig(
    num_layers=3, hidden_size=48, num_heads=4, seq_length=16, vocab_size=300, ffn_hidden_size=192, max_positions=16
)


@pytest.mark.parametrize("name", ["wte.weight", "h.1.attn.q_proj.weight", "h.1.mlp.c_proj.weight"])
def test_a_shard_makes_the_same_rows(name: str) -> None:
    whole = initial_rows(MODEL, 7, name, (400, 48))
    for start, stop in ((0, 400), (0, 1), (7, 7), (131, 257), (299, 301), (310, 390)):  # the last of padding alone
        np.testing.assert_array_equal(initial_rows(MODEL, 7, name, (400, 48), start, stop), whole[start:stop])
    if name == "wte.weight":  # padding is 0, and changes nothing else
        np.testing.assert_array_equal(whole[:300], initial_rows(MODEL, 7, name, (300, 48)))
        assert not whole[300:].any()


def test_distribution() -> None:
    shape = (1024, 256)
    for name, deviation in (
        ("wpe.weight", 0.02),
        ("h.0.mlp.c_fc.weight", 0.02),
        ("h.0.mlp.c_proj.weight", 0.02 / math.sqrt(6)),
    ):
        values = initial_rows(MODEL, 7, name, shape).astype(np.float64)
        standard_error = deviation / math.sqrt(values.size)
        assert abs(values.mean()) < 5 * standard_error
        assert abs(values.std() - deviation) < 5 * standard_error
        assert abs(np.corrcoef(values[:128].ravel(), values[128:256].ravel())[0, 1]) < 5 / math.sqrt(128 * 256)
    assert (initial_rows(MODEL, 7, "h.0.ln_1.weight", (48,)) == 1).all()
    assert not initial_rows(MODEL, 7, "h.0.ln_1.bias", (48,)).any()
    assert not initial_rows(MODEL, 7, "h.0.attn.c_proj.bias", (48,)).any()


def test_the_numbers_never_change() -> None:
    """Runs of different versions of this program and of numpy must begin at the same weights."""
    digest = hashlib.sha256()
    for name, shape in parameter_shapes(MODEL).items():
        digest.update(initial_rows(MODEL, 1234, name, shape).tobytes())
    assert digest.hexdigest() == "9c3ed58045791aefdcf3694194604884475f861c430275647f2e2fc7b7e07b70"
