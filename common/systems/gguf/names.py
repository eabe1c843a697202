"""llama.cpp's names of a GPT-2's parameters. Its weights are (out, in); without a head, the
embedding serves as one.
"""

from common.systems.name_map import name_map
from common.weights.names import EMBEDDING, POSITIONS

_BLOCK = "blk.{layer}."

NAME_MAP = name_map(
    {
        EMBEDDING: "token_embd.weight",
        POSITIONS: "position_embd.weight",
        "ln_f": "output_norm",
        "ln_1": f"{_BLOCK}attn_norm",
        "attn.qkv_proj": f"{_BLOCK}attn_qkv",
        "attn.c_proj": f"{_BLOCK}attn_output",
        "ln_2": f"{_BLOCK}ffn_norm",
        "mlp.c_fc": f"{_BLOCK}ffn_up",
        "mlp.c_proj": f"{_BLOCK}ffn_down",
    },
    head="output.weight",
)
