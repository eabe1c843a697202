"""MindFormers' YAML in our words: run_gpt2*.yaml of r0.3 to r1.x, with their base_config files.

Keys and defaults: mindformers r0.3 and r1.0, configs/gpt2 and
mindformers/models/gpt2/gpt2_config.py.
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
)

SYSTEM = "MindFormers"
BASE = "base_config"
MARKS = frozenset({
    "base_config", "runner_config", "runner_wrapper", "lr_schedule", "callbacks", "train_dataset",
    "train_dataset_task", "trainer",
    "moe_config", "processor", "resume_or_finetune_checkpoint", "use_parallel", "auto_trans_ckpt",
})  # fmt: skip
"""Keys at the top that are MindFormers' alone."""

_FLOAT = one_of(
    float16="float16",
    float32="float32",
    bfloat16="bfloat16",
    fp16="float16",
    fp32="float32",
    bf16="bfloat16",
)
_LOADED = "batches are read ahead by data.prefetch"
_RESUMED = "the checkpoint that is resumed knows it"
_TOKENIZER = "data.tokenizer names the files of the vocabulary"
_WATCH = "checkpoints, metrics.jsonl and the run folder are written anyway"

TABLE: Table = {
    "seed": To("seed"),
    "output_dir": To("output_dir"),
    "run_mode": Without("--run_mode of the command line says it"),
    "use_parallel": Without("the launcher decides how many processes there are"),
    "trainer.*": Without("there is one trainer"),
    # device
    "context.device_target": To("device", one_of(Ascend="npu", GPU="cuda", CPU="cpu")),
    **{
        f"context.{name}": To(f"context.{name}")
        for name in (
            "mode", "device_id", "enable_graph_kernel", "graph_kernel_flags", "max_call_depth",
            "max_device_memory", "save_graphs",
            "save_graphs_path",
        )
    },
    "context.*": Without("MindSpore's own default is taken"),
    # length and batch
    "runner_config.epochs": To("train.max_epochs"),
    "runner_config.batch_size": To("train.micro_batch_size"),
    "runner_config.gradient_accumulation_steps": To("train.accumulation_steps"),
    "runner_config.per_epoch_size": Without("an epoch is all samples"),
    "runner_config.image_size": Without("there are no images"),
    **{f"runner_config.{name}": Only((0,), f"{_RESUMED}; set 0") for name in ("initial_epoch",
    "has_trained_epoches", "has_trained_steps")},
    # model
    "model.model_config.type": Only(("GPT2Config",), "the models here are GPT-2; use GPT2Config"),
    "model.arch.type": Only(("GPT2LMHeadModel",), "the models here are language models; use"
        " GPT2LMHeadModel"),
    **{
        f"model.model_config.{name}": To(f"model.{name}")
        for name in ("seq_length", "vocab_size", "num_layers", "num_heads", "initializer_range")
    },
    "model.model_config.embedding_size": To("model.hidden_size"),
    "model.model_config.hidden_size": To("model.hidden_size"),
    "model.model_config.intermediate_size": To("model.ffn_hidden_size"),
    "model.model_config.max_position_embeddings": To("model.max_positions"),
    "model.model_config.layernorm_epsilon": To("model.layer_norm_epsilon"),
    "model.model_config.dropout_prob": To("model.embedding_dropout"),
    "model.model_config.embedding_dropout_prob": To("model.embedding_dropout"),
    "model.model_config.hidden_dropout_prob": To("model.hidden_dropout"),
    "model.model_config.hidden_dropout_rate": To("model.hidden_dropout"),
    "model.model_config.attention_probs_dropout_prob": To("model.attention_dropout"),
    "model.model_config.attention_dropout_rate": To("model.attention_dropout"),
    "model.model_config.hidden_act": Only(("gelu", "fast_gelu"), "GPT-2 has GELU; use gelu or"
        " fast_gelu"),
    "model.model_config.param_init_type": To("precision.parameters", _FLOAT),
    "model.model_config.compute_dtype": To("precision.compute", _FLOAT),
    "model.model_config.softmax_dtype": To("precision.softmax", _FLOAT),
    "model.model_config.softmax_compute_type": To("precision.softmax", _FLOAT),
    "model.model_config.layernorm_dtype": To("precision.layer_norm", _FLOAT),
    "model.model_config.layernorm_compute_type": To("precision.layer_norm", _FLOAT),
    "model.model_config.use_flash_attention": Without("the fastest attention that the device has is"
        " taken"),
    "model.model_config.use_prompt_flash_attention": Without("the fastest attention that the device"
        " has is taken"),
    "model.model_config.use_past": Without("generation always keeps keys and values"),
    "model.model_config.batch_size": Without("runner_config.batch_size and predict.batch_size say"
        " it"),
    "model.model_config.eos_token": Only((50256,), "GPT-2's end of text is 50256"),
    "model.model_config.eos_token_id": Only((50256,), "GPT-2's end of text is 50256"),
    "model.model_config.bos_token_id": Only((50256,), "GPT-2's end of text is 50256"),
    "model.model_config.pad_token_id": Without("windows are full, nothing is padded"),
    "model.model_config.unk_token_id": Without("byte-level BPE knows every text"),
    "model.model_config.is_encoder_decoder": Only((False,), "GPT-2 is a decoder"),
    "model.model_config.is_dynamic": Without("shapes are fixed in training"),
    "model.model_config.repetition_penalty": To("predict.repetition_penalty", number),
    "model.model_config.top_k": To("predict.top_k"),
    "model.model_config.top_p": To("predict.top_p", number),
    "model.model_config.do_sample": To("predict.strategy",
    one_of(**{"True": "sampling", "False": "greedy"})),
    "model.model_config.max_decode_length": Without("predict.max_new_tokens says how much is"
        " generated"),
    "model.model_config.max_new_tokens": To("predict.max_new_tokens"),
    # optimizer and schedule
    "optimizer.type": To(
        "optimizer.name",
        one_of(FusedAdamWeightDecay="adamw", FP32StateAdamWeightDecay="adamw",
        AdamWeightDecay="adamw", AdamW="adamw", Adam="adam"),
    ),
    **{f"optimizer.{name}": To(f"optimizer.{name}") for name in ("beta1", "beta2", "weight_decay")},
    "optimizer.eps": To("optimizer.epsilon"),
    "optimizer.learning_rate": To("optimizer.learning_rate"),
    "lr_schedule.type": To("optimizer.schedule", one_of(
        polynomial="polynomial", PolynomialWithWarmUpLR="polynomial", cosine="cosine",
        CosineWithWarmUpLR="cosine",
        linear="linear", LinearWithWarmUpLR="linear", constant="constant",
        ConstantWarmUpLR="constant",
    )),
    "lr_schedule.learning_rate": To("optimizer.learning_rate"),
    "lr_schedule.lr_end": To("optimizer.min_learning_rate"),
    "lr_schedule.warmup_steps": To("optimizer.warmup_steps"),
    "lr_schedule.warmup_ratio": To("optimizer.warmup_fraction"),
    "lr_schedule.lr_power": To("optimizer.power"),
    "lr_schedule.warmup_lr_init": Only((0, 0.0), "the warm-up begins at 0; set 0"),
    "lr_scale": Only((False,), "the learning rate is what lr_schedule says; set False"),
    "lr_scale_factor": Without("lr_scale is off"),
    "layer_scale": Only((False,), "all layers have one learning rate; set False"),
    "layer_decay": Without("layer_scale is off"),
    "runner_wrapper.type": Without("the engine follows from parallel"),
    "runner_wrapper.max_grad_norm": To("optimizer.clip_grad"),
    # parallel
    "parallel.*": To(""),
    "parallel_config.expert_parallel": Only((1,), "mixture of experts is not in this version; set"
        " 1"),
    **{f"parallel_config.{name}": To(f"parallel.{name}") for name in ("model_parallel",
    "pipeline_stage", "gradient_aggregation_group")},
    "parallel_config.use_seq_parallel": To("parallel.sequence_parallel"),
    "moe_config.expert_num": Only((1,), "mixture of experts is not in this version; set 1"),
    "moe_config.*": Without("there is one expert"),
    "recompute_config.mp_comm_recompute": To("train.mp_comm_recompute"),
    "recompute_config.recompute_slice_activation": To("train.recompute_slice_activation"),
    "recompute_config.parallel_optimizer_comm_recompute": Only((False,), "MindSpore 2.10 takes no"
        " notice of it; set False"),
    # data
    "train_dataset.data_loader.type": Only(("MindDataset",), "data.train takes a MindRecord, or"
        " what tools/preprocess_data.py writes"),
    "train_dataset.data_loader.dataset_dir": To("data.train"),
    "train_dataset.data_loader.shuffle": To("data.shuffle"),
    "train_dataset.input_columns": Without("the column input_ids is read"),
    "train_dataset.repeat": Only((1,), "runner_config.epochs says how often the samples are seen;"
        " set 1"),
    "train_dataset.drop_remainder": Without("every batch is full"),
    "train_dataset.*": Without(_LOADED),
    "train_dataset_task.type": Without("training predicts the next token"),
    "train_dataset_task.*": Without("train_dataset says it"),
    "eval_dataset.data_loader.dataset_dir": To("data.validation"),
    "eval_dataset.*": Without("validation windows are read in order"),
    "eval_dataset_task.*": Without("validation windows are read in order"),
    "processor.*": Without(_TOKENIZER),
    "metric.*": Without("loss and perplexity are measured"),
    # checkpoints, watching
    "eval_callbacks": Without(_WATCH),
    "do_eval": Without("validation.interval says how often the validation runs"),
    "eval_step_interval": Without("validation.interval says how often the validation runs"),
    "eval_epoch_interval": Without("validation.interval says how often the validation runs"),
    "auto_trans_ckpt": Without("checkpoints are read in every layout"),
    "src_strategy_path_or_dir": Without("checkpoints are read in every layout"),
    "only_save_strategy": Only((False,), "strategy files are written by every run in modes 1 and 2;"
        " set False"),
    "remote_save_url": Without("a ModelArts job gives --train_url"),
    "aicc_config.*": Without("a ModelArts job gives --train_url"),
    "auto_tune": Without("reading the data takes no part of a step that could be tuned"),
    "autotune_per_step": Without("there is no tuning"),
    "filepath_prefix": Without("there is no tuning"),
    "init_start_profile": Without("profile_start_step says it"),
    "profile_communication": Without("the trace has it"),
}  # fmt: skip

