"""Translation of MindFormers' YAML, by the rules of ``common.dialects.mindformers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.config.hints import schema_keys
from common.config.schema import COMPILED, MINDSPORE
from common.device import sees_ascend
from common.dialects.mindformers import BASE, CALLBACKS, DEFAULTS, MARKS, OF_TYPES, TABLE, TARGETS, WRITTEN
from common.dialects.rules import Defaults, Ignored, MapTo, Rule
from common.systems.dialect import Dialect, ForeignKeys, Translation, apply

_COMPILED = [key for key, field in schema_keys().items() if field.json_schema_extra == COMPILED.json_schema_extra]
"""Keys of graphs that MindSpore's compiler splits. Results do not depend on them."""
_UNUSED_ON_TORCH = {
    **{key: "torch has no such graph" for key, field in schema_keys().items()
       if key.startswith("context.") and field.json_schema_extra == MINDSPORE.json_schema_extra},
    "train.sink_size": "torch has no data sink",
    "checkpoint.ckpt_prefix": "torch writes no .ckpt",
}  # fmt: skip
_UNUSED_ON_DEVICE = {
    "cpu": {
        "context.max_device_memory": "a CPU has no memory of its own",
        "context.enable_graph_kernel": "graph kernels are for accelerators",
        "context.graph_kernel_flags": "graph kernels are for accelerators",
        "context.device_id": "there is one CPU",
    },
    "auto": {"context.max_device_memory": "device=auto may be a CPU; give device=npu or cuda"},
}
_CALLBACKS = {
    "MFLossMonitor": ("per_print_times",),
    **dict.fromkeys(("CheckpointMointor", "CheckpointMonitor"), (*CALLBACKS,)[1:]),
    **dict.fromkeys(("SummaryMonitor", "ObsMonitor", "EvalCallBack", "ProfileMonitor"), ()),
}  # fmt: skip
"""Keys of ``CALLBACKS`` that each kind of callback has."""
_MASKS = {"attention_mask", "input_mask"}
"""Columns with a 0 for the padding of a row."""


def _defaults(tree: Mapping[str, Any]) -> Defaults:
    found = dict(DEFAULTS)
    for key, values in OF_TYPES.items():
        section = tree.get(key.partition(".")[0])
        kind = section.get("type") if isinstance(section, Mapping) else None
        if isinstance(kind, str) and kind in values:
            found[key] = values[kind]
    return found


def _kind(theirs: ForeignKeys, ours: Translation) -> None:
    """Refuse what is not a language model first, by the name that it has there."""
    key = "model.arch.type"
    arch = theirs.take(key)
    lora = "fine-tuning of added weights (LoRA) is not in this version; train all weights"
    others = {
        "GPT2WithLora": lora,
        "GPT2ForSequenceClassification": "fine-tuning of classes is not in this version; models here predict the next"
        " token",
    }
    if arch not in (None, "GPT2LMHeadModel"):
        theirs.refuse(key, arch, others.get(str(arch), "the models here are GPT-2; use GPT2LMHeadModel"))
    key = "model.model_config.pet_config"
    if list(theirs.under(f"{key}.")):
        theirs.refuse(f"{key}.pet_type", theirs.peek(f"{key}.pet_type"), lora)
    theirs.take(key)


def _validation(theirs: ForeignKeys, ours: Translation) -> None:
    """Source: training_process of base_trainer.py, and EvalCallBack."""
    key, step_key, epoch_key = "do_eval", "eval_step_interval", "eval_epoch_interval"
    wanted = theirs.take(key)
    steps, epochs = theirs.take(step_key) or 100, theirs.take(epoch_key) or -1
    why = "validation.interval counts steps"
    if wanted and steps > 0:
        where = theirs.where(step_key if theirs.named(step_key) else key)
        ours.set("validation.interval", steps, where, step_key)
    else:
        ours.put("validation.interval", 0 if wanted and epochs > 0 else "never", theirs, key)
        why = f"{why}; 0 is once, at the end" if wanted else "do_eval is off"
        ours.note_given(theirs, step_key, why)
    ours.note_given(theirs, epoch_key, why)


def _columns(theirs: ForeignKeys, ours: Translation) -> None:
    """Without a column of masks, GPT2LMHeadModel gives no loss where the target is the end of text."""
    key = "train_dataset.input_columns"
    columns = theirs.take(key, ["input_ids"])
    names = set(map(str, columns if isinstance(columns, list) else [columns]))
    if not {"input_ids"} <= names <= {"input_ids", *_MASKS}:
        theirs.refuse(
            key, columns, "expected input_ids, with attention_mask or not; the next token is the target of each"
        )
    if names & _MASKS:
        ours.note(key, "a row whose mask has a 0 is refused when it is read")
    else:
        ours.put("data.eod_mask_loss", "targets", theirs, key)


