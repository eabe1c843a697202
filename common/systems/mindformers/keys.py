"""Rules for the keys of MindFormers' YAML: run_gpt2*.yaml of r0.3 to r1.x, and base_config.

Keys and defaults: mindformers r0.3 and r1.0, configs/gpt2 and
mindformers/models/gpt2/gpt2_config.py.
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
    off,
    one_of,
    whole,
)

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
WRITTEN = "checkpoints, metrics.jsonl and the run folder are written anyway"

LORA = "fine-tuning of added weights (LoRA) is not in this version; train all weights"
CLASSES = "fine-tuning of classes is not in this version; models here predict the next token"
_TRAINERS = ("CausalLanguageModelingTrainer", "GeneralTaskTrainer")


def _one_file(value: Any) -> Any:
    files = value if isinstance(value, list) else [value]
    if len(files) != 1:
        raise ValueError("put the files into one folder, and give it as dataset_dir")
    return files[0]


TABLE: Table = {
    "seed": To("seed"),
    "output_dir": To("output_dir"),
    "run_mode": Without("--run_mode of the command line says it"),
    "use_parallel": Without("the launcher decides how many processes there are"),
    "trainer.type": Only(_TRAINERS, "training predicts the next token; use"
        " CausalLanguageModelingTrainer"),
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
    "context.deterministic": To("train.deterministic", one_of(ON=True, OFF=False)),
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
    "model.model_config.use_flash_attention": To("train.fused_attention"),
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
    "lr_schedule.warmup_ratio": To("optimizer.warmup_fraction"),
    **{f"lr_schedule.{name}": To("optimizer.power", number) for name in ("power", "lr_power")},
    "lr_schedule.num_cycles": Only((0.5,), "the cosine falls once; set 0.5"),
    "lr_schedule.warmup_lr_init": Only((0, 0.0), "the warm-up begins at 0; set 0"),
    "lr_scale": Only((False,), "the learning rate is what lr_schedule says; set False"),
    "lr_scale_factor": Without("lr_scale is off"),
    "layer_scale": Only((False,), "all layers have one learning rate; set False"),
    "layer_decay": Without("layer_scale is off"),
    "runner_wrapper.type": Without("the engine follows from parallel"),
    # parallel
    "parallel.*": To(""),
    "parallel_config.expert_parallel": Only((1,), "mixture of experts is not in this version; set"
        " 1"),
    **{f"parallel_config.{name}": To(f"parallel.{name}") for name in ("model_parallel",
    "pipeline_stage", "gradient_aggregation_group")},
    "parallel_config.use_seq_parallel": To("parallel.sequence_parallel"),
    **{f"parallel_config.{name}": Only((1,), "sequences are not split in this version; set 1")
       for name in ("context_parallel", "seq_split_num")},
    "moe_config.expert_num": Only((1,), "mixture of experts is not in this version; set 1"),
    "moe_config.*": Without("there is one expert"),
    "recompute_config.mp_comm_recompute": To("train.mp_comm_recompute"),
    "recompute_config.recompute_slice_activation": To("train.recompute_slice_activation"),
    "recompute_config.parallel_optimizer_comm_recompute": Without("MindSpore 2.10 takes no notice"
        " of it"),
    **{f"recompute_config.{name}": Only((False, None), "train.recompute is full or selective for"
       " all blocks; set False") for name in ("select_comm_recompute", "select_recompute_exclude",
       "select_comm_recompute_exclude")},
    "swap_config.swap": Only((False,), "activations stay on the device; set False"),
    "swap_config.*": Without("swap is off"),
    # data
    "train_dataset.data_loader.type": Only(("MindDataset",), "data.train takes a MindRecord, or"
        " what tools/preprocess_data.py writes"),
    "train_dataset.data_loader.dataset_dir": To("data.train"),
    "train_dataset.data_loader.dataset_files": To("data.train", _one_file),
    "train_dataset.data_loader.shuffle": To("data.shuffle"),
    "train_dataset.data_loader.num_samples": To("train.num_samples", off(whole)),
    **{f"train_dataset.data_loader.{name}": Without(_LOADED) for name in ("num_parallel_workers",
       "python_multiprocessing", "num_shards", "shard_id", "cache")},
    "train_dataset.data_loader.*": Only((), "data.train takes whole files; leave the key out"),
    "eval_dataset.data_loader.num_samples": To("validation.max_samples"),
    "train_dataset.eod_reset": Only((False,), "set False, and data.reset_attention_mask=true"
        " data.reset_position_ids=true"),
    "train_dataset.dynamic_batch": Only((False,), "every window is full; set False"),
    "train_dataset.repeat": Only((1,), "runner_config.epochs says how often the samples are seen;"
        " set 1"),
    "train_dataset.drop_remainder": Without("every batch is full"),
    "train_dataset.*": Without(_LOADED),
    "train_dataset_task.type": Only(("CausalLanguageModelDataset",), "training predicts the next"
        " token; use CausalLanguageModelDataset"),
    "train_dataset_task.*": Without("train_dataset says it"),
    "eval_dataset.data_loader.dataset_dir": To("data.validation"),
    "eval_dataset.*": Without("validation windows are read in order"),
    "eval_dataset_task.*": Without("validation windows are read in order"),
    "processor.*": Without(_TOKENIZER),
    "metric.*": Without("loss and perplexity are measured"),
    # checkpoints, watching
    "eval_callbacks": Without(WRITTEN),
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
    "print_separate_loss": Without("there is one loss"),
    "monitor_config.*": Without(WRITTEN),
}  # fmt: skip

DEFAULTS: Defaults = {
    # GPT2Config; run_gpt2*.yaml of r0.3 have initializer_range
    "model.model_config.seq_length": 1024, "model.model_config.vocab_size": 50257,
    "model.model_config.hidden_size": 768, "model.model_config.num_layers": 12,
    "model.model_config.num_heads": 12, "model.model_config.initializer_range": 0.02,
    "model.model_config.embedding_dropout_prob": 0.1,
    "model.model_config.hidden_dropout_rate": 0.1,
    "model.model_config.attention_dropout_rate": 0.1,
    "model.model_config.param_init_type": "float32",
    "model.model_config.compute_dtype": "float16",
    "model.model_config.softmax_compute_type": "float32",
    "model.model_config.layernorm_compute_type": "float32",
    "model.model_config.repetition_penalty": 1.0, "model.model_config.top_k": 5,
    "model.model_config.top_p": 1.0, "model.model_config.do_sample": True,
    # LayerNorm of mindformers/modules/layers.py
    "model.model_config.layernorm_epsilon": 1e-5,
    # FusedAdamWeightDecay of core/optim/optim.py; nn.AdamWeightDecay has the same
    "optimizer.beta1": 0.9, "optimizer.beta2": 0.999, "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.0,
    # trainer/base_trainer.py: the optimizer's rate, if there is no lr_schedule; core/lr
    "lr_schedule.type": "constant", "lr_schedule.warmup_steps": 0, "lr_schedule.power": 1.0,
    "lr_schedule.lr_end": 0.0, "lr_schedule.total_steps": -1,
    # MFTrainOneStepCell; TransformerOpParallelConfig, TransformerRecomputeConfig
    "runner_wrapper.max_grad_norm": 1.0,
    "parallel_config.data_parallel": 1, "parallel_config.model_parallel": 1,
    "parallel_config.pipeline_stage": 1, "parallel_config.micro_batch_num": 1,
    "parallel_config.vocab_emb_dp": True, "parallel_config.gradient_aggregation_group": 4,
    "parallel_config.use_seq_parallel": False, "recompute_config.mp_comm_recompute": True,
    "recompute_config.recompute_slice_activation": False, "recompute_config.recompute": False,
    # core/context/build_context.py
    "context.mode": 0, "context.device_id": 0, "context.save_graphs": False,
    "context.enable_graph_kernel": False, "parallel.parallel_mode": 0,
    # mindspore.dataset.MindDataset; base_trainer.py: training_process
    "train_dataset.data_loader.shuffle": True, "runner_config.gradient_accumulation_steps": 1,
    "do_eval": False, "eval_step_interval": 100, "eval_epoch_interval": -1,
    # tools/utils.py; ProfileMonitor
    "output_dir": "./output", "profile_start_step": 1, "profile_stop_step": 10,
}  # fmt: skip
"""Values of keys that a file leaves out, from r0.3 and r1.0."""
OF_TYPES: dict[str, dict[str, Any]] = {
    "optimizer.eps": {"Adam": 1e-8, "AdamW": 1e-8},
    "lr_schedule.lr_end": dict.fromkeys(("polynomial", "PolynomialWithWarmUpLR"), 1e-7),
}
"""Defaults of a key that differ for a ``type`` in its section: nn.Adam of MindSpore, AdamW of
core/optim/adamw.py, PolynomialWithWarmUpLR.
"""
