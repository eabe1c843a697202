"""Names of the parameters in OpenAI's TensorFlow code.

Weights are those of convolutions of width 1, (1, in, out), whose first axis the reader drops.
"""

from common.systems.name_map import LINEAR, POSITIONS, name_map
from common.weights.names import EMBEDDING

NAME_MAPS = (
    name_map(
        {
            EMBEDDING: "model/wte",
            POSITIONS: "model/wpe",
            "ln_f": "model/ln_f/g|b",
            "ln_1": "model/h{layer}/ln_1/g|b",
            "attn.qkv_proj": "model/h{layer}/attn/c_attn/w|b",
            "attn.c_proj": "model/h{layer}/attn/c_proj/w|b",
            "ln_2": "model/h{layer}/ln_2/g|b",
            "mlp.c_fc": "model/h{layer}/mlp/c_fc/w|b",
            "mlp.c_proj": "model/h{layer}/mlp/c_proj/w|b",
        },
        transposed=LINEAR,
    ),
)