def _model(theirs: ForeignKeys, ours: Translation) -> None:
    key = "model.model_config.expand_ratio"
    ratio = theirs.take_number(key)
    size = theirs.peek("model.model_config.embedding_size") or theirs.peek("model.model_config.hidden_size")
    if ratio is not None and isinstance(size, int):
        ours.put("model.ffn_hidden_size", int(ratio * size), theirs, key)


def _length(theirs: ForeignKeys, ours: Translation) -> None:
    key = "runner_config.sink_size"
    size, mode = theirs.take(key), theirs.take("runner_config.sink_mode", True)
    if size is not None and (type(size) is not int or (size < 1 and size != -1)):
        theirs.refuse(key, size, "expected a whole number above 0, or -1")
    if size is not None and mode and 1 <= size <= 100:  # as train.sink_size
        ours.put("train.sink_size", size, theirs, key)
    elif size is not None:
        ours.note(key, "train.sink_size stays 1; losses do not depend on it")
    rules: dict[str, Rule] = {"lr_schedule.warmup_steps": MapTo("optimizer.warmup_steps")}
    if theirs.peek("lr_schedule.warmup_ratio") is not None:
        rules["lr_schedule.warmup_steps"] = Ignored("warmup_ratio says it")
    if theirs.peek("runner_config.batch_size") is None:
        rules["train_dataset.batch_size"] = MapTo("train.micro_batch_size")
    apply(rules, theirs, ours)


def _scale(theirs: ForeignKeys, ours: Translation) -> None:
    prefix = "runner_wrapper.scale_sense"
    plain = theirs.take_number(prefix)
    kind = theirs.take(f"{prefix}.type")
    if plain is not None or kind in (None, "FixedLossScaleUpdateCell"):
        # the wrapper's own is 1
        value = plain if plain is not None else theirs.take_number(f"{prefix}.loss_scale_value", 1)
        origin = prefix if plain is not None or kind is not None else ""
        ours.set("loss_scale.mode", "static", theirs.where(prefix), origin)
        ours.set("loss_scale.initial", float(value), theirs.where(prefix), origin)
    elif kind != "DynamicLossScaleUpdateCell":
        theirs.refuse(f"{prefix}.type", kind, "expected DynamicLossScaleUpdateCell or FixedLossScaleUpdateCell")
    key, norm_key = "runner_wrapper.use_clip_grad", "runner_wrapper.max_grad_norm"
    # MFPipelineWithLossScaleCell, which a pipeline takes, clips unless it is told not to
    piped = theirs.peek_count("parallel_config.pipeline_stage") > 1
    clip, norm = theirs.take(key, piped), theirs.take_number(norm_key)
    if clip and not norm:
        theirs.refuse(norm_key, norm, "expected a number above 0; use_clip_grad: False is off")
    source = norm_key if clip and theirs.named(norm_key) else key
    ours.put("optimizer.clip_grad", float(norm) if clip else 0.0, theirs, source)
    if not clip:
        ours.note_given(theirs, norm_key, "use_clip_grad is off")


def _parallel(theirs: ForeignKeys, ours: Translation) -> None:
    rules: dict[str, Rule] = {
        "parallel_config.data_parallel": MapTo("parallel.data_parallel"),
        "parallel_config.micro_batch_num": Ignored(
            "MindFormers splits batches for a pipeline only; train.accumulation_steps does it everywhere"
        ),
    }
    if theirs.peek("parallel.enable_parallel_optimizer") is not None:
        rules["parallel_config.optimizer_shard"] = Ignored("parallel.enable_parallel_optimizer says it")
    if theirs.peek("parallel.parallel_mode") in (0, "data_parallel"):
        rules["parallel_config.data_parallel"] = Ignored("in parallel_mode 0 every device has a copy of the model")
    if theirs.peek_count("parallel_config.pipeline_stage") > 1:
        theirs.take("runner_config.gradient_accumulation_steps")  # not with a pipeline there
        rules["parallel_config.micro_batch_num"] = MapTo("train.accumulation_steps")
    key = "recompute_config.recompute"
    if theirs.take("recompute_config.select_recompute", False) and theirs.peek(key) is not True:
        rules[key] = MapTo("train.recompute", lambda _: "selective")
    apply(rules, theirs, ours)


def _callbacks(theirs: ForeignKeys, ours: Translation) -> None:
    callbacks = theirs.take("callbacks", [])
    if not isinstance(callbacks, list):
        theirs.refuse("callbacks", callbacks, "expected a list of them")
    for place, callback in enumerate(callbacks):
        rest = dict(callback) if isinstance(callback, dict) else {"type": callback}
        kind, at = rest.pop("type", None), f"callbacks.{place}"
        if not isinstance(kind, str) or kind not in _CALLBACKS:
            known = "expected MFLossMonitor, CheckpointMointor, SummaryMonitor or ObsMonitor"
            theirs.refuse(at, kind, f"this callback is not known; {known}")
        if seconds := rest.get("save_checkpoint_seconds"):
            instead = "checkpoint.interval counts steps; give save_checkpoint_steps"
            theirs.refuse(f"{at}.save_checkpoint_seconds", seconds, instead)
        for name in _CALLBACKS[kind]:
            rule, default = CALLBACKS[name]
            value = rest.pop(name, None)
            origin = f"{at}.{name}" if value is not None else ""
            value = rule.change(default if value is None else value)
            ours.set(rule.key, value, theirs.where("callbacks"), origin)
        for name in rest:
            ours.note(f"{at}.{name}", WRITTEN)


