"""transformers' config.json, read and written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config.resolved import ResolvedModel
from common.dialects.hugging_face import FIXED, other_function
from common.errors import ConfigError
from common.files import atomic_write
from common.structured_files import read_json_mapping, shown
from common.systems.weights import checked_model

CONFIG = "config.json"
_SIZES = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "vocab_size": "vocab_size",
}
_RATES = {
    "embedding_dropout": ("embd_pdrop", 0.1), "attention_dropout": ("attn_pdrop", 0.1),
    "hidden_dropout": ("resid_pdrop", 0.1),
    "layer_norm_epsilon": ("layer_norm_epsilon", 1e-5),
    "initializer_range": ("initializer_range", 0.02),
}  # fmt: skip
"""Our key -> theirs, and their default."""


def read_config(path: Path) -> ResolvedModel:
    """Return the sizes and settings of config.json. Raises ConfigError unless it describes a GPT-2
    that computes what ours does.
    """
    if not os.path.lexists(path):
        raise ConfigError(
            f"{path}: no such file; heads and vocabulary cannot be read off shapes: put config.json"
            " beside the weights"
        )
    fields = read_json_mapping(path, finite=False)
    positions = fields.get("n_positions") or fields.get("n_ctx")
    missing = [name for name in _SIZES.values() if fields.get(name) is None] + (
        [] if positions else ["n_positions"]
    )
    if missing:
        raise ConfigError(
            f"{path}: no config of a GPT-2: {', '.join(missing)} missing; expected n_layer, n_embd,"
            " n_head, n_positions, vocab_size"
        )
    for name, values in FIXED.items():
        if fields.get(name, values[0]) not in values:
            raise ConfigError(f"{path}: {name}={shown(fields[name])}; {other_function(name)}")
    section = {ours: fields[theirs] for ours, theirs in _SIZES.items()}
    section |= {
        "seq_length": positions,
        "max_positions": positions,
        "ffn_hidden_size": fields.get("n_inner") or None,
    }
    section |= {ours: fields.get(theirs, default) for ours, (theirs, default) in _RATES.items()}
    return checked_model(path, section)


def write_config(
    path: Path,
    model: ResolvedModel,
    dtype: str,
    ids: Mapping[str, Any],
    window: int | None = None,
) -> None:
    """Write config.json.

    ids: bos_token_id and the others of ``special_ids``; transformers would take 50256 for any
    vocabulary where they are left out. window: n_ctx, by default the number of positions.
    """
    fields = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        "n_positions": model.max_positions,
        "n_ctx": window or model.max_positions,
        "n_inner": None
        if model.ffn_hidden_size == 4 * model.hidden_size
        else model.ffn_hidden_size,
        **{theirs: getattr(model, ours) for ours, (theirs, _) in _RATES.items()},
        "torch_dtype": dtype,
        **ids,
    }
    with atomic_write(path, "w") as file:
        json.dump(fields, file, indent=2)
        file.write("\n")
