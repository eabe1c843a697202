"""Translation of the command lines of Megatron-LM and Megatron-DeepSpeed, by the rules of
``flag_table.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.config.update_rules import takes_momentum
from common.parallel.ramp import batch_sizes
from common.systems.dialect import (
    Switch,
    Table,
    Theirs,
    To,
    Translation,
    Without,
    apply,
    listed,
    one_of,
    require_all_taken,
    whole,
)
from common.systems.megatron.deepspeed_file import read_deepspeed_file
from common.systems.megatron.flag_table import TABLE

SYSTEM = "Megatron"
PROGRAM = "pretrain_gpt.py"

SWITCHES = frozenset({
    "fp16", "bf16", "deepspeed", "checkpoint_activations", "recompute_activations",
    "deepspeed_activation_checkpointing", "use_distributed_optimizer", "full_validation", "profile",
})  # fmt: skip
"""Flags without a value that this module reads itself."""
VALUED = frozenset({
    "loss_scale", "data_path", "train_data_path", "save", "load", "eval_iters", "train_samples",
    "recompute_granularity", "num_layers_per_virtual_pipeline_stage", "deepspeed_config",
    "num_virtual_stages_per_pipeline_rank", "data_parallel_sharding_strategy",
    "profile_step_start", "profile_step_end", "wandb_project", "rampup_batch_size",
})  # fmt: skip
"""Flags with a value that this module reads itself."""
FLAGS = (*TABLE, *SWITCHES, *VALUED)


def translate(tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str]) -> Translation:
    """Return our configuration of Megatron's flags, by name and value. Raises ConfigError for flags
    that this project cannot follow.
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
        ours.set(key, value)  # Megatron's own defaults, where ours differ
    parts = (
        _precision, _recompute, _lengths, _data, _folders, _layout, _zero, _deepspeed, _trackers,
    )  # fmt: skip
    for part in parts:
        part(theirs, ours)
    apply(TABLE, theirs, ours)
    require_all_taken(theirs, FLAGS)
    return ours


def _precision(theirs: Theirs, ours: Translation) -> None:
    for flag, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        if theirs.take(flag):
            ours.set("precision.parameters", dtype, theirs.where(flag), flag)
            ours.set("precision.compute", dtype, theirs.where(flag), flag)
    scale = theirs.take_number("loss_scale")
    if scale:
        ours.set("loss_scale.mode", "static", theirs.where("loss_scale"), "loss_scale")
        ours.set("loss_scale.initial", float(scale), theirs.where("loss_scale"), "loss_scale")
        if theirs.take("initial_loss_scale") is not None:
            ours.note(
                "initial_loss_scale", "it is for a dynamic scale, and --loss-scale makes it static"
            )


def _recompute(theirs: Theirs, ours: Translation) -> None:
    rules: Table = {
        "checkpoint_activations": To("train.recompute", Switch("full")),
        "recompute_activations": To("train.recompute", Switch("selective")),
        "recompute_granularity": To("train.recompute", one_of(full="full", selective="selective")),
        "deepspeed_activation_checkpointing": Without("train.recompute says it"),
    }
    is_full = theirs.peek("recompute_granularity") == "full"
    apply(rules, theirs, ours)
    method, flag = theirs.take("recompute_method"), "recompute_num_layers"
    where, layers = theirs.where(flag), theirs.take_count(flag)
    if is_full and method == "block" and layers is not None:
        ours.set("train.recompute_layers", layers, where, flag)
        return
    if method is not None:
        ours.note("recompute_method", "each block is recomputed by itself")
    if layers is not None:
        ours.note(flag, "it acts with --recompute-granularity full --recompute-method block")


