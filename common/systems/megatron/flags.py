"""Megatron-LM's and Megatron-DeepSpeed's command lines in our words.

Flags and defaults: Megatron-DeepSpeed b4d4a0e, megatron/arguments.py, and the names that
Megatron-LM has taken since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.systems.dialect import (
    Only,
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

SYSTEM = "Megatron"
PROGRAM = "pretrain_gpt.py"

_KERNELS = "the fastest kernels that the device has are taken"
_LOGGED = "metrics.jsonl and TensorBoard have the figures of every step"
_LAUNCHED = "the launcher says it"
_TEST = "it is for another model"
_IN_STEPS = "give it in steps"
_SHARED = "the table is padded to a multiple of model.vocab_multiple"

TABLE: Table = {
    # model
    **{name: To(f"model.{name}") for name in ("num_layers", "hidden_size", "ffn_hidden_size",
    "seq_length", "vocab_size")},
    "encoder_seq_length": To("model.seq_length"),
    "num_attention_heads": To("model.num_heads"),
    "max_position_embeddings": To("model.max_positions"),
    "make_vocab_size_divisible_by": To("model.vocab_multiple"),
    "padded_vocab_size": Without(_SHARED),
    "attention_dropout": To("model.attention_dropout", number),
    "hidden_dropout": To("model.dropout", number),
    "init_method_std": To("model.initializer_range", number),
    "layernorm_epsilon": To("model.layer_norm_epsilon", number),
    "norm_epsilon": To("model.layer_norm_epsilon", number),
    "kv_channels": Without("it is hidden_size / num_attention_heads"),
    "position_embedding_type": Only(("learned_absolute",), "GPT-2 learns its positions; use"
        " learned_absolute"),
    "normalization": Only(("LayerNorm",), "GPT-2 has LayerNorm"),
    "num_experts": Only((1, [1]), "mixture of experts is not in this version; leave it out"),
    **{name: Only((), "GPT-2 has it otherwise; leave the flag out") for name in (
        "apply_residual_connection_post_layernorm", "untie_embeddings_and_output_weights", "swiglu",
        "use_rotary_position_embeddings",
        "disable_bias_linear", "group_query_attention", "init_method_xavier_uniform",
        "fp32_residual_connection", "openai_gelu",
    )},
    # batch and length
    "micro_batch_size": To("train.micro_batch_size"),
    "batch_size": To("train.micro_batch_size"),
    "global_batch_size": To("train.global_batch_size"),
    "train_iters": To("train.max_steps"),
    "train_tokens": To("train.max_tokens"),
    "rampup_batch_size": Only((), "batches that grow are not in this version; leave it out"),
    "exit_interval": Without("train.max_steps ends the run; a signal stops it with a checkpoint"),
    "exit_duration_in_mins": Without("the scheduler's signal stops the run with a checkpoint"),
    # optimizer
    "optimizer": To("optimizer.name", one_of(adam="adamw", adamw="adamw", sgd="sgd")),
    "lr": To("optimizer.learning_rate", number),
    "min_lr": To("optimizer.min_learning_rate", number),
    "lr_decay_style": To("optimizer.schedule",
    one_of(cosine="cosine", linear="linear", constant="constant")),
    "lr_decay_iters": To("optimizer.decay_steps"),
    "lr_warmup_iters": To("optimizer.warmup_steps"),
    "lr_warmup_fraction": To("optimizer.warmup_fraction", number),
    "warmup": Only((), "give --lr-warmup-fraction"),
    "weight_decay": To("optimizer.weight_decay", number),
    "adam_beta1": To("optimizer.beta1", number),
    "adam_beta2": To("optimizer.beta2", number),
    "adam_eps": To("optimizer.epsilon", number),
    "sgd_momentum": To("optimizer.momentum", number),
    "clip_grad": To("optimizer.clip_grad", number),
    **{name: Only((), _IN_STEPS) for name in ("lr_decay_samples", "lr_decay_tokens",
    "lr_warmup_samples", "lr_warmup_tokens")},
    "override_lr_scheduler": Without("a resumed run takes the schedule of its configuration"),
    "use_checkpoint_lr_scheduler": Without("a resumed run takes the schedule of its configuration"),
    # precision
    "initial_loss_scale": To("loss_scale.initial", number),
    "min_loss_scale": To("loss_scale.minimum", number),
    "loss_scale_window": To("loss_scale.window", whole),
    "hysteresis": To("loss_scale.hysteresis"),
    "attention_softmax_in_fp32": Without("precision.softmax is float32"),
    "accumulate_allreduce_grads_in_fp32": Without("precision.reduction is float32"),
    "fp16_lm_cross_entropy": Only((), "the loss is taken in float32; leave the flag out"),
    # layout
    "tensor_model_parallel_size": To("parallel.model_parallel"),
    "model_parallel_size": To("parallel.model_parallel"),
    "pipeline_model_parallel_size": To("parallel.pipeline_stage"),
    "sequence_parallel": To("parallel.sequence_parallel"),
    "context_parallel_size": Only((1,), "context parallelism is not in this version; leave it out"),
    "expert_model_parallel_size": Only((1,), "mixture of experts is not in this version; leave it"
        " out"),
    "use_distributed_optimizer": To("parallel.zero_stage", lambda _: 1),
    "zero_stage": To("parallel.zero_stage", whole),
    "deepspeed_config": To("deepspeed.config_file"),
    "cpu_optimizer": To("deepspeed.offload_optimizer"),
    "no_pipeline_parallel": Without("--pipeline-model-parallel-size says it"),
    "distributed_backend": Without("the device says how ranks talk: NCCL, HCCL or Gloo"),
    "DDP_impl": Without("parallel says how gradients are summed"),
    "use_contiguous_buffers_in_ddp": Without(_KERNELS),
    "local_rank": Without(_LAUNCHED),
    "use_cpu_initialization": Without("initial weights do not depend on the device"),
    "lazy_mpu_init": Without(_LAUNCHED),
    # data
    "split": To("data.split",
    lambda value: ",".join(map(str, value)) if isinstance(value, list) else str(value).replace(" ",
    "")),
    "data_impl": Only(("mmap", "infer", "cached", "lazy"), "expected mmap, cached, lazy or infer"),
    "data_cache_path": To("data.index_cache"),
    "dataloader_type": Only(("single",), "samples are read once in an epoch; use single"),
    "vocab_file": To("data.tokenizer.vocab_file"),
    "merge_file": To("data.tokenizer.merge_file"),
    "tokenizer_type": To("data.tokenizer.type", one_of(GPT2BPETokenizer="GPT2BPETokenizer")),
    "vocab_extra_ids": Only((0,), "the vocabulary is the tokenizer's; leave it out"),
    **{name: Without("batches are read ahead by data.prefetch") for name in ("num_workers",
    "mmap_warmup", "no_mmap_bin_files")},
    **{name: Only((), "documents are packed into windows; leave the flag out") for name in
       ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")},
    # checkpoints, validation, log
    "save_interval": To("checkpoint.interval"),
    "eval_interval": To("validation.interval"),
    "log_interval": To("logging.interval"),
    "seed": To("seed"),
    "finetune": Without("--run_mode finetune and checkpoint.init_from say it"),
    **{name: Only((),
    "a checkpoint holds all that a run goes on from; leave the flag out") for name in
       ("no_save_optim", "no_save_rng", "no_load_optim", "no_load_rng", "no_load_lr_state")},
    "tensorboard_dir": Without("TensorBoard's events are in the run folder"),
    **{name: Without(_LOGGED) for name in (
        "tensorboard_log_interval", "tensorboard_queue_size", "log_params_norm",
        "log_num_zeros_in_grad", "log_timers_to_tensorboard",
        "log_batch_size_to_tensorboard", "log_validation_ppl_to_tensorboard",
        "log_optimizer_states_to_tensorboard", "timing_log_level",
        "log_throughput", "wandb_project", "wandb_exp_name", "wandb_save_dir",
    )},
    **{name: Without(_KERNELS) for name in (
        "no_masked_softmax_fusion", "no_bias_gelu_fusion", "no_bias_dropout_fusion",
        "no_gradient_accumulation_fusion", "use_flash_attn",
        "no_async_tensor_model_parallel_allreduce", "no_query_key_layer_scaling",
        "apply_query_key_layer_scaling", "onnx_safe",
        "overlap_grad_reduce", "overlap_param_gather", "transformer_impl", "use_mcore_models",
        "attention_backend",
        "no_scatter_gather_tensors_in_pipeline", "synchronize_each_layer", "profile_backward",
        "ckpt_format", "use_legacy_models",
    )},
    **{name: Without("recomputed activations are not split or moved") for name in (
        "distribute_checkpointed_activations", "partition_activations", "contigious_checkpointing",
        "checkpoint_in_cpu",
        "recompute_method", "recompute_num_layers", "checkpoint_num_layers",
    )},
    **{name: Without("ZeRO's own settings are taken") for name in ("zero_reduce_scatter",
    "zero_contigious_gradients", "use_pin_memory")},
    "remote_device": Only(("none",), "give deepspeed.offload_parameters=true"),
}  # fmt: skip

_BY_HAND = (
    "fp16", "bf16", "loss_scale", "data_path", "save", "load", "eval_iters", "train_samples",
    "checkpoint_activations", "deepspeed",
    "recompute_activations", "recompute_granularity", "deepspeed_activation_checkpointing",
    "num_layers_per_virtual_pipeline_stage",
)  # fmt: skip
FLAGS = (*TABLE, *_BY_HAND)


def translate(tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str]) -> Translation:
    """Return our configuration of Megatron's flags, by name and value. Raises ConfigError for what
    cannot be obeyed.
    """
    theirs, ours = Theirs(SYSTEM, tree, sources), Translation()
    ours.set("logging.style", "megatron")
    ours.set("output_dir", "output")
    for key, value in (
        ("model.dropout", 0.1), ("model.vocab_size", 50257), ("optimizer.schedule", "linear"),
        ("optimizer.weight_decay", 0.01),
        ("data.split", "969,30,1"), ("loss_scale.initial", 2.0**32), ("loss_scale.hysteresis", 2),
        ("logging.interval", 100),
        ("validation.interval", 1000),
    ):  # fmt: skip
        ours.set(key, value)  # Megatron's own defaults, where they are not ours
    for part in (_precision, _recompute, _lengths, _folders, _layout):
        part(theirs, ours)
    apply(TABLE, theirs, ours)
    require_all_taken(theirs, FLAGS)
    return ours


def _precision(theirs: Theirs, ours: Translation) -> None:
    for flag, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        if theirs.take(flag):
            ours.set("precision.parameters", dtype, theirs.where(flag), flag)
            ours.set("precision.compute", dtype, theirs.where(flag), flag)
    scale = theirs.take("loss_scale")
    if scale:
        ours.set("loss_scale.mode", "static", theirs.where("loss_scale"), "loss_scale")
        ours.set("loss_scale.initial", float(scale), theirs.where("loss_scale"), "loss_scale")
        if theirs.take("initial_loss_scale") is not None:
            ours.note(
                "initial_loss_scale", "it is for a dynamic scale, and --loss-scale makes it static"
            )


def _recompute(theirs: Theirs, ours: Translation) -> None:
    rules: Table = {
        "checkpoint_activations": To("train.recompute", lambda _: "full"),
        "recompute_activations": To("train.recompute", lambda _: "selective"),
        "recompute_granularity": To("train.recompute", one_of(full="full", selective="selective")),
        "deepspeed_activation_checkpointing": Without("train.recompute says it"),
    }
    apply(rules, theirs, ours)


def _lengths(theirs: Theirs, ours: Translation) -> None:
    batch = theirs.peek("global_batch_size", theirs.peek("micro_batch_size", 1))
    samples = theirs.take("train_samples")
    if samples is not None:
        ours.set(
            "train.max_steps",
            max(1, samples // batch),
            theirs.where("train_samples"),
            "train_samples",
        )
    passes = theirs.take("eval_iters", 100)
    ours.set(
        "validation.max_samples",
        passes * batch,
        theirs.where("eval_iters"),
        "eval_iters" if "eval_iters" in theirs.names else "",
    )
    paths = theirs.take("data_path")
    if paths is not None:
        ours.set(
            "data.train",
            paths if isinstance(paths, list) else [paths],
            theirs.where("data_path"),
            "data_path",
        )


def _folders(theirs: Theirs, ours: Translation) -> None:
    save, load = theirs.take("save"), theirs.take("load")
    if save is not None:
        ours.set("output_dir", str(save), theirs.where("save"), "save")
    if load is not None and load != save:
        ours.set("checkpoint.resume", str(load), theirs.where("load"), "load")
    elif load is not None:
        ours.note("load", "checkpoint.resume=auto goes on from the newest checkpoint of --save")


def _layout(theirs: Theirs, ours: Translation) -> None:
    flag = "num_layers_per_virtual_pipeline_stage"
    part = theirs.take(flag)
    if part:
        stages = theirs.peek("pipeline_model_parallel_size", 1)
        ours.set(
            "parallel.virtual_stages",
            max(1, theirs.peek("num_layers", 0) // (stages * part)),
            theirs.where(flag),
            flag,
        )
        ours.set("parallel.pipeline_schedule", "interleaved_1f1b", theirs.where(flag), flag)
    if theirs.take("deepspeed"):
        ours.set("engine", "deepspeed", theirs.where("deepspeed"), "deepspeed")
    elif theirs.peek("deepspeed_config") is not None:
        theirs.take("deepspeed_config")
        ours.note("deepspeed_config", "--deepspeed is not given")


def settle(ours: Translation) -> None:
    """Take away what has no effect with the engine that the run has in the end."""
    if ours.get("engine", "native") == "native":
        ours.drop("deepspeed.config_file", "the engine is native")
    if ours.get("optimizer.name") == "sgd":
        return
    ours.drop("optimizer.momentum", "it is for sgd")
