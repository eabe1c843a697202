"""Translation of PaddleFleetX's YAML: projects/gpt of releases 2.3 and 2.4, with their _base_
files, by the rules of ``common.dialects.fleetx``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config.schema import MAX_COUNT
from common.config.values import takes_momentum
from common.dialects.fleetx import COSINE, DEFAULTS, MARKS, TABLE
from common.dialects.rules import Defaults, Ignored, MapTo, joined, listed
from common.errors import ConfigError
from common.paths import ROOT, looked_in
from common.systems.dialect import Dialect, ForeignKeys, Translation, apply

_PRESETS = {
    "pretrain_gpt_345M_single_card.yaml": "run_gpt2_345m_fleetx.yaml",
    "pretrain_gpt_345M_mp8_qat.yaml": "run_gpt2_345m_fleetx_qat.yaml",
    "pretrain_gpt_1.3B_dp8.yaml": "run_gpt2_1.3b_fleetx.yaml",
    "pretrain_gpt_6.7B_sharding16.yaml": "run_gpt2_6.7b.yaml",
    "pretrain_gpt_175B_mp8_pp16.yaml": "run_gpt2_175b.yaml",
}
_OPTIONAL = ("Generation", "Offline_Eval", "Profiler")
"""Sections of one command. Their defaults count where a file has the section."""
_WITHOUT_DECAY = ("Adam", "Momentum")
"""Optimizers of Paddle whose weight_decay is None when it is left out."""
_MODULES = {"GPTModule": "resume", "GPTGenerationModule": "load", "GPTEvalModule": "load"}
_OTHER_MODULES = {
    "GPTFinetuneModule": "fine-tuning of classes (GLUE) is not in this version; models here predict the next token",
    **dict.fromkeys(
        ("GPTModuleAuto", "GPTGenerationModuleAuto"),
        "it is for Paddle's automatic parallel; use the file of the same name beside auto/",
    ),
    "MoEModule": "mixture of experts is not in this version; use GPTModule",
}
_GPT_CN = (
    "its Chinese tokenizer, gpt-cpm-large-cn, is not here. The model is GPT: set GPT, the"
    " vocab_size of your tokenizer, and data.tokenizer"
)


def require_checkout(path: Path) -> None:
    """Raise ConfigError for a file of FleetX's repository that is not there, with the way that works."""
    if "ppfleetx" not in path.parts or path.exists():  # the folder of its files
        return
    preset = _PRESETS.get(path.name)
    raise ConfigError(
        f"{path}: no such file{looked_in(path)}; it is part of PaddleFleetX: work in your checkout"
        f" with PYTHONPATH={ROOT / 'compat' / 'fleetx'}, or give the path to it"
        + (f"; the preset of this run is {ROOT / 'configs' / 'gpt2' / preset}" if preset else "")
    )


def _defaults(tree: Mapping[str, Any]) -> Defaults:
    found = {
        key: value
        for key, value in DEFAULTS.items()
        if (section := key.partition(".")[0]) in tree or section not in _OPTIONAL
    }
    optimizer = tree.get("Optimizer")
    name = optimizer.get("name") if isinstance(optimizer, Mapping) else None
    if str(name) in _WITHOUT_DECAY:
        found["Optimizer.weight_decay"] = 0.0
    return found


def _layout(theirs: ForeignKeys, ours: Translation) -> None:
    degree_key, stage_key = (f"Distributed.sharding.sharding_{name}" for name in ("degree", "stage"))
    copies_key = "Distributed.dp_degree"
    degree, stage, copies = map(theirs.take_count, (degree_key, stage_key, copies_key))
    if degree > 1:
        ours.put("parallel.zero_stage", stage, theirs, stage_key)
        # without dp_degree, FleetX makes copies of the ranks that sharding leaves
        if copies != 1:
            ours.put("parallel.shard_size", degree, theirs, degree_key)
    if copies is not None:
        ours.put("parallel.data_parallel", copies * degree, theirs, copies_key)
    key = "Model.virtual_pp_degree"
    virtual = theirs.take_count(key)
    if virtual > 1:
        ours.put("parallel.virtual_stages", virtual, theirs, key)
        ours.put("parallel.pipeline_schedule", "interleaved_1f1b", theirs, key)


