"""Translation of the command lines of Megatron-LM and Megatron-DeepSpeed, by the rules of
``common.dialects.megatron``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from common.config.aliases import Sources
from common.config.load import flatten
from common.config.values import takes_momentum
from common.dialects.megatron import (
    DEEPSPEED,
    DEEPSPEED_DEFAULTS,
    DEEPSPEED_FLAGS,
    DEFAULTS,
    HELD,
    OF_LOADING,
    PROGRAM,
    STATIC,
    SYSTEM,
    TABLE,
)
from common.dialects.rules import Fixed, Ignored, MapTo, Rule, listed, number, whole
from common.errors import ConfigError
from common.parallel.batch import pad_vocabulary
from common.structured_files import read_json_mapping
from common.systems.dialect import Dialect, ForeignKeys, Translation, apply


def read_deepspeed_file(path: str, where: str, flags: ForeignKeys, ours: Translation) -> None:
    """Set keys of ours to the values of the file. where: the flag that names it. Raises ConfigError
    for a file that cannot be read, and for a value that contradicts a flag.

    flags: Megatron's. Those that DeepSpeed does not read are taken where the file leaves them out.
    """
    try:
        tree = read_json_mapping(Path(path))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    places: Sources = {(key,): f"{path} ({where})" for key in tree}
    said = {key: value for key, value in flatten(tree) if value != "auto"}  # that is what the flags say
    theirs = ForeignKeys("DeepSpeed", said, places, DEEPSPEED_DEFAULTS)
    table = dict(DEEPSPEED)
    of_scale = [name for name in DEEPSPEED if name.startswith("fp16.")]
    if not theirs.peek("fp16.enabled", False):
        table |= dict.fromkeys(of_scale, Ignored("fp16 is off"))
    elif theirs.peek("fp16.loss_scale"):
        table |= dict.fromkeys(of_scale, Ignored("the scale is static"))
        table["fp16.loss_scale"] = MapTo("loss_scale.initial", number)
        ours.set("loss_scale.mode", "static", theirs.where("fp16"), "fp16.loss_scale")
    apply(table, theirs, ours)
    for flag, key in DEEPSPEED_FLAGS.items():
        if theirs.is_left_out(key) and not flags.is_left_out(flag):
            ours.leave_out(flags, flag, f"DeepSpeed reads {key} of {path}")


GPT2_VOCABULARY = 50257
_NOTHING_LOADED = "nothing is loaded"


def _check_sizes(theirs: ForeignKeys, ours: Translation) -> None:
    """Check sizes that follow from others here, and the activation. Raises ConfigError for another value."""
    if theirs.peek("openai_gelu"):
        ours.leave_out(theirs, "no_bias_gelu_fusion", "--openai-gelu is the tanh form")
    count = theirs.peek_count
    channels, width, heads = count("kv_channels"), count("hidden_size"), count("num_attention_heads")
    if None not in (channels, width, heads) and channels * heads != width:
        theirs.refuse("kv_channels", channels, "heads have hidden_size / num_attention_heads")
    multiple, ranks = count("make_vocab_size_divisible_by"), count("tensor_model_parallel_size")
    rows, padded = count("padded_vocab_size"), pad_vocabulary(count("vocab_size", GPT2_VOCABULARY), multiple, ranks)
    if rows not in (None, padded):
        instead = f"the table has {padded} rows; give --make-vocab-size-divisible-by"
        theirs.refuse("padded_vocab_size", rows, instead)


def _precision(theirs: ForeignKeys, ours: Translation) -> None:
    for flag, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        if theirs.take(flag):
            ours.put("precision.parameters", dtype, theirs, flag)
            ours.put("precision.compute", dtype, theirs, flag)
    if scale := theirs.take_number("loss_scale"):
        ours.put("loss_scale.mode", "static", theirs, "loss_scale")
        ours.put("loss_scale.initial", float(scale), theirs, "loss_scale")
        ours.leave_out(theirs, "initial_loss_scale", STATIC)


def _recompute(theirs: ForeignKeys, ours: Translation) -> None:
    method, flag = theirs.take("recompute_method"), "recompute_num_layers"
    layers = theirs.take_count(flag)
    if theirs.peek("recompute_granularity") == "full" and method == "block" and layers is not None:
        ours.put("train.recompute_layers", layers, theirs, flag)
        return
    ours.note_given(theirs, "recompute_method", "each block is recomputed by itself")
    ours.note_given(theirs, flag, "it acts with --recompute-granularity full --recompute-method block")


def _lengths(theirs: ForeignKeys, ours: Translation) -> None:
    flag, samples = "rampup_batch_size", theirs.take_count("train_samples")
    if (value := theirs.take(flag)) is not None:
        try:
            ramp = [whole(number) for number in listed(value)]
        except ValueError:
            ramp = []
        if len(ramp) != 3 or min(ramp) < 1:
            theirs.refuse(flag, value, "expected three counts: the first size, the increment, samples")
        ours.put("train.rampup_batch_size", ramp, theirs, flag)
    length = theirs.peek_count("seq_length") or theirs.peek_count("encoder_seq_length")
    flag = "step_batch_size_schedule"
    if (schedule := theirs.take(flag)) is not None:
        steps = _steps(theirs, flag, schedule, length or 1)
        ours.put("train.rampup_batch_size", steps, theirs, flag)
        ours.put("train.global_batch_size", steps[-1][1], theirs, flag)
    if samples is not None and length is not None:
        ours.put("train.max_tokens", samples * length, theirs, "train_samples")
        # the schedule counts samples too, unless flags of older scripts say iterations
        if not any(theirs.peek(f"lr_{name}") for name in ("decay_samples", "decay_iters", "warmup_iters")):
            ours.put("optimizer.decay_samples", samples, theirs, "train_samples")


def _validation(theirs: ForeignKeys, ours: Translation) -> None:
    """Translate the length of a validation in batches, and the steps that a profile covers."""
    flag = "eval_iters"
    passes = theirs.take_count(flag, least=0)
    if theirs.take("full_validation"):
        ours.note_given(theirs, flag, "--full-validation reads all of it")
    elif passes:
        ours.put("validation.max_batches", passes, theirs, flag)
    else:
        ours.put("validation.interval", "never", theirs, flag)
        ours.leave_out(theirs, "eval_interval", "--eval-iters 0 switches validation off")
    first = theirs.take_count("profile_step_start", least=0)
    last = theirs.take_count("profile_step_end")
    if theirs.take("profile"):  # Megatron counts steps from 0 and leaves out the end
        ours.set("profile.start", first + 1, theirs.where("profile"), "profile_step_start")
        ours.set("profile.stop", last, theirs.where("profile"), "profile_step_end")


def _steps(theirs: ForeignKeys, flag: str, text: Any, length: int) -> list[list[int]]:
    """Return pairs (first sample, size) of ``TOKENS:SIZE TOKENS:SIZE ...``. Megatron-LM's
    num_microbatches_calculator.py of 2026 divides the tokens by the length of a sample.
    """
    factors = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    pairs = []
    for entry in str(text).upper().replace(",", " ").split():
        numbers = re.fullmatch(r"(\d+\.?\d*)([KMBT]?):(\d+\.?\d*)([KMBT]?)", entry)
        if numbers is None:
            theirs.refuse(flag, text, "expected TOKENS:SIZE TOKENS:SIZE ..., such as 0:256 2B:512")
        first, size = (
            int(float(number) * factors[suffix]) for number, suffix in (numbers.groups()[:2], numbers.groups()[2:])
        )
        pairs.append([first // length, size])
    return sorted(pairs)


def _data(theirs: ForeignKeys, ours: Translation) -> None:
    for flag in ("data_path", "train_data_path"):
        if (paths := theirs.take(flag)) is not None:
            ours.put("data.train", listed(paths), theirs, flag)
            if flag == "train_data_path" and "valid_data_path" not in theirs.names:
                ours.put("data.split", "1,0,0", theirs, flag)
    if not theirs.is_left_out("wandb_project"):
        ours.put("logging.trackers", ["wandb"], theirs, "wandb_project")


def _folders(theirs: ForeignKeys, ours: Translation) -> None:
    """Translate where a run begins and is written. With --finetune it begins at step 0, with weights only."""
    save, load = theirs.take("save"), theirs.take("load")
    is_finetuning = bool(theirs.take("finetune"))
    if save is not None:
        ours.put("output_dir", str(save), theirs, "save")
    if load is None:
        ours.note_given(theirs, "finetune", _NOTHING_LOADED)
    elif is_finetuning and load == save:
        theirs.refuse("load", load, "with --finetune give another folder than that of --save")
    elif is_finetuning:
        ours.put("checkpoint.init_from", str(load), theirs, "load")
        ours.note("finetune", "checkpoint.init_from says it")
    elif load != save:
        ours.put("checkpoint.resume", str(load), theirs, "load")
    else:
        ours.note("load", "checkpoint.resume=auto resumes from the newest checkpoint of --save")
    rules: dict[str, Rule] = {flag: Fixed((), instead) for flag, instead in OF_LOADING.items()}
    if load is None:
        rules = dict.fromkeys(OF_LOADING, Ignored(_NOTHING_LOADED))
    elif is_finetuning:
        unused = (flag for flag, instead in OF_LOADING.items() if instead == HELD)
        rules |= dict.fromkeys(unused, Ignored("--finetune loads only weights"))
    apply(rules, theirs, ours)


def _layout(theirs: ForeignKeys, ours: Translation) -> None:
    """FSDP's strategy says what the distributed optimizer splits, where both are given."""
    flag = "num_virtual_stages_per_pipeline_rank"
    pieces = theirs.take_count(flag)
    if part := theirs.take_count("num_layers_per_virtual_pipeline_stage"):
        flag, stages = "num_layers_per_virtual_pipeline_stage", theirs.peek_count("pipeline_model_parallel_size", 1)
        pieces = max(1, theirs.peek_count("num_layers", 1) // (stages * part))
    if pieces:
        ours.put("parallel.virtual_stages", pieces, theirs, flag)
        ours.put("parallel.pipeline_schedule", "interleaved_1f1b", theirs, flag)
    flag = "data_parallel_sharding_strategy"
    if not theirs.is_left_out(flag) and theirs.take("use_distributed_optimizer"):
        ours.note("use_distributed_optimizer", f"--{flag.replace('_', '-')} says it")


def _deepspeed(theirs: ForeignKeys, ours: Translation) -> None:
    flag = "deepspeed_config"
    path = theirs.take(flag)
    if theirs.take("deepspeed"):
        ours.put("engine", "deepspeed", theirs, "deepspeed")
        if path is not None:
            ours.put("deepspeed.config_file", str(path), theirs, flag)
            read_deepspeed_file(str(path), theirs.where(flag), theirs, ours)
    elif path is not None:
        ours.note(flag, "--deepspeed is not given")


def settle(ours: Translation) -> None:
    """Remove keys without effect with the engine that is chosen in the end."""
    if ours.get("engine", "native") == "native":
        ours.drop("deepspeed.config_file", "the engine is native")
    if not takes_momentum(ours.get("optimizer.name")):
        ours.drop("optimizer.momentum", "it is for sgd")


DIALECT = Dialect(
    system=SYSTEM, table=TABLE, defaults=DEFAULTS,
    begin={
        "logging.style": "megatron", "output_dir": "output",
        "model.vocab_size": GPT2_VOCABULARY,  # Megatron counts the tokenizer's
    },
    parts=(
        _deepspeed, _precision, _recompute, _lengths, _validation, _data, _folders, _layout, _check_sizes,
    ),
    settle=settle, programs=(PROGRAM,),
)  # fmt: skip
