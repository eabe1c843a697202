"""Fields of config.json are taken where transformers computes the same function with them, and
refused where it does not.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from common.errors import ConfigError  # noqa: E402
from common.systems.hugging_face.weights import read_config  # noqa: E402

SIZES = {"n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 16, "vocab_size": 40}


def logits(fields: dict[str, Any]) -> Any:
    config = transformers.GPT2Config(**SIZES, **fields, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(10)  # so that the activation and the scores matter
    with torch.no_grad():
        return model(torch.arange(16)[None]).logits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reorder_and_upcast_attn", True),
        ("activation_function", "gelu_pytorch_tanh"),
        ("activation_function", "gelu_fast"),
        ("activation_function", "gelu"),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("tie_word_embeddings", False),
    ],
)
def test_a_field_is_taken_if_the_function_is_the_same(
    tmp_path: Path, name: str, value: Any
) -> None:
    same = torch.allclose(logits({name: value}), logits({}), rtol=0, atol=1e-4)
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {name: value}))
    refused = pytest.raises(ConfigError, match=f"{name}=.* it would compute otherwise")
    with nullcontext() if same else refused:
        assert read_config(tmp_path / "config.json").num_heads == 3


def test_another_model_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "gptj"}))
    with pytest.raises(ConfigError, match="model_type='gptj'; the models here are GPT-2"):
        read_config(tmp_path / "config.json")
