"""Keys of PaddleFleetX's YAML.

Source: PaddleFleetX release/2.4, ppfleetx/configs/nlp/gpt and ppfleetx/utils/config.py.
Quantization: pretrain_gpt_345M_mp8_qat.yaml and qat_gpt_345M_mp8.yaml in ppfleetx/configs; kinds of
scales: Paddle's ImperativeQuantAware.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.dialects.rules import (
    ByHand,
    Defaults,
    Fixed,
    Ignored,
    MapTo,
    Table,
    above_zero,
    each,
    joined,
    number,
    one_of,
    same,
    whole,
    within,
    words,
)

MARKS = words("""
    _base_ Global Engine Model Data Distributed Optimizer Generation Inference Offline_Eval
    Profiler Quantization Compress FusedPasses
""")
"""Top-level keys that only FleetX has."""
COSINE = "CosineAnnealingWithWarmupDecay"
"""Schedule that begins at last_epoch=0, and that Paddle's LRScheduler steps once as it is made
(ppfleetx/optims/lr_scheduler.py). The others begin at -1.
"""
_MAX_GENERATED = 512
_ORDER = "windows are shuffled again in every epoch"
_KERNELS = "the fastest kernels that the device has are taken"
_CLIP = above_zero("for no clip leave the section grad_clip out")


def _length(tokens: int) -> int:
    """Change the most tokens to generate: 512 there at most, and for a number below 0."""
    return tokens if 0 <= whole(tokens) <= _MAX_GENERATED else _MAX_GENERATED


def _weights(path: Any) -> Any:
    """Add the ending to the prefix of a file, as FleetX does."""
    return f"{path}.pdparams" if Path(f"{path}.pdparams").is_file() else path


_ENGINE: Table = {
    "max_steps": ByHand("train.max_steps"),
    "num_train_epochs": ByHand("train.max_epochs"),
    "run_mode": ByHand(),
    "accumulate_steps": Ignored("FleetX sets it to local_batch_size / micro_batch_size, and so it"
        " is here", "train.accumulation_steps"),
    "logging_freq": MapTo("logging.interval"),
    "eval_freq": MapTo("validation.interval", lambda steps: steps if whole(steps) > 0 else "never"),
    "eval_iters": ByHand("validation.max_batches"),
    "test_iters": Ignored("the test part is not read; --run_mode eval measures a file"),
    "save_load": ByHand("checkpoint.interval, checkpoint.resume and output_dir"),
    "save_load.save_epoch": Ignored("a run does not save at the end of an epoch;"
        " checkpoint.interval is in steps"),
    "save_load.save_steps": MapTo("checkpoint.interval", lambda steps: max(0, whole(steps))),
    "save_load.output_dir": MapTo("output_dir"),
    "save_load.ckpt_dir": ByHand("checkpoint.resume"),
    "save_load.*": Ignored("the run folder holds it"),
    "mix_precision": ByHand("precision"),
    **each(ByHand("precision"), "use_pure_fp16 dtype", "mix_precision."),
    **each(ByHand(), "enable level custom_black_list custom_white_list", "mix_precision."),
    "mix_precision.scale_loss": ByHand("loss_scale.initial"),
    "mix_precision.main_grad": Ignored("gradients of float16 weights are summed in float32"),
}  # fmt: skip
_MODEL: Table = {
    **each(ByHand(), "module name"),
    **same("model", "vocab_size hidden_size num_layers ffn_hidden_size initializer_range"),
    "num_attention_heads": MapTo("model.num_heads"),
    "hidden_dropout_prob": MapTo("model.dropout"),
    "attention_probs_dropout_prob": MapTo("model.attention_dropout"),
    "max_position_embeddings": MapTo("model.max_positions"),
    "type_vocab_size": Ignored("GPT-2 has no token types"),
    **each(ByHand("train.recompute"), "use_recompute recompute_granularity"),
    **{name: Fixed(([],), f"leave {name} empty; train.recompute_layers says how many blocks"
       " recompute", "train.recompute_layers")
       for name in ("no_recompute_layers", "recompute_layers")},
    **each(Ignored(_KERNELS), "fused_linear fuse_attn_qkv fused_softmax_with_triangular"),
    "use_flash_attn": Ignored(_KERNELS, "train.fused_attention"),
    "scale_qk_by_layer_num": Ignored("it changes no result: what it divides by it multiplies"
        " with again"),
    "sequence_parallel": MapTo("parallel.sequence_parallel"),
    "virtual_pp_degree": ByHand("parallel.virtual_stages"),
}  # fmt: skip
_DISTRIBUTED: Table = {
    "dp_degree": ByHand("parallel.data_parallel"),
    "mp_degree": MapTo("parallel.model_parallel"),
    "pp_degree": MapTo("parallel.pipeline_stage"),
    "fuse_sequence_parallel_allreduce": Ignored(_KERNELS),
    "pp_recompute_interval": Fixed((1,), "train.recompute is for all blocks; set 1"),
    "schedule_mode": Ignored("parallel.pipeline_schedule says it"),
    "sharding": ByHand("parallel.zero_stage and parallel.shard_size"),
    "sharding.sharding_degree": ByHand("parallel.shard_size"),
    "sharding.sharding_stage": ByHand("parallel.zero_stage"),
    "sharding.sharding_offload": Fixed((False,), "set it to False, and where DeepSpeed is installed"
        " engine=deepspeed deepspeed.offload_optimizer=true", "deepspeed.offload_optimizer"),
    "sharding.*": Ignored("communication overlaps with computing where the engine can"),
}  # fmt: skip
_DATA: Table = {
    "Train.dataset.name": Fixed(("GPTDataset",), "data.train takes the files of GPTDataset; use"
        " GPTDataset"),
    "Train.dataset.input_dir": MapTo("data.train"),
    "Train.dataset.split": MapTo("data.split", joined),
    "Train.dataset.max_seq_len": MapTo("model.seq_length"),
    **each(Ignored(_ORDER), "Train.dataset.* Train.sampler.*"),
    "Train.loader.*": Ignored("batches are read ahead by data.prefetch"),
    "Train.*": Ignored(_ORDER),
    "Eval.dataset.name": Fixed(("GPTDataset",), "data.validation takes the files of GPTDataset;"
        " use GPTDataset"),
    **each(ByHand(), "input_dir split max_seq_len", "Eval.dataset."),
    "Eval.*": Ignored("windows are read in order, and as those of training are"),
    "Test.*": Ignored("the test part is not read"),
}  # fmt: skip
_OPTIMIZER: Table = {
    "name": MapTo("optimizer.name",
        one_of(FusedAdamW="adamw", AdamW="adamw", Adam="adam", Momentum="sgd")),
    **same("optimizer", "weight_decay beta1 beta2 epsilon momentum"),
    "lr.name": MapTo("optimizer.schedule", one_of(
        CosineAnnealingWithWarmupDecay="cosine", LinearDecayWithWarmup="linear",
        CosineDecay="cosine"
    )),
    "lr.decay_steps": MapTo("optimizer.decay_steps"),
    "lr.warmup_rate": MapTo("optimizer.warmup_fraction"),
    "lr.max_lr": MapTo("optimizer.learning_rate"),
    "lr.min_lr": MapTo("optimizer.min_learning_rate"),
    "lr.use_increments": Fixed((False,), "decay_steps counts samples with it; divide it by the"
        " global batch, and set False"),
    "grad_clip.name": Fixed(("ClipGradByGlobalNorm",), "the global norm is clipped; use"
        " ClipGradByGlobalNorm"),
    "grad_clip.clip_norm": MapTo("optimizer.clip_grad",
        lambda norm: 0.0 if norm is None else _CLIP(norm)),
    "tensor_fusion": Ignored(_KERNELS),
    "multi_precision": Fixed((True,), "the optimizer keeps float32 copies of float16 weights; set"
        " True"),
}  # fmt: skip
_QUANTIZATION: Table = {
    **same("quantization", "weight_bits activation_bits moving_rate freeze_embedding"),
    "weight_quantize_type": MapTo("quantization.weights",
        one_of(abs_max="abs_max", channel_wise_abs_max="channel_wise_abs_max")),
    "activation_quantize_type": MapTo("quantization.activations",
        one_of(abs_max="abs_max", moving_average_abs_max="moving_average_abs_max")),
    "for_tensorrt": Ignored("--run_mode export writes what an inference program reads"),
    "onnx_format": Ignored("--run_mode export writes ONNX with export.format=onnx"),
    "is_full_quantize": Ignored("every linear layer of a block is quantized"),
    "weight_preprocess_type": Fixed(("None", "null"), "weights are rounded as they are; set None"),
    **each(ByHand(), "enable activation_preprocess_type quantizable_layer_type"),
    "skip_tensor_map": ByHand("quantization.skip"),
}  # fmt: skip
_GENERATION: Table = {
    "top_k": MapTo("predict.top_k"),
    # 0 leaves the most probable token there
    "top_p": MapTo("predict.top_p", lambda share: number(share) or 1e-9),
    **same("predict", "temperature repetition_penalty length_penalty diversity_rate",
        change=number),
    **same("predict", "num_beams num_beam_groups early_stopping"),
    "min_dec_len": MapTo("predict.min_new_tokens"),
    "max_dec_len": MapTo("predict.max_new_tokens", _length),
    "num_return_sequences": MapTo("predict.num_sequences"),
    "decode_strategy": MapTo("predict.strategy",
        one_of(sampling="sampling", greedy_search="greedy", beam_search="beam_search")),
    "input_text": MapTo("predict.prompt"),
    "use_cache": Ignored("generation always keeps keys and values"),
    **each(Fixed((50256,), "GPT-2's end of text is 50256"), """
        bos_token_id eos_token_id pad_token_id forced_bos_token_id forced_eos_token_id
    """),
}  # fmt: skip

TABLE: Table = {
    "_base_": ByHand("base"),
    "Global": ByHand("train.global_batch_size, train.micro_batch_size, device and seed"),
    "Global.device": MapTo("device", one_of(gpu="cuda", npu="npu", cpu="cpu")),
    "Global.seed": MapTo("seed"),
    "Global.global_batch_size": MapTo("train.global_batch_size"),
    "Global.local_batch_size": ByHand("train.micro_batch_size times train.accumulation_steps"),
    "Global.micro_batch_size": MapTo("train.micro_batch_size"),
    "Global.binding_size": Ignored("the launcher places the processes"),
    "Global.enable_partial_send_recv": Ignored(_KERNELS),
    "Engine": ByHand("train, validation, checkpoint and precision"),
    **within("Engine", _ENGINE),
    "Model": ByHand("model"),
    **within("Model", _MODEL),
    "Distributed": ByHand("parallel"),
    **within("Distributed", _DISTRIBUTED),
    "Data": ByHand("data"),
    **within("Data", _DATA),
    "Optimizer": ByHand("optimizer"),
    **within("Optimizer", _OPTIMIZER),
    **each(
        Fixed((), "our section is quantization, with keys of its own (docs/quantization.md)"),
        "Quantization Compress",
    ),
    **within("Quantization", _QUANTIZATION),
    **within("Compress.Quantization", _QUANTIZATION),
    **each(MapTo("checkpoint.init_from", _weights), "Quantization.pretrained Compress.pretrained"),
    **{f"Compress.{name}.enable": Fixed((False,), f"{name} is not in this version; leave the section out")
       for name in ("Prune", "Distillation")},
    **each(Ignored("it is not enabled"), "Compress.Prune.* Compress.Distillation.*"),
    "Inference.*": Ignored("--run_mode export writes what an inference program reads"),
    "FusedPasses.*": Ignored(_KERNELS),
    "Generation": ByHand("predict"),
    **within("Generation", _GENERATION),
    "Offline_Eval": ByHand("evaluation"),
    **within("Offline_Eval", {
        "max_seq_len": ByHand(),
        "eval_path": MapTo("evaluation.file"),
        "cloze_eval": MapTo("evaluation.task", one_of(**{"True": "lambada", "False": "text"}),
            "evaluation.task=lambada"),
        "overlapping_eval": MapTo("evaluation.stride", lambda tokens: max(1, whole(tokens))),
        "batch_size": MapTo("evaluation.batch_size"),
        "logging_freq": Ignored("progress is shown anyway"),
    }),
    "Profiler": ByHand("profile"),
    **each(ByHand(), "enable scheduler", "Profiler."),
}  # fmt: skip

DEFAULTS: Defaults = {
    # ppfleetx/utils/config.py: process_engine_config, process_dist_config
    **within("Engine", {
        "max_steps": 500000, "num_train_epochs": 1, "run_mode": "step", "eval_freq": -1,
        "eval_iters": 0, "logging_freq": 1, "save_load.output_dir": "./output",
        "save_load.save_steps": -1, "mix_precision.use_pure_fp16": False,
        "mix_precision.enable": False, "mix_precision.scale_loss": 32768.0,
        # ppfleetx/core/engine/eager_engine.py, of files that say mix_precision.enable
        "mix_precision.dtype": "float16", "mix_precision.level": "O2",
    }),
    **within("Distributed", {
        "mp_degree": 1, "pp_degree": 1,
        "sharding.sharding_degree": 1, "sharding.sharding_stage": 2,
    }),
    # GPTModel in ppfleetx/models/language_model/gpt/dygraph/{single,hybrid}_model.py
    **within("Model", {
        "num_attention_heads": 12, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512, "initializer_range": 0.02, "sequence_parallel": False,
        "recompute_granularity": "full", "virtual_pp_degree": 1,
    }),
    # paddle.optimizer.AdamW, Momentum; without a section grad_clip, build_optimizer clips nothing
    **within("Optimizer", {
        "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "momentum": 0.9,
        "grad_clip.clip_norm": None,
    }),
    # GPTForGeneration, where a file has the section
    **within("Generation", {
        "decode_strategy": "sampling", "temperature": 1.0, "top_k": 0, "top_p": 1.0,
        "repetition_penalty": 1.0, "min_dec_len": 0, "num_return_sequences": 1, "num_beams": 1,
        "num_beam_groups": 1, "length_penalty": 0.0, "early_stopping": False, "diversity_rate": 0.0,
    }),
}  # fmt: skip
"""Values of keys that a file leaves out, from release 2.4 and PaddlePaddle 2.4."""
