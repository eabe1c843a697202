"""Translation of a config into a vendor's own settings, by pure functions without the framework."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, assert_never

from common.config.schema import OptimizerConfig
from common.dialects.megatron import DEEPSPEED
from common.dialects.rules import MapTo
from common.errors import ConfigError
from common.parallel.run import Run


def mindspore_context(config: Run) -> dict[str, Any]:
    """Return the arguments of mindspore.set_context. It has other functions for the device and its memory."""
    context = config.context
    settings: dict[str, Any] = {
        "mode": {"graph": 0, "pynative": 1}[context.mode],
        "max_call_depth": context.max_call_depth,
    }
    if context.save_graphs:
        settings |= {"save_graphs": True, "save_graphs_path": context.save_graphs_path or f"{config.output_dir}/graph"}
    if context.enable_graph_kernel:
        settings |= {"jit_config": {"jit_level": "O1"}}  # enable_graph_kernel is its old name
        if context.graph_kernel_flags:
            settings |= {"graph_kernel_flags": context.graph_kernel_flags}
    return settings


def semi_auto_settings(config: Run, rank: int) -> dict[str, Any]:
    """Return the arguments of mindspore.set_auto_parallel_context (2.10) for a run split by its compiler.

    The loss is divided by the global batch before gradients are taken. Gradients are therefore summed without a mean.
    """
    parallel, topology = config.parallel, config.topology
    files = parallel.strategy_ckpt_config
    strategy_files: dict[str, Any] = {
        "save_file": strategy_file(config, rank),
        "only_trainable_params": files.only_trainable_params,
    }
    if files.load_file:
        strategy_files["load_file"] = files.load_file.replace("{rank}", str(rank))
    settings: dict[str, Any] = {
        "parallel_mode": parallel.parallel_mode or "semi_auto_parallel",
        "device_num": topology.world_size,
        "global_rank": rank,
        "gradients_mean": False,
        "loss_repeated_mean": True,
        "dataset_strategy": "full_batch"
        if parallel.full_batch is not False
        else ((topology.data, 1), (topology.data, 1)),
        "enable_alltoall": parallel.enable_alltoall,
        "enable_parallel_optimizer": parallel.zero_stage > 0,
        "strategy_ckpt_config": strategy_files,
    }
    if parallel.parallel_mode == "auto_parallel":
        settings["search_mode"] = parallel.search_mode or "sharding_propagation"
    if parallel.zero_stage:
        threshold = parallel.parallel_optimizer_config.parallel_optimizer_threshold
        settings["parallel_optimizer_config"] = {
            "optimizer_level": f"level{parallel.zero_stage}",
            "optimizer_weight_shard_size": parallel.shard_size or topology.data,
            "parallel_optimizer_threshold": threshold,
        }
    if topology.pipeline > 1:
        settings |= {
            "pipeline_stages": topology.pipeline,
            "pipeline_config": {"pipeline_interleave": False, "pipeline_scheduler": parallel.pipeline_schedule},
            "pipeline_result_broadcast": True,
        }
    return settings


def strategy_file(config: Run, rank: int) -> str:
    """Return the file in which a rank's compiler writes how it split the parameters."""
    name = (
        config.parallel.strategy_ckpt_config.save_file
        or f"{config.output_dir}/strategy/ckpt_strategy_rank_{{rank}}.ckpt"
    )
    return name.replace("{rank}", str(rank))


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

_OURS = {key: rule.key for key, rule in DEEPSPEED.items() if isinstance(rule, MapTo)} | {
    "zero_optimization.offload_optimizer": "deepspeed.offload_optimizer",
    "zero_optimization.offload_param": "deepspeed.offload_parameters",
    "communication_data_type": "precision.reduction",
    "data_types": "precision.reduction",
    "fp16": "",
    "fp16.enabled": "precision.parameters",
    "fp16.loss_scale": "loss_scale.mode and loss_scale.initial (0 is mode=dynamic)",
    "fp16.initial_scale_power": "loss_scale.initial (2 to this power)",
    "bf16": "",
    "bf16.enabled": "precision.parameters",
    "zero_force_ds_cpu_optimizer": "deepspeed.build_kernels",
}
"""Keys and sections of DeepSpeed that follow from ours; empty where no key of ours changes them."""

_REPLACED = {
    "optimizer": "optimizer.*",
    "scheduler": "optimizer.schedule, warmup_steps and decay_steps",
    "amp": "precision",
    "torch_autocast": "precision",
    "activation_checkpointing": "train.recompute",
    "tensorboard": "logging.tensorboard",
}
"""Sections of DeepSpeed that correspond to other keys of ours."""

_OF_FLOAT16 = {*(key for key in DEEPSPEED if key.startswith("fp16.")), "fp16.consecutive_hysteresis"}
"""Keys without effect where fp16 is off or the scale is static."""

_FREE = {
    "zero_optimization", "steps_per_print", "wall_clock_breakdown", "dump_state",
    "memory_breakdown", "comms_logger", "flops_profiler",
    "prescale_gradients", "gradient_predivide_factor", "aio", "timers", "csv_monitor", "wandb",
    "comet", "pipeline",
}  # fmt: skip
"""Settings that a user's file may add: how DeepSpeed does its work, never what it computes."""


