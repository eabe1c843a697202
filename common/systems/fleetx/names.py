"""The names that PaddleFleetX has for the parameters.

Paddle's linear weights are (in, out). ``fuse_attn_qkv`` joins query, key and value.
"""

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
