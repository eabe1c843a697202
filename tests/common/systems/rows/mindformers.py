"""MindFormers' smallest file, its keys without a default, and its values that mean off or all.

Sources: mindspore-lab/mindformers r0.3 and r1.0, and MindSpore 2.10 for its callbacks and data.
"""

from __future__ import annotations

from typing import Any

from common.systems.mindformers.config import DIALECT
from tests.common.systems.foreign_runs import Rows, Sentinel

MINIMAL: dict[str, Any] = {
    "context.device_target": "Ascend", "seed": 0,
    "runner_config.epochs": 2, "runner_config.batch_size": 4,
    "train_dataset.data_loader.dataset_dir": "./rows",
    "train_dataset.input_columns": ["input_ids", "attention_mask"],
    "model.model_config.type": "GPT2Config", "optimizer.type": "FusedAdamWeightDecay",
    "lr_schedule.type": "polynomial", "lr_schedule.learning_rate": 1e-4,
    "lr_schedule.lr_end": 1e-5,
}  # fmt: skip
_CONSTANT = {"lr_schedule.type": "constant", "lr_schedule.lr_end": 0.0}
_GRAPH = {"parallel.parallel_mode": 1, "parallel_config.model_parallel": 2}
_EVAL = {"do_eval": True, "eval_dataset.data_loader.dataset_dir": "./eval"}
_PROFILE = {"profile": True}
_CLIP = {"runner_wrapper.use_clip_grad": True}
BESIDE: dict[str, dict[str, Any]] = {
    "lr_schedule.type": _CONSTANT, "lr_schedule.lr_end": _CONSTANT,
    **dict.fromkeys(("profile_start_step", "profile_stop_step"), _PROFILE),
    **dict.fromkeys(("eval_step_interval", "eval_epoch_interval"), _EVAL),
    "runner_wrapper.max_grad_norm": _CLIP,
    **dict.fromkeys(
        ("parallel_config.vocab_emb_dp", "parallel_config.gradient_aggregation_group",
         "parallel_config.data_parallel", "parallel_config.use_seq_parallel",
         "recompute_config.mp_comm_recompute", "recompute_config.recompute_slice_activation"),
        _GRAPH,
    ),
    "parallel_config.micro_batch_num": _GRAPH | {"parallel_config.pipeline_stage": 2},
}  # fmt: skip
WITHOUT_DEFAULT: dict[str, str] = {
    **dict.fromkeys(
        ("seed", "runner_config.epochs", "runner_config.batch_size", "optimizer.type",
         "optimizer.learning_rate", "lr_schedule.learning_rate",
         "train_dataset.data_loader.dataset_dir"),
        "a run there ends without it",
    ),
    **dict.fromkeys(
        ("model.model_config.embedding_size", "model.model_config.dropout_prob",
         "model.model_config.hidden_dropout_prob",
         "model.model_config.attention_probs_dropout_prob", "model.model_config.softmax_dtype",
         "model.model_config.layernorm_dtype", "lr_schedule.lr_power",
         "train_dataset.data_loader.dataset_files"),
        "another name of a key that has one",
    ),
    "context.device_target": "the device that MindSpore was built for, as device=auto",
    "context.graph_kernel_flags": "none, as here",
    "context.max_call_depth": "MindSpore's 1000; a larger one changes no result",
    "context.max_device_memory": "1024GB, which is no limit, as here",
    "context.save_graphs_path": "a folder of the run, as here",
    "context.deterministic": "OFF, as here",
    "model.model_config.intermediate_size": "r1.x has expand_ratio, 4 as here",
    "model.model_config.max_position_embeddings": "GPT2Model has seq_length positions, as here",
    "model.model_config.use_flash_attention": "r0.3 has none; losses do not depend on it",
    "model.model_config.max_new_tokens": "None; max_decode_length is the window",
    "lr_schedule.warmup_ratio": "None: warmup_steps counts",
    "train_dataset.data_loader.num_samples": "None: all rows, as here",
    "eval_dataset.data_loader.num_samples": "None: all rows, as here",
    "eval_dataset.data_loader.dataset_dir": "there is nothing to validate on, as here",
    "recompute_config.parallel_optimizer_comm_recompute": "MindSpore 2.10 takes no notice of it",
    **dict.fromkeys(
        (f"runner_wrapper.scale_sense.{name}" for name in ("loss_scale_value", "scale_factor",
         "scale_window")),
        "there is no scale without them",
    ),
    **dict.fromkeys(
        (key for key in DIALECT.table if key.startswith("parallel.")
         and key != "parallel.parallel_mode"),
        "of set_auto_parallel_context, as here",
    ),
    "micro_batch_interleave_num": "1, as here",
    "parallel_config.optimizer_shard": "parallel.enable_parallel_optimizer says it",
}  # fmt: skip


def _saved(**keys: Any) -> list[dict[str, Any]]:
    return [{"type": "CheckpointMointor", "prefix": "gpt2", **keys}]


