"""Megatron's smallest command line, its flags without a default, and its values that mean off.

Sources: Megatron-DeepSpeed b4d4a0e, megatron/arguments.py, training.py and optimizer/;
Megatron-LM 000c4ac, megatron/training/arguments.py. Others are named.
"""

from __future__ import annotations

from typing import Any

from common.dialects.rules import MapTo, Switch
from common.systems.megatron.flags import DIALECT
from tests.common.systems.foreign_runs import Rows, Sentinel

MINIMAL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8,
    "micro_batch_size": 1, "lr": 1e-4, "train_iters": 5,
}  # fmt: skip
_PROFILE = {"profile": True}
BESIDE: dict[str, dict[str, Any]] = {
    "profile_step_start": _PROFILE, "profile_step_end": _PROFILE,
    "sgd_momentum": {"optimizer": "sgd"},
    **{name: {"fp16": True} for name in ("initial_loss_scale", "min_loss_scale", "hysteresis",
    "loss_scale_window")},
}  # fmt: skip
WITHOUT_DEFAULT: dict[str, str] = {
    **dict.fromkeys(
        (
            "num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size",
            "lr", "train_iters",
        ),
        "a run there ends without it",
    ),
    **dict.fromkeys(
        ("encoder_seq_length", "train_tokens", "batch_size", "model_parallel_size",
         "persistent_save_interval"),
        "another name or unit of a flag above",
    ),
    **dict.fromkeys(
        ("ffn_hidden_size", "global_batch_size", "lr_decay_iters", "lr_decay_samples"),
        "it follows from other flags, there and here",
    ),
    "max_position_embeddings": "required there; the least that it may be is seq_length, as here",
    "vocab_size": "the tokenizer's; GPT-2's 50257 where it is not given",
    **dict.fromkeys(
        ("lr_warmup_iters", "lr_warmup_samples"),
        "0 as here; --lr-warmup-fraction takes its place, and beside a 0 it may not",
    ),
    "zero_stage": "1.0, which ds_config.json overrules; without DeepSpeed nothing is split",
    **dict.fromkeys(
        ("lr_warmup_fraction", "exit_interval", "exit_duration_in_mins", "save_interval",
         "valid_data_path", "pretrained_checkpoint", "recompute_granularity"),
        "None, which is off, as here",
    ),
    **dict.fromkeys(
        ("vocab_file", "merge_file", "tokenizer_type", "tokenizer_model"),
        "None; a tokenizer has to be named to be read",
    ),
    **{key: "a switch, off" for key, rule in DIALECT.table.items()
       if isinstance(rule, MapTo) and isinstance(rule.change, Switch)},
    "async_save": "a switch, off; checkpoints of a thread, as ours are, have the same content",
}  # fmt: skip
_ASSERTED = "it ends with an assertion: "
SENTINELS = [
    Sentinel(
        "eval_iters", 0, "evaluate() draws no batch, during the run and after it",
        {"validation.interval": "never", "validation.max_samples": 0},
    ),
    Sentinel(
        "eval_interval", 0, "no validation before the last step: if args.eval_interval and ...",
        {"validation.interval": 0, "validation.max_batches": 100},
    ),
    Sentinel(
        "save_interval", 0, "no checkpoint before the last step: args.save_interval and ...",
        {"checkpoint.interval": 0},
    ),
    Sentinel(
        "persistent_save_interval", 0, "the same flag as save_interval",
        {"checkpoint.interval": 0},
    ),
    Sentinel(
        "exit_interval", 0, "never: if args.exit_interval and ...", {"train.exit_interval": None},
    ),
    Sentinel(
        "exit_duration_in_mins", 0, "never: if args.exit_duration_in_mins",
        {"train.exit_minutes": None},
    ),
    Sentinel("clip_grad", 0, "off: if args.clip_grad > 0.0", {"optimizer.clip_grad": 0.0}),
    Sentinel("clip_grad", -1, "off: if args.clip_grad > 0.0", {"optimizer.clip_grad": 0.0}),
    Sentinel(
        "loss_scale", 0, "a dynamic scale: if args.loss_scale",
        {"loss_scale.mode": "auto", "loss_scale.initial": 2.0**32}, {"fp16": True},
    ),
    Sentinel("lr_warmup_iters", 0, "no warm-up", {"optimizer.warmup_steps": 0}),
    Sentinel(
        "lr_warmup_samples", 0, "no warm-up", {"optimizer.warmup_samples": 0},
        {"train_iters": "", "train_samples": 8},
    ),
    Sentinel("hidden_dropout", 0, "none", {"model.dropout": 0.0, "model.attention_dropout": 0.1}),
    Sentinel("attention_dropout", 0, "none", {"model.dropout": 0.1, "model.attention_dropout": 0}),
    Sentinel("num_experts", 0, "no experts: if args.num_experts == 0", {"model.num_layers": 2}),
    Sentinel("num_workers", 0, "the process reads its batches itself", {"data.prefetch": 2}),
    Sentinel(
        "log_interval", 0, "it ends at step 1: iteration % 0", "logging.interval: input should be",
    ),
    Sentinel("train_iters", 0, _ASSERTED + "neither is given", "train.max_steps: input should be"),
    Sentinel(
        "loss_scale_window", 0, _ASSERTED + "growth_interval > 0", "loss_scale.window: input",
    ),
    Sentinel("hysteresis", 0, _ASSERTED + "hysteresis > 0", "loss_scale.hysteresis: input"),
    Sentinel("min_loss_scale", 0, _ASSERTED + "min_scale > 0.0", "loss_scale.minimum: input"),
    Sentinel("initial_loss_scale", 0, _ASSERTED + "> 0.0", "loss_scale.initial: input"),
    Sentinel("lr_decay_iters", 0, _ASSERTED + "lr_decay_steps > 0", "optimizer.decay_steps: input"),
    Sentinel(
        "make_vocab_size_divisible_by", 0, "it does not end: after % 0", "expected a whole number",
    ),
    Sentinel("seed", -1, "ValueError: a seed should be positive", "seed: input should be"),
]  # fmt: skip
ROWS = {"megatron": Rows(DIALECT, MINIMAL, WITHOUT_DEFAULT, BESIDE, SENTINELS)}