_PARALLEL = {
    "parallel_mode", "gradients_mean", "enable_alltoall", "full_batch", "search_mode",
    "enable_parallel_optimizer",
    "parallel_optimizer_config",
}  # fmt: skip
_SAVED = {
    "prefix": "checkpoint.ckpt_prefix",
    "save_checkpoint_steps": "checkpoint.interval",
    "keep_checkpoint_max": "checkpoint.keep",
    "async_save": "checkpoint.asynchronous",
}
_BY_HAND = (
    "callbacks",
    "load_checkpoint",
    "resume_or_finetune_checkpoint",
    "resume_training",
    "profile",
    "profile_start_step",
)


def translate(tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str]) -> Translation:
    """Return our configuration of a whole YAML of MindFormers. Raises ConfigError for what cannot
    be obeyed.
    """
    theirs, ours = Theirs(SYSTEM, tree, sources), Translation()
    ours.set("backend", "mindspore")
    ours.set("logging.style", "mindformers")
    ours.set("output_dir", "output")
    ours.set("model.embedding_dropout", 0.1)
    for section in (_model, _length, _scale, _parallel, _callbacks, _checkpoint, _profile):
        section(theirs, ours)
    apply({key: rule for key, rule in TABLE.items() if key != "parallel.*"}, theirs, ours)
    require_all_taken(theirs, (*TABLE, *_BY_HAND, *(f"parallel.{name}" for name in _PARALLEL)))
    return ours


