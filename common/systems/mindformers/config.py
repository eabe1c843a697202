"""Translation of MindFormers' YAML, by the rules of ``keys.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.config.aliases import TARGETS
from common.resolve.auto_device import sees_ascend
from common.systems.dialect import (
    Only,
    Table,
    Theirs,
    To,
    Translation,
    Without,
    apply,
    number,
    require_all_taken,
)
from common.systems.mindformers.keys import TABLE, WRITTEN

SYSTEM = "MindFormers"
BASE = "base_config"
MARKS = frozenset({
    "base_config", "runner_config", "runner_wrapper", "lr_schedule", "callbacks", "train_dataset",
    "train_dataset_task", "trainer",
    "moe_config", "processor", "resume_or_finetune_checkpoint", "use_parallel", "auto_trans_ckpt",
    "aicc_config", "swap_config",
})  # fmt: skip
"""Top-level keys that only MindFormers has."""
PARTS = frozenset({"parallel_config", "recompute_config"})
"""MindFormers' sections that files of ours may have."""

_PARALLEL = {
    "parallel_mode", "gradients_mean", "enable_alltoall", "full_batch", "search_mode",
    "enable_parallel_optimizer",
    "parallel_optimizer_config",
}  # fmt: skip
_COMPILED = (
    "parallel.vocab_emb_dp", "parallel.gradient_aggregation_group", "parallel.full_batch",
    "parallel.search_mode", "parallel.enable_alltoall", "parallel.strategy_ckpt_config",
    "parallel.parallel_optimizer_config", "parallel.micro_batch_interleave_num",
    "train.recompute_slice_activation", "train.mp_comm_recompute",
)  # fmt: skip
"""Keys of graphs that MindSpore's compiler splits. Results do not depend on them."""
_UNUSED_ON_TORCH = {
    **dict.fromkeys(
        (f"context.{name}" for name in ("mode", "enable_graph_kernel", "graph_kernel_flags",
         "max_call_depth", "save_graphs", "save_graphs_path")),
        "torch has no such graph",
    ),
    "train.sink_size": "torch has no data sink",
    "checkpoint.ckpt_prefix": "torch writes no .ckpt",
}  # fmt: skip
_UNUSED_ON_CPU = {
    "context.max_device_memory": "a CPU has no memory of its own",
    "context.enable_graph_kernel": "graph kernels are for accelerators",
    "context.graph_kernel_flags": "graph kernels are for accelerators",
    "context.device_id": "there is one CPU",
}
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
    """Return our configuration of a whole YAML of MindFormers. Raises ConfigError for keys that
    this project cannot follow.
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
        theirs.take_number(key),
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
        theirs.take_number("runner_config.sink_size"),
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
    plain = theirs.take_number(prefix)
    kind = theirs.take(f"{prefix}.type")
    if plain is not None or kind == "FixedLossScaleUpdateCell":
        value = plain if plain is not None else theirs.take_number(f"{prefix}.loss_scale_value", 1)
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
        **{
            f"parallel.{theirs_}": To(f"parallel.strategy_ckpt_config.{name}_file")
            for name in ("save", "load")
            for theirs_ in (f"strategy_ckpt_{name}_file", f"strategy_ckpt_config.{name}_file")
        },
        "parallel.strategy_ckpt_config.*": Without("a strategy file holds all parameters"),
        "parallel.device_num": Without("the launcher decides how many processes there are"),
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
    stages = theirs.peek_count("parallel_config.pipeline_stage", 1)
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
    callbacks = theirs.take("callbacks", [])
    if not isinstance(callbacks, list):
        theirs.refuse("callbacks", callbacks, "expected a list of them")
    for place, callback in enumerate(callbacks):
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
                ours.note(f"{at}.{name}", WRITTEN)


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


def settle(ours: Translation, *, whole: bool = True) -> None:
    """Take away what has no effect on the backend and the device that the run has in the end,
    overrides of the command line included.

    whole: the file is MindFormers'; else it is ours with sections of MindFormers', and keeps what
    the run takes anyway.
    """
    if ours.sources.get(("device",)) == "command line":
        ours.drop("context.device_target", "the command line says device")
    target = TARGETS.get(ours.get("context.device_target"), "auto")
    torch, device = ours.get("backend") == "torch", ours.get("device", target)
    if device == "auto" and not torch and not sees_ascend():
        device = "cpu"
    whys = {**_unused_in_layout(ours, whole), **_unused_by_graph(ours, torch, device)}
    whys |= _unused_on_device(device) | (_UNUSED_ON_TORCH if torch else {})
    for key, why in whys.items():
        ours.drop(key, why)


def _unused_in_layout(ours: Translation, whole: bool) -> dict[str, str]:
    """Return keys of ours that have no effect with this layout, and why."""
    whys: dict[str, str] = {}
    if ours.get("parallel.pipeline_stage", 1) > 1 and whole:
        whys["parallel.vocab_emb_dp"] = "with a pipeline the ranks split the table"
    if ours.get("parallel.parallel_mode") not in (2, "auto_parallel"):
        whys["parallel.search_mode"] = "parallel_mode 2 looks for splits"
    if ours.get("parallel.data_parallel") == 1:
        whys["parallel.enable_parallel_optimizer"] = "there is one data-parallel rank"
    if ours.get("parallel.model_parallel", 1) == 1:
        whys["train.recompute_slice_activation"] = "one tensor-parallel rank has no slices"
        whys["parallel.sequence_parallel"] = "one tensor-parallel rank has nothing to split"
    return whys


def _unused_by_graph(ours: Translation, torch: bool, device: str) -> dict[str, str]:
    """Return keys of ours that have no effect with this kind of graph, or without a graph."""
    whys: dict[str, str] = {}
    if not ours.get("context.enable_graph_kernel"):
        whys["context.graph_kernel_flags"] = "enable_graph_kernel is off"
    if not torch and ours.get("context.mode") in (1, "pynative"):
        whys["train.recompute"] = "context.mode=1 keeps all activations; losses do not change"
    layout = [ours.get(f"parallel.{name}_parallel") for name in ("data", "model")]
    alone = [*layout, ours.get("parallel.pipeline_stage")] == [1, 1, 1]
    compiles = ours.get("parallel.parallel_mode") in (1, 2, "semi_auto_parallel", "auto_parallel")
    if compiles and not torch and not alone and device in ("npu", "auto"):
        return whys
    why = "parallel_mode 1 and 2 on Ascends have it"
    if torch:
        why = "on torch the work is split by our own plan"
    elif alone:
        why = "one device has nothing to split"
    whys |= dict.fromkeys(_COMPILED, why)
    if torch or (compiles and (device == "cpu" or alone)):
        whys["parallel.parallel_mode"] = why
        if compiles:
            whys["parallel.gradients_mean"] = "gradients are of the mean over the global batch"
    if not torch:
        whys["parallel.sequence_parallel"] = why
    return whys


def _unused_on_device(device: str) -> dict[str, str]:
    if device == "cpu":
        return _UNUSED_ON_CPU
    if device == "auto":
        return {"context.max_device_memory": "device=auto may be a CPU; give device=npu or cuda"}
    return {}
