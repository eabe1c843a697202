"""What checkpoints of Megatron-LM and Megatron-DeepSpeed share: ``args`` that describe the model,
checkpoint_version, and tensors in parts on the tensor ranks.

The args hold the heads, but only the padded size of the vocabulary. Its true size comes from a
model.yaml beside the checkpoint, which ours have.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config.resolved import ResolvedModel
from common.errors import ConfigError
from common.systems.name_map import Fusion, NameMap, Ranks, join_ranks, name_map
from common.systems.run_state import MODEL_YAML, checked_run, read_model_yaml, require_moments, require_one_run
from common.systems.weights import Weight, Weights, checked_model, import_names, weights_from
from common.tensor_files.arrays import TensorFile
from common.weights.names import EMBEDDING, POSITIONS

MODEL = {
    "num_layers": "num_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads",
    "ffn_hidden_size": "ffn_hidden_size",
    "max_positions": "max_position_embeddings",
}  # fmt: skip
REST = {
    "seq_length": "seq_length", "embedding_dropout": "hidden_dropout",
    "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout", "initializer_range": "init_method_std",
    "vocab_multiple": "make_vocab_size_divisible_by",
}  # fmt: skip
FIXED: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (False,), "squared_relu": (False,),
    "apply_layernorm_1p": (False,), "swiglu": (False,),
    "normalization": ("LayerNorm", "layernorm"), "use_rotary_position_embeddings": (False,),
    "position_embedding_type": ("learned_absolute",),
    "group_query_attention": (False,),
}  # fmt: skip
"""Switches that change what a model computes, with the values of GPT-2. Shapes do not show all of them."""
_GPT2_VOCABULARY = 50257
_ORDERS: dict[float, Fusion] = {0: Fusion.BLOCKS, 1: Fusion.OUTPUTS, 2: Fusion.HEADS, 3: Fusion.HEADS}
"""checkpoint_version -> the order of the rows of query, key and value
(``fix_query_key_value_ordering`` in megatron/checkpointing.py).
"""


def names_of_modules(embedding: str = "", encoder: str = "", attention: str = "self_attention", **more: Any) -> NameMap:
    """Return the names in Megatron-LM's GPTModel. embedding, encoder: starts of names in these
    modules. more: as for ``name_map``.
    """
    block = f"{encoder}layers.{{layer}}."
    return name_map(
        {
            EMBEDDING: f"{embedding}word_embeddings.weight",
            POSITIONS: f"{embedding}position_embeddings.weight",
            "ln_f": f"{encoder}final_layernorm",
            "ln_1": f"{block}input_layernorm",
            "attn.qkv_proj": f"{block}{attention}.query_key_value",
            "attn.c_proj": f"{block}{attention}.dense",
            "ln_2": f"{block}post_attention_layernorm",
            "mlp.c_fc": f"{block}mlp.dense_h_to_4h",
            "mlp.c_proj": f"{block}mlp.dense_4h_to_h",
        },
        fusion=Fusion.HEADS,
        **more,
    )


def args_of(file: TensorFile) -> dict[str, Any]:
    """Return the args in the file of a rank, where it has them."""
    args = file.tree.get("args") if isinstance(file.tree, dict) else None
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def weights_of_ranks(
    path: Path,
    format: str,
    first: TensorFile,
    folder: Path,
    name_map: NameMap,
    ranks: Ranks,
    *,
    masters: Ranks,
    moments: Mapping[str, Ranks],
    notes: Mapping[str, str],
    counter: str,
    step: Any,
    new_run: Callable[[], dict[str, Any]],
    without_run: Mapping[str, str],
) -> Weights:
    """Return the weights in the files of ``folder``, and their run.

    first: file of rank 0, which names the step ``counter``. masters: float32 weights that replace
    ``ranks``, empty for none. moments: by the part of the optimizer's state. notes: what is left
    out, and why. new_run: makes the state of a run without a model.yaml of ours. without_run: notes
    on weights without a run. Raises CheckpointError and ConfigError.
    """
    table = name_map.table
    rows = sum(rank[table].shape[0] for rank in ranks if table in rank and rank[table].shape)
    model, run, of_args = model_of_args(first, folder, rows, len(ranks))
    layers = model.num_layers
    weights = weights_from(
        folder, name_map, join_ranks(folder, ranks, name_map, layers), model,
        format=format, path=path, ignored={**notes, **of_args},
    )  # fmt: skip
    if masters:
        joined = join_ranks(folder, masters, name_map, layers)
        weights = replace(weights, tensors=import_names(folder, name_map, joined, model))
    state: dict[str, Weight] = {}
    for part, parts in moments.items():
        joined = join_ranks(folder, parts, name_map, layers)
        state |= import_names(folder, name_map, joined, model, suffix=f".{part}")
    more: dict[str, str] = {}
    if run is not None:
        require_one_run(first.path, counter, step, run["state"]["step"])
    elif state:
        try:
            run = new_run()
        except (TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
            raise ConfigError(
                f"{first.path}: its counters or its loss scale are not numbers ({error}); copy it again"
            ) from None
        run = checked_run(first.path, run)
    else:
        more |= without_run
        if step:
            more[counter] = "where training stood, without the state of the optimizer"
    state = {} if run is None else require_moments(folder, state, run, model)
    return replace(weights, moments=state, run=run, ignored={**weights.ignored, **more})


def model_of_args(
    first: TensorFile, folder: Path, rows: int, tensor: int
) -> tuple[ResolvedModel, dict[str, Any] | None, dict[str, str]]:
    """Return the model, where its run stood as a model.yaml tells it, and notes for the user.

    first: the file with the args. folder: the one that may hold a model.yaml, or its parent. rows: of the padded
    embedding. tensor: tensor ranks. Raises ConfigError.
    """
    path, args = first.path, args_of(first)
    for name, usual in FIXED.items():
        if args.get(name) not in (None, *usual):
            raise ConfigError(
                f"{path}: its args say {name}={args[name]!r}; our model is GPT-2, which has"
                f" {name}={usual[0]!r} and would compute otherwise"
            )
    notes: dict[str, str] = {}
    is_exact = args.get("bias_gelu_fusion") is False and not args.get("openai_gelu")  # the fused one is the tanh form
    if file := next(filter(Path.is_file, (folder / MODEL_YAML, folder.parent / MODEL_YAML)), None):
        model, run = read_model_yaml(file)
        for ours, theirs in MODEL.items():
            if args.get(theirs) not in (None, getattr(model, ours)):
                raise ConfigError(
                    f"{file}: {ours} is {getattr(model, ours)}, and {path} says {theirs}={args[theirs]}; fix the first"
                )
        if is_exact and model.activation == "gelu_new":
            raise ConfigError(
                f"{file}: activation is gelu_new, and {path} says bias_gelu_fusion=False, which is gelu; fix the first"
            )
        return model, run, notes
    missing = [theirs for ours, theirs in MODEL.items() if args.get(theirs) is None and ours != "ffn_hidden_size"]
    if missing:
        raise ConfigError(
            f"{path}: its args lack {', '.join(missing)}; put the section model of the config"
            f" beside {folder.name} as {MODEL_YAML}"
        )
    section = {ours: args[theirs] for ours, theirs in (MODEL | REST).items() if args.get(theirs) is not None}
    # newer versions have the second name
    epsilon = args.get("layernorm_epsilon") or args.get("norm_epsilon")
    section |= {} if epsilon is None else {"layer_norm_epsilon": epsilon}
    section |= {"activation": "gelu"} if is_exact else {}
    multiple = section.setdefault("vocab_multiple", 128)
    # another type is refused below
    padding = multiple * tensor if type(multiple) is int else 0
    # transformers' converter writes the first; with NullTokenizer the second leaves out the end of
    # a document, which it puts after all
    vocabulary = args.get("orig_vocab_size") or args.get("vocab_size")
    section["vocab_size"] = rows
    if isinstance(vocabulary, int):
        section["vocab_size"] = vocabulary + (args.get("tokenizer_type") == "NullTokenizer")
    elif args.get("tokenizer_type") == "GPT2BPETokenizer" and 0 <= rows - _GPT2_VOCABULARY < padding:
        section["vocab_size"] = _GPT2_VOCABULARY
    else:
        notes["padded_vocab_size"] = (
            f"the true vocabulary, which args do not tell: all {rows} rows are kept; say it in a {MODEL_YAML}"
        )
    return checked_model(path, {"seq_length": section["max_positions"], **section}), None, notes


def in_version(path: Path, version: Any, name_map: NameMap) -> NameMap:
    """Return the map with the order of query, key and value that a checkpoint_version has. Raises ConfigError."""
    if not isinstance(version, int | float) or version not in _ORDERS:
        raise ConfigError(
            f"{path}: checkpoint_version is {version!r}, of which the order of query,"
            f" key and value is unknown; expected {', '.join(map(str, _ORDERS))}"
        )
    order = _ORDERS[version]
    return replace(name_map, layer_rows=tuple(replace(row, fusion=order) for row in name_map.layer_rows))
