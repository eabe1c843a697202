"""Translation of PaddleFleetX's quantization-aware training: the section Quantization of release
2.3, and Compress.Quantization of 2.4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.dialects.rules import Ignored
from common.systems.dialect import ForeignKeys, Translation, apply

_SECTIONS = ("Quantization", "Compress.Quantization")
_LINEARS = {
    "q_proj": ("attn.q_proj",), "k_proj": ("attn.k_proj",), "v_proj": ("attn.v_proj",),
    "qkv_proj": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "out_proj": ("attn.c_proj",), "linear1": ("mlp.c_fc",), "linear2": ("mlp.c_proj",),
}  # fmt: skip
"""FleetX's name of a block's layer -> ours."""
_LAYER_TYPES = {"Linear", "ColumnParallelLinear", "RowParallelLinear"}
_NONE = ("None", "null")


_PRETRAINED = ("Quantization.pretrained", "Compress.pretrained")


def translate(theirs: ForeignKeys, ours: Translation) -> None:
    """Translate the section. Raises ConfigError for an unknown kind of scale or layer."""
    for section in _SECTIONS:
        if not list(theirs.under(f"{section}.")):
            continue
        enable = f"{section}.enable"
        value = theirs.take(enable, False)
        if value not in (True, False):
            theirs.refuse(enable, value, "expected True or False")
        if not value:
            apply({f"{section}.*": Ignored("it is not enabled")}, theirs, ours)
            continue
        # PaddleSlim's defaults, as FleetX's docs/compression.md says too
        ours.set("quantization.weights", "channel_wise_abs_max")
        ours.set("quantization.activations", "moving_average_abs_max")
        _bounds(section, theirs, ours)
        _layers(section, theirs, ours)
    for key in _PRETRAINED:
        path = theirs.take(key)
        if path is not None:
            # FleetX takes a prefix, to which it adds the ending
            weights = f"{path}.pdparams" if Path(f"{path}.pdparams").is_file() else path
            ours.put("checkpoint.init_from", weights, theirs, key)


def _bounds(section: str, theirs: ForeignKeys, ours: Translation) -> None:
    key = f"{section}.weight_preprocess_type"
    if (value := theirs.take(key)) is not None and value not in _NONE:
        theirs.refuse(key, value, "weights are rounded as they are; set None")
    key = f"{section}.activation_preprocess_type"
    value = theirs.take(key)
    if value == "PACT":
        ours.note(key, "the moving average of the maxima clips activations, not a learned bound")
    elif value is not None and value not in _NONE:
        theirs.refuse(key, value, "expected None or PACT")


def _layers(section: str, theirs: ForeignKeys, ours: Translation) -> None:
    key = f"{section}.quantizable_layer_type"
    kinds = theirs.take(key)
    if kinds is not None and not (isinstance(kinds, list) and _LAYER_TYPES & set(map(str, kinds))):
        theirs.refuse(key, kinds, f"expected a list with {', '.join(sorted(_LAYER_TYPES))}")
    prefix = f"{section}.skip_tensor_map"
    skip: list[str] = []
    for key in list(theirs.under(f"{prefix}.")):
        skip += _skipped(key, theirs.take(key), theirs)
    if skip:
        ours.put("quantization.skip", skip, theirs, prefix)
    elif prefix in theirs.left() and theirs.peek(prefix) is None:
        theirs.take(prefix)


def _skipped(key: str, names: Any, theirs: ForeignKeys) -> list[str]:
    block = key.rpartition(".")[2]
    number = block.removeprefix("block_")
    if block == number or not number.isdigit():
        theirs.refuse(key, names, "expected block_0, block_1 ... with the names of layers")
    found: list[str] = []
    for name in names if isinstance(names, list) else [names]:
        if str(name) not in _LINEARS:
            theirs.refuse(key, names, f"expected layers among {', '.join(_LINEARS)}")
        found += [f"h.{number}.{ours}" for ours in _LINEARS[str(name)]]
    return found