def _model(theirs: Theirs, ours: Translation) -> None:
    key = "model.model_config.expand_ratio"
    ratio, size = (
        theirs.take(key),
        theirs.peek(
            "model.model_config.hidden_size", theirs.peek("model.model_config.embedding_size")
        ),
    )
    if ratio is not None and isinstance(size, int):
        ours.set("model.ffn_hidden_size", int(ratio * size), theirs.where(key), key)
    key = "model.model_config.checkpoint_name_or_path"
    if theirs.take(key) is not None:
        ours.note(
            key,
            "training begins with new weights; convert_weight.py makes a folder of them for"
            " checkpoint.init_from",
        )


def _length(theirs: Theirs, ours: Translation) -> None:
    size, mode = (
        theirs.take("runner_config.sink_size"),
        theirs.take("runner_config.sink_mode", True),
    )
    if size is not None and mode and 1 <= size <= 100:
        ours.set(
            "train.sink_size",
            size,
            theirs.where("runner_config.sink_size"),
            "runner_config.sink_size",
        )
    elif size is not None:
        ours.note("runner_config.sink_size", "train.sink_size stays 1; losses do not depend on it")
    key = "lr_schedule.total_steps"
    steps = theirs.take(key, -1)
    if steps != -1:
        ours.set("optimizer.decay_steps", steps, theirs.where(key), key)
    if (
        theirs.peek("runner_config.batch_size") is None
        and (batch := theirs.peek("train_dataset.batch_size")) is not None
    ):
        ours.set(
            "train.micro_batch_size",
            batch,
            theirs.where("train_dataset.batch_size"),
            "train_dataset.batch_size",
        )


