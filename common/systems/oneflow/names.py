"""Names of the variables in a snapshot of OneFlow-Benchmark's GPT.

Linear weights are (in, out); c_attn holds query, key and value of each head in turn
(GPT/oneflow_gpt/model.py).
"""

from dataclasses import replace

from common.systems.name_map import LINEAR, POSITIONS, Fusion, NameMap, name_map
from common.weights.names import EMBEDDING

_BLOCK = "model-h{layer}-"
NAME_MAP = name_map(
    {
        EMBEDDING: "model-wte",
        POSITIONS: "model-wpe",
        "ln_f": "model-layernorm_f-gamma|beta",
        "ln_1": f"{_BLOCK}layernorm_1-gamma|beta",
        "attn.qkv_proj": f"{_BLOCK}attn-c_attn-weight|bias",
        "attn.c_proj": f"{_BLOCK}attn-c_proj-weight|bias",
        "ln_2": f"{_BLOCK}layernorm_2-gamma|beta",
        "mlp.c_fc": f"{_BLOCK}mlp-c_fc-weight|bias",
        "mlp.c_proj": f"{_BLOCK}mlp-c_proj-weight|bias",
    },
    transposed=LINEAR,
    fusion=Fusion.HEADS,
)
MOMENTS = {"exp_avg": "-m", "exp_avg_sq": "-v", "momentum_buffer": "-momentum"}
"""Part of the optimizer's state -> suffix of the variable's name."""
SYSTEM = "System-"
"""Prefixes of the names of OneFlow's own variables."""
STEP = "System-Train-TrainStep-"
SCALE = "System-Train-DynamicLossScale-"
JOB = "train"
"""Name of the training function, which ends the name of STEP."""


def moment_map(part: str) -> NameMap:
    """Return the map of names of a part of the optimizer's state."""
    global_rows, layer_rows = (
        tuple(replace(row, theirs=row.theirs + MOMENTS[part]) for row in rows)
        for rows in (NAME_MAP.global_rows, NAME_MAP.layer_rows)
    )
    return replace(NAME_MAP, global_rows=global_rows, layer_rows=layer_rows)
