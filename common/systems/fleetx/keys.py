"""Rules for the keys of PaddleFleetX's YAML, and their defaults.

Source: PaddleFleetX release/2.4, ppfleetx/configs/nlp/gpt and ppfleetx/utils/config.py.
"""

from __future__ import annotations

from typing import Any

from common.systems.dialect import (
    Defaults,
    Only,
    Table,
    To,
    Without,
    number,
    one_of,
    whole,
)

_ORDER = "documents and windows are shuffled again in every epoch"
_KERNELS = "the fastest kernels that the device has are taken"
COSINE = "CosineAnnealingWithWarmupDecay"
"""Schedule that begins at last_epoch=0, and that Paddle's LRScheduler steps once as it is made
(ppfleetx/optims/lr_scheduler.py). The others begin at -1.
"""
_NOT_HERE = "is not in this version; leave the section out"
END_OF_TEXT = 50256
"""Id of the end of text in the tokenizer that FleetX has for GPT."""


def _clip(norm: float | None) -> float:
    """Change a limit of the gradient norm; None is off."""
    if norm is not None and not number(norm) > 0:
        raise ValueError("expected a number above 0; for no clip leave the section grad_clip out")
    return norm or 0.0


def _split(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _length(tokens: int) -> int:
    """Change the most tokens to generate: 512 there at most, and for a number below 0."""
    return tokens if 0 <= whole(tokens) <= _MOST_GENERATED else _MOST_GENERATED


_MOST_GENERATED = 512


TABLE: Table = {
    "Global.device": To("device", one_of(gpu="cuda", npu="npu", cpu="cpu")),
    "Global.seed": To("seed"),
    "Global.global_batch_size": To("train.global_batch_size"),
    "Global.micro_batch_size": To("train.micro_batch_size"),
    "Global.binding_size": Without("the launcher places the processes"),
    "Global.enable_partial_send_recv": Without(_KERNELS),
    # length, log, checkpoints
    "Engine.accumulate_steps": Without("FleetX sets it to local_batch_size / micro_batch_size, and"
        " so it is here"),
    "Engine.logging_freq": To("logging.interval"),
    "Engine.eval_freq": To("validation.interval",
    lambda steps: steps if whole(steps) > 0 else "never"),
    "Engine.test_iters": Without("the test part is not read; --run_mode eval measures a file"),
    "Engine.save_load.save_epoch": Without("a run does not save at the end of an epoch;"
        " checkpoint.interval is in steps"),
    "Engine.save_load.output_dir": To("output_dir"),
    "Engine.save_load.*": Without("the run folder holds it"),
    "Engine.mix_precision.main_grad": Without("gradients of float16 weights are summed in float32"),
    # model
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
    "Data.Train.dataset.split": To("data.split", _split),
    "Data.Train.dataset.max_seq_len": To("model.seq_length"),
    "Data.Train.dataset.*": Without(_ORDER),
    "Data.Train.sampler.*": Without(_ORDER),
    "Data.Train.loader.*": Without("batches are read ahead by data.prefetch"),
    "Data.Train.*": Without(_ORDER),
    "Data.Eval.dataset.name": Only(("GPTDataset",), "data.validation takes the files of GPTDataset;"
        " use GPTDataset"),
    "Data.Eval.*": Without("windows are read in order, and as those of training are"),
    "Data.Test.*": Without("the test part is not read"),
    # optimizer
    "Optimizer.name": To("optimizer.name",
    one_of(FusedAdamW="adamw", AdamW="adamw", Adam="adam", Momentum="sgd")),
    **{f"Optimizer.{name}": To(f"optimizer.{name}") for name in ("weight_decay", "beta1", "beta2",
    "epsilon", "momentum")},
    "Optimizer.lr.name": To("optimizer.schedule", one_of(
        CosineAnnealingWithWarmupDecay="cosine", LinearDecayWithWarmup="linear",
        CosineDecay="cosine"
    )),
    "Optimizer.lr.decay_steps": To("optimizer.decay_steps"),
    "Optimizer.lr.warmup_rate": To("optimizer.warmup_fraction"),
    "Optimizer.lr.max_lr": To("optimizer.learning_rate"),
    "Optimizer.lr.min_lr": To("optimizer.min_learning_rate"),
    "Optimizer.lr.use_increments": Only((False,), "decay_steps counts samples with it; divide it by"
        " the global batch, and set False"),
    "Optimizer.grad_clip.name": Only(("ClipGradByGlobalNorm",), "the global norm is clipped; use"
        " ClipGradByGlobalNorm"),
    "Optimizer.grad_clip.clip_norm": To("optimizer.clip_grad", _clip),
    "Optimizer.tensor_fusion": Without(_KERNELS),
    "Optimizer.multi_precision": Only((True,), "the optimizer keeps float32 copies of float16"
        " weights; set True"),
    # the rest
    "Inference.*": Without("--run_mode export writes what an inference program reads"),
    "FusedPasses.*": Without(_KERNELS),
    **{f"Compress.{name}.enable": Only((False,), f"{name} {_NOT_HERE}")
       for name in ("Prune", "Distillation")},
    **{f"Compress.{name}.*": Without("it is not enabled") for name in ("Prune", "Distillation")},
    "Generation.top_k": To("predict.top_k"),
    # 0 leaves the most probable token there
    "Generation.top_p": To("predict.top_p", lambda share: number(share) or 1e-9),
    "Generation.temperature": To("predict.temperature", number),
    "Generation.repetition_penalty": To("predict.repetition_penalty", number),
    "Generation.min_dec_len": To("predict.min_new_tokens"),
    "Generation.max_dec_len": To("predict.max_new_tokens", _length),
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
    "Offline_Eval.overlapping_eval": To("evaluation.stride", lambda tokens: max(1, whole(tokens))),
    "Offline_Eval.batch_size": To("evaluation.batch_size"),
    "Offline_Eval.logging_freq": Without("progress is shown anyway"),
}  # fmt: skip

BY_HAND = (
    "Global.local_batch_size", "Engine.max_steps", "Engine.num_train_epochs", "Engine.run_mode",
    "Engine.eval_iters", "Engine.save_load.save_steps", "Engine.save_load.ckpt_dir",
    *(f"Engine.mix_precision.{name}" for name in ("use_pure_fp16", "enable", "dtype", "level",
    "scale_loss", "custom_black_list", "custom_white_list")),
    "Model.module", "Model.name", "Model.use_recompute", "Model.recompute_granularity",
    "Model.virtual_pp_degree", "Distributed.dp_degree",
    "Distributed.sharding.sharding_degree", "Distributed.sharding.sharding_stage",
    *(f"Data.Eval.dataset.{name}" for name in ("input_dir", "split", "max_seq_len")),
    "Offline_Eval.max_seq_len", "Profiler.enable", "Profiler.scheduler",
)  # fmt: skip
"""Keys that this module reads itself."""

DEFAULTS: Defaults = {
    # ppfleetx/utils/config.py: process_engine_config, process_dist_config
    "Engine.max_steps": 500000, "Engine.num_train_epochs": 1, "Engine.run_mode": "step",
    "Engine.eval_freq": -1, "Engine.eval_iters": 0,
    "Engine.logging_freq": 1, "Engine.save_load.output_dir": "./output",
    "Engine.save_load.save_steps": -1, "Engine.mix_precision.use_pure_fp16": False,
    "Engine.mix_precision.enable": False,
    "Engine.mix_precision.scale_loss": 32768.0,
    "Distributed.mp_degree": 1, "Distributed.pp_degree": 1,
    "Distributed.sharding.sharding_degree": 1, "Distributed.sharding.sharding_stage": 2,
    # ppfleetx/core/engine/eager_engine.py, of files that say mix_precision.enable
    "Engine.mix_precision.dtype": "float16", "Engine.mix_precision.level": "O2",
    # GPTModel in ppfleetx/models/language_model/gpt/dygraph/{single,hybrid}_model.py
    "Model.num_attention_heads": 12, "Model.hidden_dropout_prob": 0.1,
    "Model.attention_probs_dropout_prob": 0.1, "Model.max_position_embeddings": 512,
    "Model.initializer_range": 0.02, "Model.sequence_parallel": False,
    "Model.recompute_granularity": "full", "Model.virtual_pp_degree": 1,
    # paddle.optimizer.AdamW, Momentum; without a section grad_clip, build_optimizer clips nothing
    "Optimizer.weight_decay": 0.01, "Optimizer.beta1": 0.9, "Optimizer.beta2": 0.999,
    "Optimizer.epsilon": 1e-8, "Optimizer.momentum": 0.9, "Optimizer.grad_clip.clip_norm": None,
    # GPTForGeneration, where a file has the section
    "Generation.decode_strategy": "sampling", "Generation.temperature": 1.0,
    "Generation.top_k": 0, "Generation.top_p": 1.0, "Generation.repetition_penalty": 1.0,
    "Generation.min_dec_len": 0, "Generation.num_return_sequences": 1,
    "Generation.num_beams": 1, "Generation.num_beam_groups": 1,
    "Generation.length_penalty": 0.0, "Generation.early_stopping": False,
    "Generation.diversity_rate": 0.0,
}  # fmt: skip
"""Values of keys that a file leaves out, from release 2.4 and PaddlePaddle 2.4."""