def _steps(theirs: ForeignKeys, ours: Translation) -> None:
    """local_batch_size is what one data-parallel rank takes in a step: micro_batch_size times the accumulation.

    Each of num_train_epochs has max_steps steps, in both modes: GPTDataset makes as many samples. In epochs without
    max_steps it has those of the data.
    """
    if theirs.peek("Optimizer.lr.name", COSINE) == COSINE:
        ours.set("optimizer.schedule_start", 1)
    key, micro = "Global.local_batch_size", theirs.peek("Global.micro_batch_size", 1)
    local = theirs.take(key)
    if local is not None:
        if not isinstance(local, int) or not isinstance(micro, int) or micro < 1 or local % micro:
            theirs.refuse(key, local, f"expected a multiple of micro_batch_size={micro}")
        ours.put("train.accumulation_steps", local // micro, theirs, key)
    key, epochs_key, mode_key = "Engine.max_steps", "Engine.num_train_epochs", "Engine.run_mode"
    steps, epochs = theirs.take(key), theirs.take_count(epochs_key)
    mode = theirs.take(mode_key)
    if mode not in ("step", "epoch"):
        theirs.refuse(mode_key, mode, "expected step or epoch")
    if type(steps) is not int:
        theirs.refuse(key, steps, "expected a whole number")
    if steps > 0:
        ours.put("train.max_steps", steps * epochs, theirs, epochs_key if epochs > 1 else key)
    elif mode == "epoch":
        ours.put("train.max_epochs", epochs, theirs, theirs.named(epochs_key) or mode_key)
    else:
        theirs.refuse(key, steps, "expected a whole number above 0, or run_mode: epoch")


def _validation(theirs: ForeignKeys, ours: Translation) -> None:
    """eval_iters counts global batches. Data.Eval may have other documents than Data.Train."""
    key, freq_key = "Engine.eval_iters", "Engine.eval_freq"
    batches, frequency = theirs.take(key), theirs.peek(freq_key)
    by_epoch = theirs.peek("Engine.run_mode") == "epoch"
    if type(batches) is not int or (batches < 0 and not by_epoch):
        theirs.refuse(key, batches, "expected a whole number of batches; 0 is off")
    if by_epoch and type(frequency) is int and frequency > 0:
        theirs.take(freq_key)
        ours.put("validation.interval", 0, theirs, freq_key)
    elif batches == 0:
        ours.leave_out(theirs, freq_key, "eval_iters is 0")
        ours.put("validation.interval", "never", theirs, key)
    else:
        ours.put("validation.max_batches", batches, theirs, key)


def _validation_data(theirs: ForeignKeys, ours: Translation, *, trains: bool) -> None:
    """Take the documents of Data.Eval, if they are others than those of Data.Train's split."""
    names = ("input_dir", "split", "max_seq_len")
    train = [theirs.peek(f"Data.Train.dataset.{name}") for name in names]
    keys = [f"Data.Eval.dataset.{name}" for name in names]
    given = [theirs.take(key, there) for key, there in zip(keys, train, strict=True)]
    folder_key, split_key, length_key = keys
    if not trains:
        return
    if given[2] != train[2]:
        theirs.refuse(length_key, given[2], f"windows are those of Data.Train; set {train[2]}")
    other = Path(str(given[0])) != Path(str(train[0]))
    if _shares(given[1]) == _shares(train[1]) and not other:
        return
    if _shares(train[1])[0] != 1.0 or _shares(given[1])[1] != 1.0:
        theirs.refuse(
            folder_key if other else split_key,
            given[0] if other else given[1],
            f"Data.Train has {train[0]!r} with {train[1]}; give both one input_dir and one split,"
            " or the splits [1, 0, 0] and [0, 1, 0]",
        )
    ours.put("data.validation", given[0], theirs, folder_key)


def _shares(split: Any) -> list[float]:
    """Return the shares of the three parts; zeros for anything else."""
    try:
        numbers = [*map(float, joined(split).split(",")), 0.0, 0.0, 0.0][:3]
    except (TypeError, ValueError):
        return [0.0, 0.0, 0.0]
    return [weight / (sum(numbers) or 1.0) for weight in numbers]


_LEVELS = {"O0": (), "O1": ("compute",), "O2": ("parameters", "compute", "softmax", "layer_norm")}
"""Level of Paddle's mixed precision -> the parts of a step that have its dtype."""
_LISTS = {
    "custom_black_list": {"reduce_sum", "c_softmax_with_cross_entropy", "elementwise_div"},
    "custom_white_list": {"lookup_table", "lookup_table_v2"},
}
"""Operators that FleetX's files name for float32 and for the dtype of the level."""


def _precision(theirs: ForeignKeys, ours: Translation) -> None:
    prefix = "Engine.mix_precision"
    pure = theirs.take(f"{prefix}.use_pure_fp16")
    enabled, dtype, level = (theirs.take(f"{prefix}.{name}") for name in ("enable", "dtype", "level"))
    if str(level).upper() == "O3":
        theirs.refuse(f"{prefix}.level", level, "the optimizer keeps float32 weights here; use O2")
    if str(level).upper() not in _LEVELS:
        theirs.refuse(f"{prefix}.level", level, "expected O0, O1 or O2")
    if dtype not in ("float16", "bfloat16"):
        theirs.refuse(f"{prefix}.dtype", dtype, "expected float16 or bfloat16")
    for name, known in _LISTS.items():
        operators = theirs.take(f"{prefix}.{name}") or []
        if not isinstance(operators, list) or not known.issuperset(map(str, operators)):
            theirs.refuse(f"{prefix}.{name}", operators, "precision says the type of each part instead")
        if operators:
            ours.note(f"{prefix}.{name}", "precision says the type of each part")
    parts: tuple[str, ...] = _LEVELS["O2"] if pure else ()
    key = f"{prefix}.use_pure_fp16"
    if enabled and not pure:  # release 2.4
        parts, key = _LEVELS[str(level).upper()], f"{prefix}.level"
    for part in parts:
        ours.put(f"precision.{part}", dtype, theirs, key)
    key = f"{prefix}.scale_loss"
    scale = theirs.take_number(key)
    if parts and dtype == "float16":
        ours.put("loss_scale.initial", float(scale), theirs, key)
        ours.set("loss_scale.hysteresis", 2)  # Paddle's GradScaler: decr_every_n_nan_or_inf
        ours.set("loss_scale.window", 1000)  # and incr_every_n_steps
    else:
        ours.note_given(theirs, key, f"{dtype if parts else 'float32'} needs no scale")


def _model(theirs: ForeignKeys, ours: Translation) -> None:
    key, grain_key = "Model.use_recompute", "Model.recompute_granularity"
    recompute, grain = theirs.take(key, False), theirs.take(grain_key)
    if grain not in ("full", "full_attn", "core_attn"):
        theirs.refuse(grain_key, grain, "expected full, full_attn or core_attn")
    if recompute:
        ours.put("train.recompute", "full" if grain == "full" else "selective", theirs, key)


def _checkpoint(theirs: ForeignKeys, ours: Translation) -> None:
    """Take the kind of model first: another one has keys that are not known here."""
    module, name = theirs.take("Model.module", "GPTModule"), theirs.take("Model.name", "GPT")
    if not isinstance(module, str) or module not in _MODULES:
        expected = f"expected {', '.join(_MODULES)}"
        theirs.refuse("Model.module", module, _OTHER_MODULES.get(str(module), expected))
    if name != "GPT":
        theirs.refuse("Model.name", name, _GPT_CN if name == "GPT-cn" else "the models here are GPT; use GPT")
    _validation_data(theirs, ours, trains=module == "GPTModule")
    apply({"Engine.save_load.ckpt_dir": MapTo(f"checkpoint.{_MODULES[module]}")}, theirs, ours)


def _evaluation(theirs: ForeignKeys, ours: Translation) -> None:
    key = "Offline_Eval.max_seq_len"
    length, window = theirs.take(key), theirs.peek("Data.Train.dataset.max_seq_len")
    if length is not None and length != window:
        theirs.refuse(key, length, f"windows have the model's length; set {window}")
    if theirs.peek("Offline_Eval.cloze_eval") is False:  # LM_Eval_Dataset does it with any text
        ours.set("evaluation.detokenize", "wikitext")


def _profile(theirs: ForeignKeys, ours: Translation) -> None:
    """Paddle counts steps from 0 and leaves out the end. Without a scheduler it traces all."""
    enabled, steps = theirs.take("Profiler.enable", False), theirs.take("Profiler.scheduler")
    first, last, key = 1, MAX_COUNT, "enable"
    if isinstance(steps, list) and steps and all(type(step) is int for step in steps[:2]):
        key = "scheduler"
        first, last = (steps[0] + 1, steps[1]) if len(steps) > 1 else (1, steps[0])
    if enabled:
        ours.set("profile.start", first, theirs.where("Profiler"), f"Profiler.{key}")
        ours.set("profile.stop", last, theirs.where("Profiler"), f"Profiler.{key}")
    apply({"Profiler.*": Ignored("profile says which steps are traced")}, theirs, ours)


_QUANTIZATION = ("Quantization", "Compress.Quantization")
"""Section of release 2.3, and of 2.4."""
_LINEARS = {
    "q_proj": ("attn.q_proj",), "k_proj": ("attn.k_proj",), "v_proj": ("attn.v_proj",),
    "qkv_proj": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "out_proj": ("attn.c_proj",), "linear1": ("mlp.c_fc",), "linear2": ("mlp.c_proj",),
}  # fmt: skip
"""FleetX's name of a block's layer -> ours."""
_LAYER_TYPES = {"Linear", "ColumnParallelLinear", "RowParallelLinear"}


def _quantization(theirs: ForeignKeys, ours: Translation) -> None:
    for section in _QUANTIZATION:
        if not list(theirs.under(f"{section}.")):
            continue
        enable = f"{section}.enable"
        value = theirs.take(enable, False)
        if value not in (True, False):
            theirs.refuse(enable, value, "expected True or False")
        if not value:
            apply({f"{section}.*": Ignored("it is not enabled")}, theirs, ours)
            continue
        # PaddleSlim's defaults, as FleetX's docs/compression.md says too
        ours.set("quantization.weights", "channel_wise_abs_max")
        ours.set("quantization.activations", "moving_average_abs_max")
        key = f"{section}.activation_preprocess_type"
        if (value := theirs.take(key)) == "PACT":
            ours.note(key, "the moving average of the maxima clips activations, not a learned bound")
        elif value not in (None, "None", "null"):
            theirs.refuse(key, value, "expected None or PACT")
        key = f"{section}.quantizable_layer_type"
        kinds = theirs.take(key)
        if kinds is not None and not (isinstance(kinds, list) and _LAYER_TYPES & set(map(str, kinds))):
            theirs.refuse(key, kinds, f"expected a list with {', '.join(sorted(_LAYER_TYPES))}")
        prefix = f"{section}.skip_tensor_map"
        skip: list[str] = []
        for key in list(theirs.under(f"{prefix}.")):
            names = theirs.take(key)
            block = re.fullmatch(r"block_(\d+)", key.rpartition(".")[2])
            if block is None:
                theirs.refuse(key, names, "expected block_0, block_1 ... with the names of layers")
            for name in map(str, listed(names)):
                if name not in _LINEARS:
                    theirs.refuse(key, names, f"expected layers among {', '.join(_LINEARS)}")
                skip += [f"h.{block[1]}.{linear}" for linear in _LINEARS[name]]
        if skip:
            ours.put("quantization.skip", skip, theirs, prefix)
        elif theirs.peek(prefix) is None:
            theirs.take(prefix)


def settle(ours: Translation) -> None:
    """Remove keys without effect on the backend that is chosen in the end."""
    if ours.get("train.recompute") == "none":
        ours.drop("train.recompute", "nothing is recomputed")
    if ours.get("evaluation.task") == "lambada":
        ours.drop("evaluation.stride", "a cloze test scores passages, each by itself")
    if not takes_momentum(ours.get("optimizer.name")):
        ours.drop("optimizer.momentum", "it is for Momentum")
    ours.settle_end_of_text(50256)  # of the tokenizer that FleetX has for GPT


DIALECT = Dialect(
    system="PaddleFleetX", table=TABLE, defaults=DEFAULTS, defaults_of=_defaults,
    # GPTDataset: no loss where the input is the end of text
    begin={"logging.style": "fleetx", "data.eod_mask_loss": True},
    parts=(
        _checkpoint, _layout, _validation, _steps, _precision, _model, _evaluation, _profile,
        _quantization,
    ),
    settle=settle, base="_base_", marks=MARKS,
)  # fmt: skip
