"""Folders that transformers opens, written: config.json and safetensors, in shards where they are large."""

from __future__ import annotations

import json
from pathlib import Path

from common.config.schema import ModelConfig
from common.files import atomic_write
from common.systems.hugging_face.names import NAME_MAPS
from common.systems.hugging_face.read import CONFIG
from common.systems.hugging_face.tokenizer import end_of_text
from common.systems.weights import Weights, export_names
from common.tensor_files.arrays import prefetch_arrays
from common.tensor_files.safetensors_file import stream_shards

_SHARD_BYTES = 5 * 10**9


def write_config(path: Path, model: ModelConfig, dtype: str, end_of_text: int | None) -> None:
    """end_of_text: of the tokenizer, as far as known; transformers would take 50256 for any vocabulary."""
    fields = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", "tie_word_embeddings": True,
        "n_layer": model.num_layers, "n_embd": model.hidden_size, "n_head": model.num_heads, "vocab_size": model.vocab_size,
        "n_positions": model.max_positions, "n_ctx": model.max_positions,
        "n_inner": None if model.ffn_hidden_size == 4 * model.hidden_size else model.ffn_hidden_size,
        "embd_pdrop": model.embedding_dropout, "attn_pdrop": model.attention_dropout, "resid_pdrop": model.hidden_dropout,
        "layer_norm_epsilon": model.layer_norm_epsilon, "initializer_range": model.initializer_range, "torch_dtype": dtype,
        "bos_token_id": end_of_text, "eos_token_id": end_of_text,
    }  # fmt: skip
    with atomic_write(path, "w") as file:
        json.dump(fields, file, indent=2)
        file.write("\n")


def write_hugging_face(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
    """Into an empty folder; returns the CRC-32 of each file of weights. OSError is left to the caller."""
    entries = list(export_names(NAME_MAPS[0], weights.tensors, weights.model, dtype))
    kinds = {name: kind for name, kind, _ in entries}
    sums = stream_shards(folder, kinds, prefetch_arrays(make for _, _, make in entries), limit=_SHARD_BYTES)
    write_config(folder / CONFIG, weights.model, next(iter(kinds.values())).dtype, end_of_text(weights))
    return sums
