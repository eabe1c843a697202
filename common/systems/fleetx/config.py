"""Translation of PaddleFleetX's YAML: projects/gpt of releases 2.3 and 2.4, with their _base_
files.

Keys and defaults: PaddleFleetX release/2.4, ppfleetx/configs/nlp/gpt and ppfleetx/utils/config.py.
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
from common.systems.fleetx import quantization

SYSTEM = "PaddleFleetX"
BASE = "_base_"
MARKS = frozenset({
    "_base_", "Global", "Engine", "Model", "Data", "Distributed", "Optimizer", "Generation",
    "Inference", "Offline_Eval", "Profiler",
    "Quantization", "Compress", "FusedPasses",
})  # fmt: skip
"""Top-level keys that only FleetX has."""

_ORDER = "documents and windows are shuffled again in every epoch"
_KERNELS = "the fastest kernels that the device has are taken"
_COSINE = "CosineAnnealingWithWarmupDecay"
"""Schedule that begins at last_epoch=0, and that Paddle's LRScheduler steps once as it is made
(ppfleetx/optims/lr_scheduler.py). The others begin at -1.
"""
_EVAL = "windows of the validation part are read as those of training are"

TABLE: Table = {
    "Global.device": To("device", one_of(gpu="cuda", npu="npu", cpu="cpu")),
    "Global.seed": To("seed"),
    "Global.global_batch_size": To("train.global_batch_size"),
    "Global.micro_batch_size": To("train.micro_batch_size"),
    "Global.binding_size": Without("the launcher places the processes"),
    "Global.enable_partial_send_recv": Without(_KERNELS),
    # length, log, checkpoints
    "Engine.max_steps": To("train.max_steps"),
    "Engine.run_mode": Only(("step", "epoch"), "expected step or epoch"),
    "Engine.accumulate_steps": Without("FleetX sets it to local_batch_size / micro_batch_size, and"
        " so it is here"),
    "Engine.logging_freq": To("logging.interval"),
    "Engine.eval_freq": To("validation.interval"),
    "Engine.test_iters": Without("the test part is not read; --run_mode eval measures a file"),
    "Engine.save_load.save_epoch": Without("a run does not save at the end of an epoch;"
        " checkpoint.interval is in steps"),
    "Engine.save_load.output_dir": To("output_dir"),
    "Engine.save_load.*": Without("the run folder holds it"),
    "Engine.mix_precision.custom_black_list": Without("precision says the type of each part"),
    "Engine.mix_precision.custom_white_list": Without("precision says the type of each part"),
    "Engine.mix_precision.main_grad": Without("gradients of float16 weights are summed in float32"),
    # model
    "Model.name": Only(("GPT",), "the models here are GPT; use GPT"),
    **{
        f"Model.{name}": To(f"model.{name}")
        for name in ("vocab_size", "hidden_size", "num_layers", "ffn_hidden_size",
        "initializer_range")},
    "Model.num_attention_heads": To("model.num_heads"),
    "Model.hidden_dropout_prob": To("model.dropout"),
    "Model.attention_probs_dropout_prob": To("model.attention_dropout"),
    "Model.max_position_embeddings": To("model.max_positions"),
    "Model.type_vocab_size": Without("GPT-2 has no token types"),
    **{f"Model.{name}": Only(([],), f"leave {name} empty; train.recompute_layers says how"
       " many blocks recompute")
       for name in ("no_recompute_layers", "recompute_layers")},
    **{f"Model.{name}": Without(_KERNELS) for name in ("fused_linear", "fuse_attn_qkv",
    "use_flash_attn", "fused_softmax_with_triangular")},
    "Model.scale_qk_by_layer_num": Without("it changes no result: what it divides by it multiplies"
        " with again"),
    "Model.sequence_parallel": To("parallel.sequence_parallel"),
    # parallel
    "Distributed.mp_degree": To("parallel.model_parallel"),
    "Distributed.pp_degree": To("parallel.pipeline_stage"),
    "Distributed.fuse_sequence_parallel_allreduce": Without(_KERNELS),
    "Distributed.pp_recompute_interval": Only((1,), "train.recompute is for all blocks; set 1"),
    "Distributed.schedule_mode": Without("parallel.pipeline_schedule says it"),
    "Distributed.sharding.sharding_offload": Only(
        (False,), "set it to False, and where DeepSpeed is installed engine=deepspeed"
            " deepspeed.offload_optimizer=true"
    ),
    "Distributed.sharding.*": Without("communication overlaps with computing where the engine can"),
    # data
    "Data.Train.dataset.name": Only(("GPTDataset",), "data.train takes the files of GPTDataset; use"
        " GPTDataset"),
    "Data.Train.dataset.input_dir": To("data.train"),
    "Data.Train.dataset.split": To("data.split",
    lambda value: ",".join(map(str, value)) if isinstance(value, list) else value),
    "Data.Train.dataset.max_seq_len": To("model.seq_length"),
    "Data.Train.dataset.*": Without(_ORDER),
    "Data.Train.sampler.*": Without(_ORDER),
    "Data.Train.loader.*": Without("batches are read ahead by data.prefetch"),
    "Data.Train.*": Without(_ORDER),
    "Data.Eval.*": Without(_EVAL),
    "Data.Test.*": Without("the test part is not read"),
    # optimizer
    "Optimizer.name": To("optimizer.name",
    one_of(FusedAdamW="adamw", AdamW="adamw", Adam="adam", Momentum="sgd")),
    **{f"Optimizer.{name}": To(f"optimizer.{name}") for name in ("weight_decay", "beta1", "beta2",
    "epsilon")},
    "Optimizer.lr.name": To("optimizer.schedule", one_of(
        CosineAnnealingWithWarmupDecay="cosine", LinearDecayWithWarmup="linear",
        CosineDecay="cosine"
    )),
    "Optimizer.lr.decay_steps": To("optimizer.decay_steps"),
    "Optimizer.lr.warmup_rate": To("optimizer.warmup_fraction"),
    "Optimizer.lr.max_lr": To("optimizer.learning_rate"),
    "Optimizer.lr.min_lr": To("optimizer.min_learning_rate"),
    "Optimizer.lr.use_increments": Without("the schedule counts steps"),
    "Optimizer.grad_clip.name": Only(("ClipGradByGlobalNorm",), "the global norm is clipped; use"
        " ClipGradByGlobalNorm"),
    "Optimizer.grad_clip.clip_norm": To("optimizer.clip_grad"),
    "Optimizer.tensor_fusion": Without(_KERNELS),
    "Optimizer.multi_precision": Only((True,), "the optimizer keeps float32 copies of float16"
        " weights; set True"),
    # the rest
    "Inference.*": Without("--run_mode export writes what an inference program reads"),
    "FusedPasses.*": Without(_KERNELS),
    "Generation.top_k": To("predict.top_k"),
    "Generation.top_p": To("predict.top_p", number),
    "Generation.temperature": To("predict.temperature", number),
    "Generation.repetition_penalty": To("predict.repetition_penalty", number),
    "Generation.min_dec_len": To("predict.min_new_tokens"),
    "Generation.max_dec_len": To("predict.max_new_tokens"),
    "Generation.num_return_sequences": To("predict.num_sequences"),
    "Generation.decode_strategy": To("predict.strategy",
    one_of(sampling="sampling", greedy_search="greedy", beam_search="beam_search")),
    "Generation.input_text": To("predict.prompt"),
    "Generation.use_cache": Without("generation always keeps keys and values"),
    **{f"Generation.{name}": To(f"predict.{name}") for name in ("num_beams", "num_beam_groups",
    "early_stopping")},
    **{f"Generation.{name}": To(f"predict.{name}", number) for name in ("length_penalty",
    "diversity_rate")},
    **{
        f"Generation.{name}_token_id": Only((50256,), "GPT-2's end of text is 50256")
        for name in ("bos", "eos", "pad", "forced_bos", "forced_eos")
    },
    "Offline_Eval.eval_path": To("evaluation.file"),
    "Offline_Eval.cloze_eval": To("evaluation.task",
    one_of(**{"True": "lambada", "False": "text"})),
    "Offline_Eval.overlapping_eval": To("evaluation.stride"),
    "Offline_Eval.batch_size": To("evaluation.batch_size"),
    "Offline_Eval.max_seq_len": Without("model.seq_length says it"),
    "Offline_Eval.logging_freq": Without("progress is shown anyway"),
}  # fmt: skip

_BY_HAND = (
    "Global.local_batch_size", "Engine.num_train_epochs", "Engine.eval_iters",
    "Engine.save_load.save_steps", "Engine.save_load.ckpt_dir",
    "Engine.mix_precision.use_pure_fp16", "Engine.mix_precision.scale_loss", "Model.module",
    "Model.use_recompute",
    "Model.recompute_granularity", "Model.virtual_pp_degree", "Distributed.dp_degree",
    "Distributed.sharding.sharding_degree",
    "Distributed.sharding.sharding_stage", "Profiler.enable", "Profiler.scheduler",
)  # fmt: skip
_MODULES = {"GPTModule": "resume", "GPTGenerationModule": "load", "GPTEvalModule": "load"}


def translate(tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str]) -> Translation:
    """Return our configuration of a whole YAML of FleetX. Raises ConfigError for what cannot be
    obeyed.
    """
    theirs, ours = Theirs(SYSTEM, tree, sources), Translation()
    ours.set("logging.style", "fleetx")
    ours.set("output_dir", "output")
    if theirs.peek("Optimizer.lr.name", _COSINE) == _COSINE:
        ours.set("optimizer.schedule_start", 1)
    for section in (
        _layout, _batch, _precision, _model, _checkpoint, _profile, quantization.translate
    ):  # fmt: skip
        section(theirs, ours)
    apply(TABLE, theirs, ours)
    require_all_taken(theirs, (*TABLE, *_BY_HAND, *quantization.NAMES))
    return ours


def _layout(theirs: Theirs, ours: Translation) -> None:
    degree_key, stage_key, copies_key = (
        "Distributed.sharding.sharding_degree", "Distributed.sharding.sharding_stage",
        "Distributed.dp_degree"
    )  # fmt: skip
    degree, stage, copies = (
        theirs.take_count(degree_key, 1),
        theirs.take_count(stage_key, 1),
        theirs.take_count(copies_key),
    )
    if degree > 1:
        ours.set("parallel.zero_stage", stage, theirs.where(stage_key), stage_key)
        if copies is not None and copies > 1:
            ours.set("parallel.shard_size", degree, theirs.where(degree_key), degree_key)
    if copies is not None or degree > 1:
        # without dp_degree, FleetX makes copies of the ranks that sharding leaves
        if copies is not None:
            ours.set(
                "parallel.data_parallel", copies * degree, theirs.where(copies_key), copies_key
            )
        else:
            ours.set("parallel.shard_size", degree, theirs.where(degree_key), degree_key)
    key = "Model.virtual_pp_degree"
    virtual = theirs.take_count(key, 1)
    if virtual > 1:
        ours.set("parallel.virtual_stages", virtual, theirs.where(key), key)
        ours.set("parallel.pipeline_schedule", "interleaved_1f1b", theirs.where(key), key)


def _batch(theirs: Theirs, ours: Translation) -> None:
    """local_batch_size is what one data-parallel rank takes in a step: micro_batch_size times the
    accumulation.
    """
    key, micro = "Global.local_batch_size", theirs.peek("Global.micro_batch_size", 1)
    local = theirs.take(key)
    if local is not None:
        if not isinstance(local, int) or not isinstance(micro, int) or micro < 1 or local % micro:
            theirs.refuse(key, local, f"expected a multiple of micro_batch_size={micro}")
        ours.set("train.accumulation_steps", local // micro, theirs.where(key), key)
    key = "Engine.num_train_epochs"
    epochs = theirs.take(key)
    if epochs is not None and theirs.peek("Engine.run_mode") == "epoch":
        theirs.take("Engine.max_steps")
        ours.set("train.max_epochs", epochs, theirs.where(key), key)
    elif epochs is not None:
        ours.note(key, "Engine.max_steps is the length of the run")
    key = "Engine.eval_iters"
    batches = theirs.take_number(key)
    if batches is not None:
        copies = ours.get("parallel.data_parallel", ours.get("parallel.shard_size", 1))
        ours.set(
            "validation.max_samples", batches * (local or micro) * copies, theirs.where(key), key
        )


def _precision(theirs: Theirs, ours: Translation) -> None:
    prefix = "Engine.mix_precision"
    pure, enabled = theirs.take(f"{prefix}.use_pure_fp16"), theirs.take(f"{prefix}.enable", True)
    dtype, level = theirs.take(f"{prefix}.dtype", "float16"), theirs.take(f"{prefix}.level", "O2")
    scale = theirs.take_number(f"{prefix}.scale_loss")
    where = theirs.where(prefix)
    # release 2.4 says enable, dtype and level
    if pure is None and f"{prefix}.enable" in theirs.names:
        pure = enabled and level == "O2"
        if enabled and level == "O1":
            ours.set(
                "precision",
                {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, dtype),
                where,
                f"{prefix}.level",
            )
    if pure:
        for part in ("parameters", "compute", "softmax", "layer_norm"):
            ours.set(f"precision.{part}", dtype, where, f"{prefix}.use_pure_fp16")
    if (
        scale is not None
        and (pure or enabled)
        and dtype == "float16"
        and ours.get("precision") is not None
    ):
        ours.set("loss_scale.initial", float(scale), where, f"{prefix}.scale_loss")
        ours.set("loss_scale.hysteresis", 2)  # Paddle's GradScaler: decr_every_n_nan_or_inf
        ours.set("loss_scale.window", 1000)  # and incr_every_n_steps
    elif scale is not None:
        ours.note(f"{prefix}.scale_loss", "float32 needs no scale")


def _model(theirs: Theirs, ours: Translation) -> None:
    key, grain_key = "Model.use_recompute", "Model.recompute_granularity"
    recompute, grain = theirs.take(key, False), theirs.take(grain_key, "full")
    if grain not in ("full", "full_attn", "core_attn"):
        theirs.refuse(grain_key, grain, "expected full, full_attn or core_attn")
    if recompute:
        ours.set(
            "train.recompute", "full" if grain == "full" else "selective", theirs.where(key), key
        )


def _checkpoint(theirs: Theirs, ours: Translation) -> None:
    module = theirs.take("Model.module", "GPTModule")
    if not isinstance(module, str) or module not in _MODULES:
        theirs.refuse("Model.module", module, f"expected {', '.join(_MODULES)}")
    key = "Engine.save_load.ckpt_dir"
    if (path := theirs.take(key)) is not None:
        ours.set(f"checkpoint.{_MODULES[module]}", path, theirs.where(key), key)
    key = "Engine.save_load.save_steps"
    if (steps := theirs.take(key)) is not None:
        ours.set("checkpoint.interval", 0 if steps == -1 else steps, theirs.where(key), key)


def _profile(theirs: Theirs, ours: Translation) -> None:
    enabled, steps = (
        theirs.take("Profiler.enable", False),
        theirs.take("Profiler.scheduler", [1, 5]),
    )
    if enabled and isinstance(steps, list) and len(steps) == 2:
        ours.set("profile.start", steps[0], theirs.where("Profiler"), "Profiler.scheduler")
        ours.set("profile.stop", steps[1], theirs.where("Profiler"), "Profiler.scheduler")
    apply({"Profiler.*": Without("profile says which steps are traced")}, theirs, ours)


def settle(ours: Translation) -> None:
    """Remove keys without effect on the backend that is chosen in the end."""
    if ours.get("train.recompute") == "none":
        ours.drop("train.recompute", "nothing is recomputed")
    if ours.get("evaluation.task") == "lambada":
        ours.drop("evaluation.stride", "a cloze test scores passages, each by itself")
