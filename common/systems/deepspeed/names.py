"""The names that Megatron-DeepSpeed has for the parameters, whole and in a pipeline."""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.systems.name_map import Fusion, name_map
from common.weights.names import EMBEDDING, POSITIONS

_BLOCK = "layers.{layer}."
NAME_MAP = name_map(
    {
        EMBEDDING: "word_embeddings.weight",
        POSITIONS: "position_embeddings.weight",
        "ln_f": "final_layernorm",
        "ln_1": f"{_BLOCK}input_layernorm",
        "attn.qkv_proj": f"{_BLOCK}self_attention.query_key_value",
        "attn.c_proj": f"{_BLOCK}self_attention.dense",
        "ln_2": f"{_BLOCK}post_attention_layernorm",
        "mlp.c_fc": f"{_BLOCK}mlp.dense_h_to_4h",
        "mlp.c_proj": f"{_BLOCK}mlp.dense_4h_to_h",
    },
    fusion=Fusion.HEADS,
)
"""Names without the modules that hold the parameter, as ``short_name`` makes them."""

_RULES = (
    (r"^(module\.|model\.)+", ""),
    (r"^(language_model\.embedding|tied_modules\.embed)\.", ""),
    (r"^language_model\.(encoder|transformer)\.", ""),
    (r"\.attention\.", ".self_attention."),
)
"""Prefixes of a name in GPTModel and GPTModelPipe, and an older word for the attention."""
FIRST_OF_BLOCK = "input_layernorm.weight"
"""Parameter of every layer that is a block, and of no other layer of a pipeline."""


def short_name(name: str, blocks: Sequence[int] = ()) -> str:
    """Return a name in the form of NAME_MAP.

    blocks: the numbers of the pipeline's layers that are blocks, in ascending order.
    """
    for pattern, shorter in _RULES:
        name = re.sub(pattern, shorter, name)
    layer = re.fullmatch(r"(\d+)\.(.+)", name)
    if not layer:
        return name
    number, rest = int(layer[1]), layer[2]
    if number in blocks:
        return f"layers.{blocks.index(number)}.{rest}"
    return f"final_layernorm.{rest}" if rest in ("weight", "bias") else rest