def _checkpoint(theirs: ForeignKeys, ours: Translation) -> None:
    rule = MapTo("checkpoint.resume" if theirs.take("resume_training", False) else "checkpoint.init_from")
    apply(dict.fromkeys(("load_checkpoint", "resume_or_finetune_checkpoint"), rule), theirs, ours)


def _profile(theirs: ForeignKeys, ours: Translation) -> None:
    wanted = theirs.take("profile", False)
    names = ("profile_start_step", "profile_stop_step", "profile_memory")
    off = Ignored("profile is off")
    apply({name: MapTo(TABLE[name].hint) if wanted else off for name in names}, theirs, ours)


def settle(ours: Translation, *, whole: bool = True) -> None:
    """Take away what has no effect on the backend and the device that the run has in the end, overrides of the command
    line included.

    whole: the file is MindFormers'; else it is ours with sections of MindFormers', and keeps what the run takes anyway.
    """
    if ours.sources.get(("device",)) == "command line":
        ours.drop("context.device_target", "the command line says device")
    target = TARGETS.get(ours.get("context.device_target"), "auto")
    torch, device = ours.get("backend") == "torch", ours.get("device", target)
    if device == "auto" and not torch and not sees_ascend():
        device = "cpu"
    is_piped = ours.get("parallel.pipeline_stage", 1) != 1
    is_searched = ours.get("parallel.parallel_mode") in (2, "auto_parallel")
    is_undivided, is_whole = ours.get("parallel.data_parallel") == 1, ours.get("parallel.model_parallel", 1) == 1
    is_pynative = not torch and ours.get("context.mode") in (1, "pynative")
    rows = (
        (is_piped and whole, "parallel.vocab_emb_dp", "with a pipeline the ranks split the table"),
        (not is_searched, "parallel.search_mode", "parallel_mode 2 looks for splits"),
        (is_undivided, "parallel.enable_parallel_optimizer", "there is one data-parallel rank"),
        (is_whole, "train.recompute_slice_activation", "one tensor-parallel rank has no slices"),
        (is_whole, "parallel.sequence_parallel", "one tensor-parallel rank has nothing to split"),
        (not ours.get("context.enable_graph_kernel"), "context.graph_kernel_flags", "enable_graph_kernel is off"),
        (is_pynative, "train.recompute", "context.mode=1 keeps all activations; losses do not change"),
        (device == "cpu" and not torch, "profile.memory", "MindSpore records allocations on accelerators only"),
    )
    whys = {key: why for is_unused, key, why in rows if is_unused}
    whys |= _unused_by_graph(ours, torch, device) | _UNUSED_ON_DEVICE.get(device, {})
    whys |= _UNUSED_ON_TORCH if torch else {}
    for key, why in whys.items():
        ours.drop(key, why)
    if whole:
        ours.drop("train.parallel_optimizer_comm_recompute", "MindSpore 2.10 takes no notice of it")
        ours.settle_end_of_text(50256)  # of GPT2Config


def _unused_by_graph(ours: Translation, torch: bool, device: str) -> dict[str, str]:
    """Return keys of ours that have no effect with this kind of graph, or without a graph."""
    layout = [ours.get(f"parallel.{name}_parallel") for name in ("data", "model")]
    alone = [*layout, ours.get("parallel.pipeline_stage")] == [1, 1, 1]
    compiles = ours.get("parallel.parallel_mode") in (1, 2, "semi_auto_parallel", "auto_parallel")
    if compiles and not torch and not alone and device in ("npu", "auto"):
        why = "graphs that the compiler splits have one mask for all windows, so every target counts"
        return {"data.eod_mask_loss": why}
    why = "parallel_mode 1 and 2 on Ascends have it"
    if torch:
        why = "on torch the work is split by our own plan"
    elif alone:
        why = "one device has nothing to split"
    whys = dict.fromkeys(_COMPILED, why)
    if torch or (compiles and (device == "cpu" or alone)):
        whys["parallel.parallel_mode"] = why
        if compiles:
            whys["parallel.gradients_mean"] = "gradients are of the mean over the global batch"
    if not torch:
        whys["parallel.sequence_parallel"] = why
    return whys


DIALECT = Dialect(
    system="MindFormers", table=TABLE, defaults=DEFAULTS, defaults_of=_defaults,
    begin={
        "backend": "mindspore", "logging.style": "mindformers",
        "data.split": "1,0,0",  # train_dataset is for training, all of it
    },
    parts=(
        _kind, _model, _length, _scale, _parallel, _callbacks, _checkpoint, _profile, _validation,
        _columns,
    ),
    settle=settle, base=BASE, marks=MARKS,
)  # fmt: skip