_STATIC = {"loss_scale.mode": "static", "loss_scale.initial": 1.0}
SENTINELS = [
    Sentinel("callbacks", _saved(keep_checkpoint_max=0), "one is kept (CheckpointConfig)",
             {"checkpoint.keep": 1, "checkpoint.ckpt_prefix": "gpt2"}),
    Sentinel("callbacks", _saved(), "each step, five, not asynchronous (ModelCheckpoint)",
             {"checkpoint.interval": 1, "checkpoint.keep": 5, "checkpoint.asynchronous": False}),
    Sentinel("callbacks", _saved(save_checkpoint_steps=0), "never (ModelCheckpoint)",
             {"checkpoint.interval": 0}),
    Sentinel("callbacks", _saved(save_checkpoint_seconds=60), "by the clock",
             "checkpoint.interval counts steps"),
    Sentinel("callbacks", [{"type": "MFLossMonitor", "per_print_times": 0}], "prints nothing",
             {"logging.interval": 2**40}),
    Sentinel("lr_schedule.total_steps", -1, "the steps of the run (create_lr_scheduler)",
             {"optimizer.decay_steps": None}),
    Sentinel("lr_schedule.total_steps", None, "the steps of the run (create_lr_scheduler)",
             {"optimizer.decay_steps": None}),
    Sentinel("lr_schedule.warmup_steps", None, "0", {"optimizer.warmup_steps": 0}),
    Sentinel("lr_schedule.warmup_ratio", 0.1, "it wins over warmup_steps (create_lr_scheduler)",
             {"optimizer.warmup_fraction": 0.1, "optimizer.warmup_steps": None},
             {"lr_schedule.warmup_steps": 0}),
    Sentinel("lr_schedule.lr_end", None, "1e-7 (PolynomialWithWarmUpLR)",
             {"optimizer.min_learning_rate": 1e-7}),
    Sentinel("lr_schedule.type", None, "the optimizer's rate stays (create_optimizer_scheduler)",
             {"optimizer.schedule": "constant"}),
    Sentinel("optimizer.type", "Adam", "epsilon 1e-8 (mindspore.nn.Adam)",
             {"optimizer.epsilon": 1e-8}),
    Sentinel("optimizer.type", "AdamWeightDecay", "epsilon 1e-6", {"optimizer.epsilon": 1e-6}),
    Sentinel("runner_config.per_epoch_size", -1, "no other number of steps",
             {"train.max_epochs": 2}),
    Sentinel("runner_config.sink_size", -1, "all steps of an epoch (check_runner_config)",
             {"train.sink_size": 1, "train.max_epochs": 2}),
    Sentinel("runner_config.sink_size", 2, "two steps", {"train.sink_size": 2}),
    Sentinel("runner_wrapper.use_clip_grad", None, "False (MFTrainOneStepCell)",
             {"optimizer.clip_grad": 0.0}),
    Sentinel("runner_wrapper.use_clip_grad", True, "a norm of 1 (MFTrainOneStepCell)",
             {"optimizer.clip_grad": 1.0}),
    Sentinel("runner_wrapper.use_clip_grad", False, "off, whatever max_grad_norm",
             {"optimizer.clip_grad": 0.0}, {"runner_wrapper.max_grad_norm": 1.0}),
    Sentinel("runner_wrapper.max_grad_norm", 0, "all gradients are 0",
             "use_clip_grad: False is off", _CLIP),
    Sentinel("parallel_config.pipeline_stage", 2, "clips (MFPipelineWithLossScaleCell)",
             {"optimizer.clip_grad": 1.0}, {"parallel.parallel_mode": 1}),
    Sentinel("runner_wrapper.scale_sense", None, "1 (MFTrainOneStepCell)", _STATIC),
    Sentinel("do_eval", False, "no validation during training",
             {"validation.interval": "never", "data.split": "1,0,0"},
             {"eval_dataset.data_loader.dataset_dir": "./eval", "eval_step_interval": 10}),
    Sentinel("eval_step_interval", 0, "100 (training_process)",
             {"validation.interval": 100}, _EVAL),
    Sentinel("eval_step_interval", -1, "off (EvalCallBack)",
             {"validation.interval": "never"}, _EVAL),
    Sentinel("eval_step_interval", -1, "off, and each epoch", {"validation.interval": 0},
             _EVAL | {"eval_epoch_interval": 1}),
    Sentinel("eval_dataset.data_loader.num_samples", 0, "all rows (MindDataset)",
             {"validation.max_samples": 0}, _EVAL),
    Sentinel("train_dataset.data_loader.num_samples", 0, "all rows (MindDataset)",
             {"train.max_epochs": 2, "train.max_tokens": None}),
    Sentinel("train_dataset.data_loader.num_samples", -1, "an error", "greater than 0"),
    Sentinel("train_dataset.input_columns", ["input_ids"],
             "no loss where the target is the end of text (GPT2LMHeadModel)",
             {"data.eod_mask_loss": "targets", "data.eod_id": 50256}),
    Sentinel("train_dataset.input_columns", ["input_ids", "attention_mask"],
             "a loss where the mask is 1", {"data.eod_mask_loss": False}),
    Sentinel("train_dataset.input_columns", ["input_ids", "attention_mask", "labels"],
             "targets of their own", "the next token is the target"),
    Sentinel("train_dataset.eod_reset", True, "documents are kept apart",
             "data.reset_attention_mask=true"),
    Sentinel("model.model_config.top_k", 0, "all tokens", {"predict.top_k": 0}),
    Sentinel("model.model_config.top_p", 0, "off: only a value below 1 and above 0 acts",
             {"predict.top_p": 1.0}),
    Sentinel("model.model_config.hidden_dropout_prob", 0.0, "the others keep 0.1 (GPT2Config)",
             {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.1,
              "model.embedding_dropout": 0.1}),
    Sentinel("model.model_config.compute_dtype", None, "float16 (GPT2Config)",
             {"precision.compute": "float16", "precision.parameters": "float32"}),
    Sentinel("profile", False, "off, whatever its steps",
             {"profile.start": None, "profile.memory": False}, {"profile_memory": True}),
    Sentinel("profile_memory", True, "allocations, which MindSpore records on accelerators",
             {"profile.start": 1, "profile.memory": False},
             _PROFILE | {"context.device_target": "CPU"}),
]  # fmt: skip
ROWS = {"mindformers": Rows(DIALECT, MINIMAL, WITHOUT_DEFAULT, BESIDE, SENTINELS)}
