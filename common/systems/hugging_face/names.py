"""transformers' names of a GPT-2's parameters. Its Conv1D weights are (in, out)."""

import re

from common.systems.name_map import LINEAR, POSITIONS, NameMap, name_map
from common.weights.names import EMBEDDING


def _names(prefix: str) -> NameMap:
    block = prefix + "h.{layer}."
    return name_map(
        {
            EMBEDDING: f"{prefix}wte.weight",
            POSITIONS: f"{prefix}wpe.weight",
            "ln_f": f"{prefix}ln_f",
            "ln_1": f"{block}ln_1",
            "attn.qkv_proj": f"{block}attn.c_attn",
            "attn.c_proj": f"{block}attn.c_proj",
            "ln_2": f"{block}ln_2",
            "mlp.c_fc": f"{block}mlp.c_fc",
            "mlp.c_proj": f"{block}mlp.c_proj",
        },
        transposed=LINEAR,
        head="lm_head.weight",
        ignored=re.escape(prefix) + r"h\.\d+\.attn\.(masked_)?bias",  # causal masks of old files
    )


NAME_MAPS = (_names("transformer."), _names(""))
"""Names that are written, then others that are read."""