def _scale(theirs: Theirs, ours: Translation) -> None:
    prefix = "runner_wrapper.scale_sense"
    plain = theirs.take(prefix)
    kind = theirs.take(f"{prefix}.type")
    if plain is not None or kind == "FixedLossScaleUpdateCell":
        value = plain if plain is not None else theirs.take(f"{prefix}.loss_scale_value", 1.0)
        ours.set("loss_scale.mode", "static", theirs.where(prefix), prefix)
        ours.set("loss_scale.initial", float(value), theirs.where(prefix), prefix)
    elif kind not in (None, "DynamicLossScaleUpdateCell"):
        theirs.refuse(
            f"{prefix}.type",
            kind,
            "expected DynamicLossScaleUpdateCell or FixedLossScaleUpdateCell",
        )
    rules: Table = {
        f"{prefix}.loss_scale_value": To("loss_scale.initial", number),
        f"{prefix}.scale_factor": To("loss_scale.factor", number),
        f"{prefix}.scale_window": To("loss_scale.window"),
    }
    apply(rules, theirs, ours)
    key = "runner_wrapper.use_clip_grad"
    clip = theirs.take(key)
    if clip is not None and (not clip or theirs.peek("runner_wrapper.max_grad_norm") is None):
        ours.set("optimizer.clip_grad", 1.0 if clip else 0.0, theirs.where(key), key)


def _parallel(theirs: Theirs, ours: Translation) -> None:
    mode = theirs.peek("parallel.parallel_mode", 0)
    own: Table = {
        f"parallel.{name}": To(f"parallel.{name}")
        for name in sorted(_PARALLEL - {"parallel_optimizer_config", "gradients_mean"})
    }
    loss_mean = {
        "parallel.loss_repeated_mean": Only(
            (True,), "the loss is the mean over all tokens; set True"
        )
    }
    means = Without("gradients are of the mean over the global batch")
    rules: Table = {
        **own,
        **loss_mean,
        "parallel.gradients_mean": means,
        "parallel.strategy_ckpt_save_file": To("parallel.strategy_ckpt_config.save_file"),
        "parallel.strategy_ckpt_load_file": To("parallel.strategy_ckpt_config.load_file"),
        "parallel.dataset_strategy": Without("the data are split over data-parallel ranks"),
        "parallel.parallel_optimizer_config.parallel_optimizer_threshold": To(
            "parallel.parallel_optimizer_config.parallel_optimizer_threshold"
        ),
        "parallel.parallel_optimizer_config.gradient_accumulation_shard": To(
            "parallel.parallel_optimizer_config.gradient_accumulation_shard"
        ),
        "micro_batch_interleave_num": To("parallel.micro_batch_interleave_num"),
        "parallel_config.optimizer_shard": To("parallel.enable_parallel_optimizer"),
        "parallel_config.vocab_emb_dp": To("parallel.vocab_emb_dp"),
    }
    if (
        theirs.peek("parallel_config.optimizer_shard") is not None
        and theirs.peek("parallel.enable_parallel_optimizer") is not None
    ):
        theirs.take("parallel_config.optimizer_shard")
        ours.note("parallel_config.optimizer_shard", "parallel.enable_parallel_optimizer says it")
    apply(rules, theirs, ours)
    stages = theirs.peek("parallel_config.pipeline_stage", 1)
    key = "parallel_config.data_parallel"
    copies = theirs.take(key)
    if copies is not None and mode in (0, "data_parallel"):
        ours.note(key, "in parallel_mode 0 every device has a copy of the model")
    elif copies is not None:
        ours.set("parallel.data_parallel", copies, theirs.where(key), key)
    key = "parallel_config.micro_batch_num"
    parts = theirs.take(key)
    if parts is not None and stages > 1:
        ours.set("train.accumulation_steps", parts, theirs.where(key), key)
    elif parts is not None:
        ours.note(
            key,
            "MindFormers splits batches for a pipeline only; train.accumulation_steps does it"
            " everywhere",
        )
    key = "recompute_config.recompute"
    chosen = theirs.take("recompute_config.select_recompute", False)
    if (recompute := theirs.take(key)) is not None or chosen:
        value = (
            "full"
            if recompute is True
            else "selective"
            if chosen
            else "none"
            if recompute is False
            else recompute
        )
        ours.set("train.recompute", value, theirs.where(key), key)