def deepspeed_settings(config: Run, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return DeepSpeed's config of a run.

    ``own`` is a user's ds_config.json, whose "auto" stands for the value that follows from the run.
    It has no scheduler, and an optimizer only if its kernels are wanted, because the engine brings
    ours. Without ZeRO the engine also clips and keeps the float32 copies, and DeepSpeed sees a
    float32 run. Raises ConfigError where ``own`` contradicts the run.
    """
    precision, optimizer, wish = config.precision, config.optimizer, config.deepspeed
    zero: dict[str, Any] = {"stage": config.parallel.zero_stage}
    if wish.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if wish.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    held = precision.parameters if zero["stage"] else None  # settings of DeepSpeed's optimizer
    settings: dict[str, Any] = {
        "train_batch_size": config.train.global_batch_size,
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": config.train.accumulation_steps,
        "gradient_clipping": optimizer.clip_grad if held else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's own SGD
        "zero_force_ds_cpu_optimizer": wish.build_kernels,
        "communication_data_type": _SHORT[precision.reduction],
        # the engine sets the loss scale before each step, so DeepSpeed's own must not change
        "fp16": {"enabled": True, "loss_scale": 1.0} if held == "float16" else {"enabled": False},
        "bf16": {
            "enabled": True,
            "check_grad_overflow": True,
            "immediate_grad_update": config.parallel.pipeline_stage > 1,
        }
        if held == "bfloat16"
        else {"enabled": False},
    }
    if held in ("float16", "bfloat16"):
        settings["data_types"] = {"grad_accum_dtype": _SHORT[precision.reduction]}
    if wish.build_kernels:
        settings |= _kernel(optimizer)
    if config.topology.pipeline > 1 and config.topology.tensor > 1:
        # DeepSpeed remembers the first shape that it split, and splits what sequence parallelism already has
        settings["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    said = _said(config)
    merged = _merged(settings | said, own or {}, f"deepspeed.config_file={wish.config_file}")
    return {
        key: settings[key] if key in said else value
        for key, value in merged.items()
        if key in settings or key not in said
    }


def _kernel(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the section that makes DeepSpeed build its kernel of a rule, if it has one."""
    match optimizer.name:
        case "adamw" | "adam":
            settings = {
                "lr": optimizer.learning_rate,
                "betas": [optimizer.beta1, optimizer.beta2],
                "eps": optimizer.epsilon,
                "adam_w_mode": optimizer.rule.decouples_decay,
            }
            return {"optimizer": {"type": "Adam", "params": settings}}
        case "sgd":
            return {}
        case _:
            assert_never(optimizer.name)


def _said(config: Run) -> dict[str, Any]:
    """Return settings in DeepSpeed's words that the engine applies itself.

    A file may repeat them, and is compared with them.
    """
    held, loss_scale = config.precision.parameters, config.loss_scale
    fp16: dict[str, Any] = {"enabled": held == "float16", "auto_cast": False, "fp16_master_weights_and_grads": False}
    if fp16["enabled"] and loss_scale.mode == "dynamic":
        power = math.log2(loss_scale.initial)
        fp16 |= {
            "loss_scale": 0,
            "initial_scale_power": int(power) if power.is_integer() else power,
            "loss_scale_window": loss_scale.window,
            "hysteresis": loss_scale.hysteresis,
            "consecutive_hysteresis": False,
            "min_loss_scale": loss_scale.minimum,
        }
    elif fp16["enabled"]:
        fp16["loss_scale"] = loss_scale.initial if loss_scale.mode == "static" else 1.0
    return {
        "gradient_clipping": config.optimizer.clip_grad,
        "data_types": {"grad_accum_dtype": _SHORT[config.precision.reduction]},
        "fp16": fp16,
        "bf16": {
            "enabled": held == "bfloat16",
            "check_grad_overflow": True,
            "bf16_master_weights_and_grads": False,
            "bf16_optimizer_states": False,
        },
    }


def _merged(settings: dict[str, Any], own: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    merged = dict(settings)
    for key, value in own.items():
        name = prefix + key
        ours = next((_OURS[part] for part in (name, prefix.rstrip(".")) if part in _OURS), None)
        if not prefix and key in _REPLACED:
            raise ConfigError(
                f"{where}: {key} is set in this run's config ({_REPLACED[key]}); set it there and remove it here"
            )
        if value == "auto" or (prefix and name in _OF_FLOAT16 and key not in settings):
            continue
        if key in settings and isinstance(settings[key], dict) and isinstance(value, Mapping):
            merged[key] = _merged(settings[key], value, where, f"{name}.")
        elif key in settings or ours is not None:
            if value != settings.get(key):
                follows = f"{settings[key]}" if key in settings else "no setting of that name"
                remedy = f"set {ours}, or remove it from the file" if ours else "remove it from the file"
                raise ConfigError(f"{where}: {name}={value}, but the run's config has {follows}; {remedy}")
        elif prefix or key in _FREE:
            merged[key] = value
        else:
            raise ConfigError(
                f"{where}: {key} is not supported by this version (it supports {', '.join(sorted(_FREE))}); remove it"
            )
    return merged
