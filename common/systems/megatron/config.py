"""The model that the ``args`` in a Megatron checkpoint describe.

Heads come from there. The true vocabulary comes from a model.yaml beside the checkpoint, which ours have: args know its padded size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.config.schema import ModelConfig
from common.errors import ConfigError
from common.systems.megatron.shards import Shards
from common.systems.model_yaml import MODEL_YAML, read_model_yaml
from common.systems.weights import checked_model

_MODEL = {
    "num_layers": "num_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads", "ffn_hidden_size": "ffn_hidden_size",
    "max_positions": "max_position_embeddings",
}  # fmt: skip
_REST = {
    "seq_length": "seq_length", "embedding_dropout": "hidden_dropout", "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout", "initializer_range": "init_method_std", "vocab_multiple": "make_vocab_size_divisible_by",
}  # fmt: skip
_OTHERS: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (False,), "squared_relu": (False,), "apply_layernorm_1p": (False,), "swiglu": (False,),
    "normalization": ("LayerNorm",), "use_rotary_position_embeddings": (False,), "position_embedding_type": ("learned_absolute",),
    "group_query_attention": (False,),
}  # fmt: skip
"""Switches that change what a model computes, some of them no tensor's shape: what GPT-2 has."""
_GPT2_VOCABULARY = 50257


def read_config(shards: Shards, rows: int) -> tuple[ModelConfig, dict[str, Any] | None, dict[str, str]]:
    """The model, where its run stood as far as a model.yaml tells, and what else to tell. rows: of the padded embedding."""
    path, args = shards.first.path, vars(shards.args)
    notes = {}
    for name, usual in _OTHERS.items():
        if args.get(name) not in (None, *usual):
            raise ConfigError(
                f"{path}: its args say {name}={args[name]!r}; our model is GPT-2, which has {name}={usual[0]!r} and would compute otherwise"
            )
    if args.get("bias_gelu_fusion") is False and not args.get("openai_gelu"):
        notes["args.bias_gelu_fusion=False"] = "the exact gelu, which it was trained with: GPT-2's is the tanh formula, up to 5e-4 away"
    file = next((file for folder in (shards.folder, shards.folder.parent) if (file := folder / MODEL_YAML).is_file()), None)
    if file is not None:
        model, run = read_model_yaml(file)
        for ours, theirs in _MODEL.items():
            if args.get(theirs) not in (None, getattr(model, ours)):
                raise ConfigError(f"{file}: {ours} is {getattr(model, ours)}, and {path} says {theirs}={args[theirs]}; mend the first")
        return model, run, notes
    missing = [theirs for ours, theirs in _MODEL.items() if args.get(theirs) is None and ours != "ffn_hidden_size"]
    if missing:
        raise ConfigError(
            f"{path}: its args lack {', '.join(missing)}; put the section model of the config beside {shards.folder.name} as {MODEL_YAML}"
        )
    section = {ours: args[theirs] for ours, theirs in (_MODEL | _REST).items() if args.get(theirs) is not None}
    epsilon = args.get("layernorm_epsilon") or args.get("norm_epsilon")  # newer versions have the second
    section |= {} if epsilon is None else {"layer_norm_epsilon": epsilon}
    multiple = section.setdefault("vocab_multiple", 128)
    # transformers' converter writes the first; with NullTokenizer the second leaves out the end of a document, which it puts after all
    vocabulary = args.get("orig_vocab_size") or args.get("vocab_size")
    if isinstance(vocabulary, int):
        vocabulary += args.get("tokenizer_type") == "NullTokenizer"
    else:
        limit = multiple * shards.tensor if type(multiple) is int else 0  # of another type it is refused below
        is_gpt2 = args.get("tokenizer_type") == "GPT2BPETokenizer" and 0 <= rows - _GPT2_VOCABULARY < limit
        vocabulary = _GPT2_VOCABULARY if is_gpt2 else rows
        if not is_gpt2:
            notes["padded_vocab_size"] = f"the true vocabulary, which args do not tell: all {rows} rows are kept; say it in a {MODEL_YAML}"
    section["vocab_size"] = vocabulary
    return checked_model(path, {"seq_length": section["max_positions"], **section}), None, notes