def _callbacks(theirs: Theirs, ours: Translation) -> None:
    for place, callback in enumerate(theirs.take("callbacks", [])):
        rest = dict(callback) if isinstance(callback, dict) else {"type": callback}
        kind, at = rest.pop("type", None), f"callbacks.{place}"
        known: dict[str, str] = {}
        if kind == "MFLossMonitor":
            known = {"per_print_times": "logging.interval"}
        elif kind in ("CheckpointMointor", "CheckpointMonitor"):
            known = _SAVED
        elif kind not in ("SummaryMonitor", "ObsMonitor", "EvalCallBack", "ProfileMonitor"):
            theirs.refuse(
                at,
                kind,
                "this callback is not known; expected MFLossMonitor, CheckpointMointor,"
                " SummaryMonitor or ObsMonitor",
            )
        for name, value in rest.items():
            if name in known and value is not None:
                ours.set(known[name], value, theirs.where("callbacks"), f"{at}.{name}")
            else:
                ours.note(f"{at}.{name}", _WATCH)


def _checkpoint(theirs: Theirs, ours: Translation) -> None:
    resume = theirs.take("resume_training", False)
    for key in ("load_checkpoint", "resume_or_finetune_checkpoint"):
        if (path := theirs.take(key)) is not None:
            ours.set(
                "checkpoint.resume" if resume else "checkpoint.init_from",
                path,
                theirs.where(key),
                key,
            )


def _profile(theirs: Theirs, ours: Translation) -> None:
    wanted = theirs.take("profile", False)
    rules: Table = {
        "profile_start_step": To("profile.start"),
        "profile_stop_step": To("profile.stop"),
        "profile_memory": To("profile.memory"),
    }
    if not wanted:
        rules = dict.fromkeys(rules, Without("profile is off"))
    apply(rules, theirs, ours)


def settle(ours: Translation) -> None:
    """Take away what has no effect on the backend and the device that the run has in the end,
    overrides of the command line included.
    """
    torch, device = ours.get("backend") == "torch", ours.get("device", "auto")
    mode = ours.get("parallel.parallel_mode", 0)
    compiled = (
        not torch
        and device in ("npu", "auto")
        and mode in (1, 2, "semi_auto_parallel", "auto_parallel")
    )
    if not ours.get("context.enable_graph_kernel") or torch:
        ours.drop("context.graph_kernel_flags", "enable_graph_kernel is off")
    if ours.get("parallel.vocab_emb_dp") and ours.get("parallel.pipeline_stage", 1) > 1:
        ours.drop("parallel.vocab_emb_dp", "with a pipeline the ranks split the table")
    if mode not in (2, "auto_parallel"):
        ours.drop("parallel.search_mode", "parallel_mode 2 looks for splits")
    if not compiled:
        why = (
            "on torch the work is split by our own plan"
            if torch
            else "parallel_mode 1 and 2 on Ascends have it"
        )
        for name in ("vocab_emb_dp", "gradient_aggregation_group", "full_batch", "search_mode",
        "enable_alltoall",
                     "strategy_ckpt_config", "parallel_optimizer_config"):  # fmt: skip
            ours.drop(f"parallel.{name}", why)
        if torch or device == "cpu":
            ours.drop("parallel.parallel_mode", why)
        ours.drop("train.recompute_slice_activation", why)
        ours.drop("train.mp_comm_recompute", why)
        ours.drop("parallel.micro_batch_interleave_num", why) if ours.get(
            "parallel.micro_batch_interleave_num"
        ) == 1 else None
    if ours.get("parallel.enable_parallel_optimizer") and ours.get("parallel.data_parallel") == 1:
        ours.drop("parallel.enable_parallel_optimizer", "there is one data-parallel rank")
    if torch:
        for name in (
            "mode",
            "enable_graph_kernel",
            "max_call_depth",
            "save_graphs",
            "save_graphs_path",
        ):
            ours.drop(f"context.{name}", "torch has no such graph")
        ours.drop("train.sink_size", "torch has no data sink")
        ours.drop("checkpoint.ckpt_prefix", "torch writes no .ckpt")
    if device == "cpu":
        ours.drop("context.max_device_memory", "a CPU has no memory of its own")
