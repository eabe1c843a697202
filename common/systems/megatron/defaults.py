"""Megatron's values of flags that are left out.

Source: Megatron-DeepSpeed b4d4a0e, megatron/arguments.py. Megatron-LM 000c4ac,
megatron/training/arguments.py, has the same values, and those of its further flags.
"""

from __future__ import annotations

from common.systems.dialect import Defaults

DEFAULTS: Defaults = {
    # model
    "make_vocab_size_divisible_by": 128, "layernorm_epsilon": 1e-5, "norm_epsilon": 1e-5,
    "attention_dropout": 0.1, "hidden_dropout": 0.1, "init_method_std": 0.02, "seed": 1234,
    # optimizer
    "optimizer": "adam", "min_lr": 0.0, "lr_decay_style": "linear", "weight_decay": 0.01,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "sgd_momentum": 0.9,
    "clip_grad": 1.0,
    "initial_loss_scale": 2.0**32, "min_loss_scale": 1.0, "loss_scale_window": 1000,
    "hysteresis": 2,
    # layout
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "data_parallel_sharding_strategy": "no_shard",
    # data, validation, log
    "split": "969, 30, 1", "eval_iters": 100, "eval_interval": 1000, "log_interval": 100,
    "profile_step_start": 10, "profile_step_end": 12,
}  # fmt: skip
