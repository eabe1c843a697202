"""Model of Megatron's ``args`` and checkpoint_version, in its own files and in those of DeepSpeed.

The args hold the heads, but only the padded size of the vocabulary. Its true size comes from a
model.yaml beside the checkpoint, which ours have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.resolved import ResolvedModel
from common.errors import ConfigError
from common.systems.name_map import Fusion, NameMap
from common.systems.run_state import MODEL_YAML, read_model_yaml
from common.systems.weights import checked_model

_MODEL = {
    "num_layers": "num_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads",
    "ffn_hidden_size": "ffn_hidden_size",
    "max_positions": "max_position_embeddings",
}  # fmt: skip
_REST = {
    "seq_length": "seq_length", "embedding_dropout": "hidden_dropout",
    "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout", "initializer_range": "init_method_std",
    "vocab_multiple": "make_vocab_size_divisible_by",
}  # fmt: skip
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (False,), "squared_relu": (False,),
    "apply_layernorm_1p": (False,), "swiglu": (False,),
    "normalization": ("LayerNorm", "layernorm"), "use_rotary_position_embeddings": (False,),
    "position_embedding_type": ("learned_absolute",),
    "group_query_attention": (False,),
}  # fmt: skip
"""Switches that change what a model computes, with the values of GPT-2. Shapes do not show all of
them.
"""
_GPT2_VOCABULARY = 50257
_ORDERS: dict[float, Fusion] = {
    0: Fusion.BLOCKS,
    1: Fusion.OUTPUTS,
    2: Fusion.HEADS,
    3: Fusion.HEADS,
}
"""checkpoint_version -> the order of the rows of query, key and value
(``fix_query_key_value_ordering`` in megatron/checkpointing.py).
"""


def model_of_args(
    path: Path, args: Mapping[str, Any], rows: int, tensor: int, folders: Sequence[Path]
) -> tuple[ResolvedModel, dict[str, Any] | None, dict[str, str]]:
    """Return the model, where its run stood as a model.yaml tells it, and notes for the user.

    path: of the file with ``args``. rows: of the padded embedding. tensor: tensor ranks. folders:
    where a model.yaml may be. Raises ConfigError.
    """
    for name, usual in _FIXED.items():
        if args.get(name) not in (None, *usual):
            raise ConfigError(
                f"{path}: its args say {name}={args[name]!r}; our model is GPT-2, which has"
                f" {name}={usual[0]!r} and would compute otherwise"
            )
    notes = {}
    if args.get("bias_gelu_fusion") is False and not args.get("openai_gelu"):
        notes["args.bias_gelu_fusion=False"] = (
            "the exact gelu, which it was trained with: GPT-2's is the tanh formula, up to 5e-4"
            " away"
        )
    file = next((file for folder in folders if (file := folder / MODEL_YAML).is_file()), None)
    if file is not None:
        model, run = read_model_yaml(file)
        for ours, theirs in _MODEL.items():
            if args.get(theirs) not in (None, getattr(model, ours)):
                raise ConfigError(
                    f"{file}: {ours} is {getattr(model, ours)}, and {path} says"
                    f" {theirs}={args[theirs]}; fix the first"
                )
        return model, run, notes
    missing = [
        theirs
        for ours, theirs in _MODEL.items()
        if args.get(theirs) is None and ours != "ffn_hidden_size"
    ]
    if missing:
        raise ConfigError(
            f"{path}: its args lack {', '.join(missing)}; put the section model of the config"
            f" beside {folders[0].name} as {MODEL_YAML}"
        )
    section = {
        ours: args[theirs]
        for ours, theirs in (_MODEL | _REST).items()
        if args.get(theirs) is not None
    }
    # newer versions have the second name
    epsilon = args.get("layernorm_epsilon") or args.get("norm_epsilon")
    section |= {} if epsilon is None else {"layer_norm_epsilon": epsilon}
    multiple = section.setdefault("vocab_multiple", 128)
    # another type is refused below
    padding = multiple * tensor if type(multiple) is int else 0
    section["vocab_size"], note = _vocabulary(args, rows, padding)
    return (
        checked_model(path, {"seq_length": section["max_positions"], **section}),
        None,
        notes | note,
    )


def in_version(path: Path, version: Any, name_map: NameMap) -> NameMap:
    """Return the map with the order of query, key and value that a checkpoint_version has. Raises
    ConfigError.
    """
    if not isinstance(version, int | float) or version not in _ORDERS:
        raise ConfigError(
            f"{path}: checkpoint_version is {version!r}, of which the order of query,"
            f" key and value is unknown; expected {', '.join(map(str, _ORDERS))}"
        )
    return name_map.fused(_ORDERS[version])


def _vocabulary(args: Mapping[str, Any], rows: int, padding: int) -> tuple[Any, dict[str, str]]:
    """Return the true vocabulary of an embedding of ``rows`` rows, and a note. Fewer than
    ``padding`` rows are padding.
    """
    # transformers' converter writes the first; with NullTokenizer the second leaves out the end of
    # a document, which it puts after all
    vocabulary = args.get("orig_vocab_size") or args.get("vocab_size")
    if isinstance(vocabulary, int):
        return vocabulary + (args.get("tokenizer_type") == "NullTokenizer"), {}
    if args.get("tokenizer_type") == "GPT2BPETokenizer" and 0 <= rows - _GPT2_VOCABULARY < padding:
        return _GPT2_VOCABULARY, {}
    return rows, {
        "padded_vocab_size": f"the true vocabulary, which args do not tell: all {rows} rows are"
        f" kept; say it in a {MODEL_YAML}"
    }
