"""The model that the ``args`` in a Megatron checkpoint describe, read and written.

Heads come from there. The true vocabulary comes from a model.yaml beside the checkpoint, which ours
have: args know its padded size.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from common.config.resolved import ResolvedModel
from common.errors import ConfigError
from common.parallel.batch import pad_vocabulary
from common.systems.megatron.shards import Shards
from common.systems.model_yaml import MODEL_YAML, read_model_yaml
from common.systems.weights import Weights, checked_model
from common.tensor_files.torch_pickle import TorchName

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
    "normalization": ("LayerNorm",), "use_rotary_position_embeddings": (False,),
    "position_embedding_type": ("learned_absolute",),
    "group_query_attention": (False,),
}  # fmt: skip
"""Switches that change what a model computes, though no shape tells all of them, with the values of
GPT-2.
"""
_GPT2_VOCABULARY = 50257


def read_config(
    shards: Shards, rows: int
) -> tuple[ResolvedModel, dict[str, Any] | None, dict[str, str]]:
    """Return the model, where its run stood as a model.yaml tells it, and notes for the user. rows:
    of the padded embedding.
    """
    path, args = shards.first.path, vars(shards.args)
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
    file = next(
        (
            file
            for folder in (shards.folder, shards.folder.parent)
            if (file := folder / MODEL_YAML).is_file()
        ),
        None,
    )
    if file is not None:
        model, run = read_model_yaml(file)
        for ours, theirs in _MODEL.items():
            if args.get(theirs) not in (None, getattr(model, ours)):
                raise ConfigError(
                    f"{file}: {ours} is {getattr(model, ours)}, and {path} says"
                    f" {theirs}={args[theirs]}; mend the first"
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
            f" beside {shards.folder.name} as {MODEL_YAML}"
        )
    section = {
        ours: args[theirs]
        for ours, theirs in (_MODEL | _REST).items()
        if args.get(theirs) is not None
    }
    # newer versions have the second
    epsilon = args.get("layernorm_epsilon") or args.get("norm_epsilon")
    section |= {} if epsilon is None else {"layer_norm_epsilon": epsilon}
    multiple = section.setdefault("vocab_multiple", 128)
    # of another type it is refused below
    padding = multiple * shards.tensor if type(multiple) is int else 0
    section["vocab_size"], note = _vocabulary(args, rows, padding)
    return (
        checked_model(path, {"seq_length": section["max_positions"], **section}),
        None,
        notes | note,
    )


def _vocabulary(args: Mapping[str, Any], rows: int, padding: int) -> tuple[Any, dict[str, str]]:
    """Return the true vocabulary of an embedding of ``rows`` rows, of which fewer than ``padding``
    are added, and a note.
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


def hysteresis(run: Any) -> int:
    """Return the overflows that a dynamic loss scale of a run stands before it shrinks."""
    return int(run["config"].get("loss_scale", {}).get("hysteresis", 2))


def model_args(weights: Weights, precision: str, tensor: int, stages: int) -> argparse.Namespace:
    """Return the args that a model is made of, and that ``check_checkpoint_args`` and
    ``load_args_from_checkpoint`` of Megatron read.
    """
    model = weights.model
    run: Any = weights.run or {"state": {"step": 0, "consumed_samples": 0}, "config": {}}
    return argparse.Namespace(
        num_layers=model.num_layers, encoder_num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size, num_attention_heads=model.num_heads,
        kv_channels=model.hidden_size // model.num_heads,
        group_query_attention=False, seq_length=model.seq_length,
        encoder_seq_length=model.seq_length,
        max_position_embeddings=model.max_positions, add_position_embedding=True,
        position_embedding_type="learned_absolute",
        use_rotary_position_embeddings=False, rotary_percent=1.0, tokenizer_type="GPT2BPETokenizer",
        vocab_size=model.vocab_size,
        make_vocab_size_divisible_by=model.vocab_multiple,
        padded_vocab_size=pad_vocabulary(model.vocab_size, model.vocab_multiple, tensor),
        layernorm_epsilon=model.layer_norm_epsilon, norm_epsilon=model.layer_norm_epsilon,
        normalization="LayerNorm",
        apply_layernorm_1p=False, apply_residual_connection_post_layernorm=False,
        add_bias_linear=True, bias_gelu_fusion=True,
        openai_gelu=False, squared_relu=False, swiglu=False,
        untie_embeddings_and_output_weights=False, num_experts=None,
        hidden_dropout=model.hidden_dropout, attention_dropout=model.attention_dropout,
        init_method_std=model.initializer_range,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=None,
        num_layers_per_virtual_pipeline_stage=None, data_parallel_random_init=False,
        use_distributed_optimizer=False,
        transformer_impl="local", fp16=precision == "float16", bf16=precision == "bfloat16",
        params_dtype=TorchName(f"torch.{precision}"),
        hysteresis=hysteresis(run), iteration=run["state"]["step"],
        consumed_train_samples=run["state"]["consumed_samples"],
        consumed_valid_samples=0,
    )  # fmt: skip
