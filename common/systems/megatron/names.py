"""Names of the parameters in Megatron-LM and Megatron-Core. All linear weights are (out, in)."""

from common.systems.name_map import Fusion, NameMap, name_map
from common.weights.names import EMBEDDING, POSITIONS


def _megatron(encoder: str, attention: str) -> NameMap:
    block = f"language_model.{encoder}.layers.{{layer}}."
    return name_map(
        {
            EMBEDDING: "language_model.embedding.word_embeddings.weight",
            POSITIONS: "language_model.embedding.position_embeddings.weight",
            "ln_f": f"language_model.{encoder}.final_layernorm",
            "ln_1": f"{block}input_layernorm",
            "attn.qkv_proj": f"{block}{attention}.query_key_value",
            "attn.c_proj": f"{block}{attention}.dense",
            "ln_2": f"{block}post_attention_layernorm",
            "mlp.c_fc": f"{block}mlp.dense_h_to_4h",
            "mlp.c_proj": f"{block}mlp.dense_4h_to_h",
        },
        fusion=Fusion.HEADS,
        head="word_embeddings_for_head.weight",
    )


def _megatron_core(norm_1: str, norm_2: str) -> NameMap:
    """Return Megatron-Core's table of names. norm_1, norm_2: names of a block's norms, which some
    fused modules contain.
    """
    block = "decoder.layers.{layer}."
    return name_map(
        {
            EMBEDDING: "embedding.word_embeddings.weight",
            POSITIONS: "embedding.position_embeddings.weight",
            "ln_f": "decoder.final_layernorm",
            "ln_1": block + norm_1,
            # its optimizer numbers the modules in the order of their creation
            "attn.c_proj": f"{block}self_attention.linear_proj",
            "attn.qkv_proj": f"{block}self_attention.linear_qkv",
            "ln_2": block + norm_2,
            "mlp.c_fc": f"{block}mlp.linear_fc1",
            "mlp.c_proj": f"{block}mlp.linear_fc2",
        },
        fusion=Fusion.HEADS,
        head="output_layer.weight",
        ignored=r".*\._extra_state",
    )


_INSIDE = "layer_norm_weight|layer_norm_bias"

NAME_MAPS = {
    "megatron": (_megatron("encoder", "self_attention"), _megatron("transformer", "attention")),
    "megatron_core": (
        _megatron_core("input_layernorm", "pre_mlp_layernorm"),
        _megatron_core(f"self_attention.linear_qkv.{_INSIDE}", f"mlp.linear_fc1.{_INSIDE}"),
    ),
}
"""Names that are written, then others that are read, by format."""
