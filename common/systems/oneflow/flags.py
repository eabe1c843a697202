"""Translation of OneFlow-Benchmark's command line and ONEFLOW_GPT_* variables.

Flags: OneFlow-Benchmark before fe1e78e, LanguageModeling/GPT/oneflow_gpt/config.py, and
examples/pretrain.sh beside it. What a value does: training.py, optimizer.py and snapshot.py there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.systems.dialect import (
    Defaults,
    Switch,
    Table,
    Theirs,
    To,
    Translation,
    Without,
    apply,
    number,
    one_of,
    require_all_taken,
    whole,
)

SYSTEM = "OneFlow"
PROGRAM = "oneflow_gpt.training"

_KERNELS = "the fastest kernels that the device has are taken"
_LAUNCHED = "the launcher says it"

DEFAULTS: Defaults = {
    "make_vocab_size_divisible_by": 128, "attention_dropout": 0.1, "hidden_dropout": 0.1,
    "init_method_std": 0.02, "vocab_size": 50257, "seq_length": 1024,
    "optimizer": "adamw", "learning_rate": 1e-3, "min_lr": 0.0, "lr_decay_style": "linear",
    "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8,
    "clip_grad": 1.0, "initial_loss_scale": 2.0**32, "loss_scale_window": 1000,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "split": "969,30,1", "seed": 12345, "log_interval": 100, "metric_print_format": "table",
}  # fmt: skip
"""Values of flags that are left out: OneFlow-Benchmark 2a18877,
LanguageModeling/GPT/oneflow_gpt/config.py.
"""


def _above_zero(value: Any) -> float:
    if number(value) <= 0:
        raise ValueError("expected a number above 0; with 0 OneFlow's weights would not change")
    return float(value)


TABLE: Table = {
    **{name: To(f"model.{name}") for name in ("num_layers", "hidden_size", "seq_length",
    "vocab_size")},
    "num_attention_heads": To("model.num_heads"),
    "make_vocab_size_divisible_by": To("model.vocab_multiple", lambda size: whole(size) or 1),
    "attention_dropout": To("model.attention_dropout", number),
    "hidden_dropout": To("model.dropout", number),
    "init_method_std": To("model.initializer_range", number),
    "micro_batch_size": To("train.micro_batch_size"),
    "global_batch_size": To("train.global_batch_size"),
    "num_accumulation_steps": To("train.accumulation_steps"),
    "train_iters": To("train.max_steps"),
    "checkpoint_activations": To("train.recompute", Switch("full")),
    "optimizer": To("optimizer.name", one_of(adamw="adamw", adam="adam", sgd="sgd")),
    "learning_rate": To("optimizer.learning_rate", number),
    "min_lr": To("optimizer.min_learning_rate", number),
    "lr_decay_style": To("optimizer.schedule",
    one_of(cosine="cosine", linear="linear", constant="constant")),
    "lr_decay_iters": To("optimizer.decay_steps"),
    "lr_warmup_iters": To("optimizer.warmup_steps"),
    "lr_warmup_fraction": To("optimizer.warmup_fraction", number),
    "weight_decay": To("optimizer.weight_decay", number),
    "adam_beta1": To("optimizer.beta1", number),
    "adam_beta2": To("optimizer.beta2", number),
    "adam_eps": To("optimizer.epsilon", number),
    "clip_grad": To("optimizer.clip_grad", _above_zero),
    "fp16": To("precision", Switch("fp16")),
    "initial_loss_scale": To("loss_scale.initial", number),
    "loss_scale_window": To("loss_scale.window", whole),
    "tensor_model_parallel_size": To("parallel.model_parallel"),
    "pipeline_model_parallel_size": To("parallel.pipeline_stage"),
    "dataset": To("data.train"),
    "split": To("data.split",
    lambda value: ",".join(map(str, value)) if isinstance(value, list) else str(value)),
    "seed": To("seed"),
    "log_interval": To("logging.interval"),
    "save_interval": To("checkpoint.interval", lambda steps: max(0, whole(steps))),
    "log": Without("the run folder holds the log"),
    "metric_print_format": To("logging.style",
    one_of(table="oneflow", normal="oneflow-normal")),
    "save_last": Without("the last step is always saved"),
    "save_init": Without("the weights before the first step are not saved"),
    "profile_transformer_layer": Without("profile.start and profile.stop say which steps are"
        " traced"),
    "use_external_dataset": Without("data.train is read anyway"),
    **{name: Without(_LAUNCHED) for name in ("num_gpus_per_node", "num_nodes", "node_ips",
    "ctrl_port")},
    "use_rdma": Without("NCCL and HCCL take the fastest network that they find"),
    **{name: Without(_KERNELS) for name in (
        "no_scale_tril_softmax_dropout_fusion", "no_bias_gelu_fusion", "no_bias_dropout_fusion",
        "multihead_attention_fusion",
        "no_query_key_layer_scaling",
    )},
}  # fmt: skip

VALUED = frozenset({"train_samples", "loss_scale", "save", "load"})
"""Flags with a value that this module reads itself."""
FLAGS = (*TABLE, *VALUED)

VARIABLES = {
    "ONEFLOW_GPT_DATASET": "dataset",
    "ONEFLOW_GPT_LOAD_PATH": "load",
    "ONEFLOW_GPT_SAVE_PATH": "save",
    "ONEFLOW_GPT_INIT_LOSS_SCALE": "initial_loss_scale",
    **{
        f"ONEFLOW_GPT_{name.upper()}": name
        for name in (
            "seq_length", "num_layers", "hidden_size", "num_attention_heads", "micro_batch_size",
            "global_batch_size",
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_accumulation_steps",
            "num_gpus_per_node", "num_nodes",
            "node_ips", "train_iters", "log_interval", "save_interval",
        )
    },
}  # fmt: skip
"""Variables that examples/pretrain.sh reads, and the flag that each becomes."""


def translate(tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str]) -> Translation:
    """Return our configuration of OneFlow's flags, by name and value. Raises ConfigError for flags
    that this project cannot follow.
    """
    theirs, ours = Theirs(SYSTEM, tree, sources, DEFAULTS), Translation()
    ours.set("output_dir", "output")
    ours.set("validation.interval", "never")
    scale, flag = theirs.take("loss_scale"), "initial_loss_scale"
    if scale is not None:
        try:
            scale = _above_zero(scale)
        except ValueError as error:
            theirs.refuse("loss_scale", scale, str(error))
        ours.set("loss_scale.mode", "static", theirs.where("loss_scale"), "loss_scale")
        ours.set("loss_scale.initial", scale, theirs.where("loss_scale"), "loss_scale")
        if not theirs.is_left_out(flag):
            theirs.take(flag)
            ours.note(flag, "it is for a dynamic scale, and --loss-scale makes it static")
    samples = theirs.take_count("train_samples")
    if samples is not None and not theirs.is_left_out("train_iters"):
        ours.note("train_samples", "--train-iters says it")
    elif samples is not None:
        tokens = samples * theirs.peek_count("seq_length")
        ours.set("train.max_tokens", tokens, theirs.where("train_samples"), "train_samples")
    flag = "lr_warmup_fraction"
    if theirs.peek(flag) is not None and theirs.is_left_out("lr_decay_iters"):
        theirs.take(flag)
        ours.note(flag, "it is a part of --lr-decay-iters, which is not given")
    save, load = theirs.take("save"), theirs.take("load")
    if save is not None:
        ours.set("output_dir", str(save), theirs.where("save"), "save")
    if load is not None and load != save:
        ours.set("checkpoint.resume", str(load), theirs.where("load"), "load")
    apply(TABLE, theirs, ours)
    require_all_taken(theirs, FLAGS)
    return ours


def settle(ours: Translation) -> None:
    """Take nothing away: every flag has its effect on both backends."""