def _lengths(theirs: Theirs, ours: Translation) -> None:
    batch = theirs.peek_count("global_batch_size", theirs.peek_count("micro_batch_size", 1))
    samples, ramp = theirs.take_count("train_samples"), _ramp(theirs)
    if ramp is not None:
        flag = "rampup_batch_size"
        ours.set("train.rampup_batch_size", ramp, theirs.where(flag), flag)
    if samples is not None:
        ours.set(
            "train.max_steps",
            max(1, batch_sizes(batch, ramp).steps_within(samples)),
            theirs.where("train_samples"),
            "train_samples",
        )
    passes, said = theirs.take_number("eval_iters", 100), "eval_iters" in theirs.names
    if theirs.take("full_validation"):
        ours.note("eval_iters", "--full-validation reads all of it")
        passes, said = 0, False
    ours.set(
        "validation.max_samples",
        passes * batch,
        theirs.where("eval_iters"),
        "eval_iters" if said else "",
    )
    first = theirs.take_number("profile_step_start", 10)
    last = theirs.take_count("profile_step_end", 12)
    if theirs.take("profile"):  # Megatron counts steps from 0 and leaves out the end
        ours.set("profile.start", first + 1, theirs.where("profile"), "profile_step_start")
        ours.set("profile.stop", last, theirs.where("profile"), "profile_step_end")


def _ramp(theirs: Theirs) -> list[int] | None:
    flag = "rampup_batch_size"
    value = theirs.take(flag)
    if value is None:
        return None
    try:
        numbers = [whole(number) for number in listed(value)]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or min(numbers) < 1:
        theirs.refuse(flag, value, "expected three counts: the first size, the increment, samples")
    return numbers


def _data(theirs: Theirs, ours: Translation) -> None:
    for flag in ("data_path", "train_data_path"):
        paths = theirs.take(flag)
        if paths is not None:
            ours.set("data.train", listed(paths), theirs.where(flag), flag)
            if flag == "train_data_path" and "valid_data_path" not in theirs.names:
                ours.set("data.split", "1,0,0", theirs.where(flag), flag)


def _folders(theirs: Theirs, ours: Translation) -> None:
    save, load = theirs.take("save"), theirs.take("load")
    if save is not None:
        ours.set("output_dir", str(save), theirs.where("save"), "save")
    if load is not None and load != save:
        ours.set("checkpoint.resume", str(load), theirs.where("load"), "load")
    elif load is not None:
        ours.note("load", "checkpoint.resume=auto resumes from the newest checkpoint of --save")


def _trackers(theirs: Theirs, ours: Translation) -> None:
    where, project = theirs.where("wandb_project"), theirs.take("wandb_project")
    if project is not None:
        ours.set("logging.trackers", ["wandb"], where, "wandb_project")
        ours.set("logging.project", str(project), where, "wandb_project")


def _layout(theirs: Theirs, ours: Translation) -> None:
    flag, other = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
    pieces = theirs.take_count(other)
    part = theirs.take_count(flag)
    if part:
        stages = theirs.peek_count("pipeline_model_parallel_size", 1)
        pieces = max(1, theirs.peek_count("num_layers", 1) // (stages * part))
    else:
        flag = other
    if pieces:
        ours.set("parallel.virtual_stages", pieces, theirs.where(flag), flag)
        ours.set("parallel.pipeline_schedule", "interleaved_1f1b", theirs.where(flag), flag)


def _zero(theirs: Theirs, ours: Translation) -> None:
    """Translate ZeRO's flags. Where both are given, FSDP's strategy says what the distributed
    optimizer splits.
    """
    flag = "data_parallel_sharding_strategy"
    stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    if theirs.peek(flag) is not None and theirs.take("use_distributed_optimizer"):
        ours.note("use_distributed_optimizer", f"--{flag.replace('_', '-')} says it")
    rules: Table = {
        flag: To("parallel.zero_stage", one_of(**stages)),
        "use_distributed_optimizer": To("parallel.zero_stage", Switch(1)),
    }
    apply(rules, theirs, ours)


def _deepspeed(theirs: Theirs, ours: Translation) -> None:
    flag = "deepspeed_config"
    path = theirs.take(flag)
    if theirs.take("deepspeed"):
        ours.set("engine", "deepspeed", theirs.where("deepspeed"), "deepspeed")
        if path is not None:
            ours.set("deepspeed.config_file", str(path), theirs.where(flag), flag)
            read_deepspeed_file(str(path), theirs.where(flag), ours)
    elif path is not None:
        ours.note(flag, "--deepspeed is not given")


def settle(ours: Translation) -> None:
    """Remove keys without effect with the engine that is chosen in the end."""
    if ours.get("engine", "native") == "native":
        ours.drop("deepspeed.config_file", "the engine is native")
    if not takes_momentum(ours.get("optimizer.name")):
        ours.drop("optimizer.momentum", "it is for sgd")
