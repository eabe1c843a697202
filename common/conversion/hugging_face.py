"""Folders of Hugging Face's GPT-2: config.json, weights in safetensors or pytorch_model.bin, in shards or not, and the tokenizer's files.

GPT2-Chinese has the same, with vocab.txt.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.config.schema import ModelConfig
from common.conversion.tokenizer_files import end_of_text
from common.conversion.weights import Weights, check_tied, checked_model, export_names, import_names, match_name_map, padding_of
from common.errors import CheckpointError, ConfigError
from common.files import atomic_write
from common.structured_files import read_json_mapping, shown
from common.tensor_files.arrays import TensorFile, prefetch_arrays
from common.tensor_files.containers import open_tensors
from common.tensor_files.safetensors_file import stream_shards
from common.weights.names import EMBEDDING, NAME_MAPS, NameMap

CONFIG = "config.json"
FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SHARD_BYTES = 5 * 10**9
_SAME = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,), "add_cross_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,), "tie_word_embeddings": (True,),
}  # fmt: skip
"""Settings that our model has no choice in: which of their values it computes. The first is transformers' default, but for old files."""


def is_here(path: Path) -> bool:
    return (path / CONFIG).is_file() and any((path / name).is_file() for name in FILES)


@contextmanager
def open_hugging_face(path: Path) -> Iterator[Weights]:
    """path: the folder, or a file of weights beside its config.json. Raises CheckpointError and ConfigError."""
    folder = path if path.is_dir() else path.parent
    file = next((path / name for name in FILES if (path / name).is_file()), path)
    if not file.is_file():
        raise CheckpointError(f"{path}: no weights here; expected a file, or a folder with {' or '.join(FILES)}")
    model = read_config(folder / CONFIG)
    with open_tensors(file) as stored:
        yield _weights(path, stored, match_name_map(file, "hf", stored), model)


@contextmanager
def open_without_config(file: Path, layers: int) -> Iterator[Weights]:
    """A file by its shapes alone: good for names, not for heads, which no shape tells. Raises CheckpointError."""
    with open_tensors(file) as stored:
        name_map = match_name_map(file, "hf", stored)
        there = 1 + max((int(found[1]) for name in stored if (found := re.search(r"\bh\.(\d{1,9})\.", name))), default=layers - 1)
        if there != layers:
            raise CheckpointError(f"{file}: has {there} blocks, and --layers says {layers}; say --layers {there}")
        table, positions, inner = (
            stored[row.theirs].shape if row.theirs in stored and len(stored[row.theirs].shape) == 2 else (1, 1)  # refused below
            for row in name_map.rows(1)
            if row.ours in ((EMBEDDING,), ("wpe.weight",), ("h.0.mlp.c_fc.weight",))
        )
        sizes = {
            "num_layers": layers, "hidden_size": table[1], "num_heads": 1, "vocab_size": table[0], "seq_length": positions[0],
            "ffn_hidden_size": inner[1],
        }  # fmt: skip
        model = checked_model(file, sizes)
        yield _weights(file, stored, name_map, model)


def _weights(path: Path, stored: TensorFile, name_map: NameMap, model: ModelConfig) -> Weights:
    table = name_map.rows(0)[0].theirs
    ignored = {name: "causal mask of an old file" for name in stored if name_map.ignores(name)}
    tensors = {name: tensor for name, tensor in stored.items() if name not in ignored}
    if name_map.head in tensors and table in tensors:
        ignored[name_map.head] = f"the head, which is {table}"
        check_tied(stored.path, name_map.head, tensors.pop(name_map.head), tensors[table])
    ignored |= padding_of(name_map, tensors, model)
    return Weights(path=path, format="hf", model=model, tensors=import_names(stored.path, name_map, tensors, model), ignored=ignored)


def read_config(path: Path) -> ModelConfig:
    """Return the sizes and settings of config.json. Raises ConfigError unless it is a GPT-2 that computes what ours does."""
    if not os.path.lexists(path):
        raise ConfigError(f"{path}: no such file; heads and vocabulary cannot be read off shapes: put config.json beside the weights")
    words = read_json_mapping(path, finite=False)
    positions = words.get("n_positions") or words.get("n_ctx")
    theirs = {"num_layers": "n_layer", "hidden_size": "n_embd", "num_heads": "n_head", "vocab_size": "vocab_size"}
    missing = [name for name in theirs.values() if words.get(name) is None] + ([] if positions else ["n_positions"])
    if missing:
        raise ConfigError(
            f"{path}: no config of a GPT-2: {', '.join(missing)} missing; expected n_layer, n_embd, n_head, n_positions, vocab_size"
        )
    sizes = {
        **{ours: words[name] for ours, name in theirs.items()},
        "seq_length": positions,
        "ffn_hidden_size": words.get("n_inner") or None,
    }
    for name, values in _SAME.items():
        if words.get(name, values[0]) not in values:
            raise ConfigError(
                f"{path}: {name}={shown(words[name])}; our model is GPT-2 with {name}={values[0]!r} alone, so it would compute otherwise"
            )
    dropout = {
        "embedding_dropout": words.get("embd_pdrop", 0.1), "attention_dropout": words.get("attn_pdrop", 0.1),
        "hidden_dropout": words.get("resid_pdrop", 0.1),
    }  # fmt: skip
    rest = {"layer_norm_epsilon": words.get("layer_norm_epsilon", 1e-5), "initializer_range": words.get("initializer_range", 0.02)}
    return checked_model(path, {**sizes, "max_positions": sizes["seq_length"], **dropout, **rest})


def write_config(path: Path, model: ModelConfig, dtype: str, end_of_text: int | None) -> None:
    """end_of_text: of the tokenizer, as far as known; transformers would take 50256 for any vocabulary."""
    words = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", "tie_word_embeddings": True,
        "n_layer": model.num_layers, "n_embd": model.hidden_size, "n_head": model.num_heads, "vocab_size": model.vocab_size,
        "n_positions": model.max_positions, "n_ctx": model.max_positions,
        "n_inner": None if model.ffn_hidden_size == 4 * model.hidden_size else model.ffn_hidden_size,
        "embd_pdrop": model.embedding_dropout, "attn_pdrop": model.attention_dropout, "resid_pdrop": model.hidden_dropout,
        "layer_norm_epsilon": model.layer_norm_epsilon, "initializer_range": model.initializer_range, "torch_dtype": dtype,
        "bos_token_id": end_of_text, "eos_token_id": end_of_text,
    }  # fmt: skip
    with atomic_write(path, "w") as file:
        json.dump(words, file, indent=2)
        file.write("\n")


def write_hugging_face(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
    """Into an empty folder; returns the CRC-32 of each file of weights. OSError is left to the caller."""
    entries = list(export_names(NAME_MAPS["hf"][0], weights.tensors, weights.model, dtype))
    kinds = {name: kind for name, kind, _ in entries}
    sums = stream_shards(folder, kinds, prefetch_arrays(make for _, _, make in entries), limit=_SHARD_BYTES)
    write_config(folder / CONFIG, weights.model, next(iter(kinds.values())).dtype, end_of_text(weights))
    return sums
