"""PaddleFleetX's names of the parameters.

A pipeline (Paddle's PipelineLayer) numbers its layers instead, from the embedding on:
``name_in_whole`` translates these names. Paddle's linear weights are (in, out). ``fuse_attn_qkv``
joins query, key and value.
"""

import re

from common.systems.name_map import LINEAR, POSITIONS, Fusion, NameMap, name_map
from common.weights.names import EMBEDDING

_BLOCK = "gpt.decoder.layers.{layer}."
_SEPARATE = ("attn.q_proj", "attn.k_proj", "attn.v_proj")


def _names(attention: dict[str, str]) -> NameMap:
    return name_map(
        {
            EMBEDDING: "gpt.embeddings.word_embeddings.weight",
            POSITIONS: "gpt.embeddings.position_embeddings.weight",
            "ln_f": "gpt.decoder.norm",
            "ln_1": f"{_BLOCK}norm1",
            **attention,
            "attn.c_proj": f"{_BLOCK}self_attn.out_proj",
            "ln_2": f"{_BLOCK}norm2",
            "mlp.c_fc": f"{_BLOCK}linear1",
            "mlp.c_proj": f"{_BLOCK}linear2",
        },
        transposed=(*LINEAR, *_SEPARATE),
        fusion=Fusion.HEADS,
    )


NAME_MAPS = (
    _names({"attn.qkv_proj": f"{_BLOCK}self_attn.qkv_proj"}),
    _names({ours: f"{_BLOCK}self_{ours}" for ours in _SEPARATE}),
)


def name_in_whole(name: str) -> str:
    """Return the name in the whole model of a parameter of a part."""
    name = re.sub(r"^_layers?\.", "", name)  # wrapper of fleet.distributed_model around a model
    if embedding := re.fullmatch(r"(?:shared_layers\.embed|0(?:\.0)?)\.(.+)", name):
        return f"gpt.embeddings.{embedding[1]}"
    # an interleaved pipeline names the first layer of the chunk, and the index in it
    layer = re.fullmatch(r"(\d+)(?:\.(\d+))?\.(.+)", name)
    if layer is None:
        return name
    number, rest = int(layer[1]) + int(layer[2] or 0), layer[3]
    if rest.startswith("norm."):
        return f"gpt.decoder.{rest}"
    return f"gpt.decoder.layers.{number - 1}.{rest}"
