"""MindFormers' names of the parameters, since release 0.6 and before.

Query, key and value are (out, in), all other linear weights (in, out).
"""

from common.systems.name_map import LINEAR, NameMap, name_map
from common.weights.names import EMBEDDING, POSITIONS


def _names(block: str, norm: str) -> NameMap:
    return name_map(
        {
            EMBEDDING: "backbone.embedding.word_embedding.embedding_table",
            POSITIONS: "backbone.embedding.position_embedding.embedding_table",
            "ln_f": f"{norm}.gamma|beta",
            "ln_1": f"{block}layernorm1.gamma|beta",
            "attn.q_proj": f"{block}attention.dense1",
            "attn.k_proj": f"{block}attention.dense2",
            "attn.v_proj": f"{block}attention.dense3",
            "attn.c_proj": f"{block}attention.projection",
            "ln_2": f"{block}layernorm2.gamma|beta",
            "mlp.c_fc": f"{block}output.mapping",
            "mlp.c_proj": f"{block}output.projection",
        },
        transposed=LINEAR,
        ignored=r"backbone\.blocks\.\d+\.attention\.(masked_)?beta",
    )


NAME_MAPS = {
    "mindformers": (_names("backbone.blocks.{layer}.", "backbone.layernorm"),),
    "mindformers_r0.3": (
        _names("gpt2.backbone.transformer.encoder.blocks.{layer}.", "gpt2.backbone.layernorm"),
    ),
}
"""Names of the parameters by format."""
