"""Keys and defaults of MindFormers' YAML, r0.3 to r1.x. Sources: configs/gpt2 and
mindformers/models/gpt2/gpt2_config.py of r0.3 and r1.0.
"""

from __future__ import annotations

from typing import Any

from common.dialects.rules import (
    ByHand,
    Defaults,
    Fixed,
    Ignored,
    MapTo,
    Table,
    each,
    listed,
    number,
    off,
    one_of,
    same,
    whole,
    within,
    words,
)

BASE = "base_config"
MARKS = words("""
    base_config runner_config runner_wrapper lr_schedule callbacks train_dataset
    train_dataset_task trainer moe_config processor resume_or_finetune_checkpoint use_parallel
    auto_trans_ckpt aicc_config swap_config model
""")
"""Top-level keys that only MindFormers has, and the model, which only there has a model_config."""
PARTS = words("parallel_config recompute_config")
"""MindFormers' sections that files of ours may have."""
TARGETS = {"Ascend": "npu", "GPU": "cuda", "CPU": "cpu"}
"""Names of devices -> ours."""

_FLOAT = one_of(
    float16="float16", float32="float32", bfloat16="bfloat16",
    fp16="float16", fp32="float32", bf16="bfloat16",
)  # fmt: skip
_LOADED = "batches are read ahead by data.prefetch"
WRITTEN = "checkpoints, metrics.jsonl and the run folder are written anyway"
_NO_EXPERTS = "mixture of experts is not in this version"


def _one_file(value: Any) -> Any:
    files = listed(value)
    if len(files) != 1:
        raise ValueError("put the files into one folder, and give it as dataset_dir")
    return files[0]


_MODEL: Table = {
    "type": Fixed(("GPT2Config",), "the models here are GPT-2; use GPT2Config"),
    **same("model", "seq_length vocab_size num_layers num_heads initializer_range"),
    **each(MapTo("model.hidden_size"), "embedding_size hidden_size"),
    "intermediate_size": MapTo("model.ffn_hidden_size"),
    "expand_ratio": ByHand("model.ffn_hidden_size (hidden_size times the ratio)"),
    "max_position_embeddings": MapTo("model.max_positions"),
    "layernorm_epsilon": MapTo("model.layer_norm_epsilon"),
    "dropout_prob": MapTo("model.embedding_dropout", hint="model.dropout"),
    "embedding_dropout_prob": MapTo("model.embedding_dropout"),
    **each(MapTo("model.hidden_dropout"), "hidden_dropout_prob hidden_dropout_rate"),
    **each(MapTo("model.attention_dropout"), "attention_probs_dropout_prob attention_dropout_rate"),
    "hidden_act": MapTo("model.activation", one_of(gelu="gelu_new", fast_gelu="quick_gelu")),
    "param_init_type": MapTo("precision.parameters", _FLOAT),
    "compute_dtype": MapTo("precision.compute", _FLOAT),
    **each(MapTo("precision.softmax", _FLOAT), "softmax_dtype softmax_compute_type"),
    **each(MapTo("precision.layer_norm", _FLOAT), "layernorm_dtype layernorm_compute_type"),
    "use_flash_attention": MapTo("train.fused_attention"),
    "use_prompt_flash_attention": Ignored("the fastest attention that the device has is taken"),
    "use_past": Ignored("generation always keeps keys and values"),
    "batch_size": Ignored("runner_config.batch_size and predict.batch_size say it"),
    **each(Fixed((50256,), "GPT-2's end of text is 50256", "data.eod_id"),
        "eos_token eos_token_id bos_token_id"),
    "pad_token_id": Ignored("windows are full, nothing is padded"),
    "unk_token_id": Ignored("byte-level BPE knows every text"),
    "is_encoder_decoder": Fixed((False,), "GPT-2 is a decoder"),
    "is_dynamic": Ignored("shapes are fixed in training"),
    "top_k": MapTo("predict.top_k"),
    **same("predict", "repetition_penalty top_p", change=number),
    "do_sample": MapTo("predict.strategy", one_of(**{"True": "sampling", "False": "greedy"}),
        "predict.strategy=sampling"),
    "max_decode_length": Ignored("predict.max_new_tokens says how much is generated"),
    "max_new_tokens": MapTo("predict.max_new_tokens"),
    "checkpoint_name_or_path": Ignored("training begins with new weights; convert_weight.py makes a"
        " folder of them for checkpoint.init_from", "checkpoint.init_from"),
    "pet_config": ByHand(),
}  # fmt: skip
_LOADER: Table = {
    "type": Fixed(("MindDataset",), "data.train takes a MindRecord, or what"
        " tools/preprocess_data.py writes"),
    "dataset_dir": MapTo("data.train"),
    "dataset_files": MapTo("data.train", _one_file),
    "shuffle": MapTo("data.shuffle"),
    "num_samples": MapTo("train.num_samples", off(whole)),
    **each(Ignored(_LOADED), """
        num_parallel_workers python_multiprocessing num_shards shard_id cache
    """),
    "*": Fixed((), "data.train takes whole files; leave the key out"),
}  # fmt: skip
_PARALLEL: Table = {
    **same("parallel", """
        enable_alltoall enable_parallel_optimizer full_batch parallel_mode search_mode
        parallel_optimizer_config.parallel_optimizer_threshold
        parallel_optimizer_config.gradient_accumulation_shard
    """),
    "loss_repeated_mean": Fixed((True,), "the loss is the mean over all tokens; set True"),
    "gradients_mean": Ignored("gradients are of the mean over the global batch"),
    **{
        f"strategy_ckpt_{name}": MapTo(f"parallel.strategy_ckpt_config.{side}_file")
        for side in ("save", "load") for name in (f"{side}_file", f"config.{side}_file")
    },
    "strategy_ckpt_config.*": Ignored("a strategy file holds all parameters"),
    "device_num": Ignored("the launcher decides how many processes there are",
        "parallel.data_parallel (or the launcher's range of devices)"),
    "dataset_strategy": Ignored("the data are split over data-parallel ranks"),
}  # fmt: skip

TABLE: Table = {
    "base_config": ByHand("base"),
    "seed": MapTo("seed"),
    "output_dir": MapTo("output_dir"),
    "run_mode": Ignored("--run_mode of the command line says it"),
    "use_parallel": Ignored("the launcher (scripts/run_distribute.sh) decides how many processes there are"),
    "trainer.type": Fixed(("CausalLanguageModelingTrainer", "GeneralTaskTrainer"),
        "training predicts the next token; use CausalLanguageModelingTrainer"),
    "trainer.*": Ignored("there is one trainer"),
    # device
    "context.device_target": MapTo("device", one_of(**TARGETS)),
    **same("context", """
        mode device_id enable_graph_kernel graph_kernel_flags max_call_depth max_device_memory
        save_graphs save_graphs_path
    """, "context."),
    "context.deterministic": MapTo("train.deterministic", one_of(ON=True, OFF=False)),
    "context.*": Ignored("MindSpore's own default is taken"),
    # length and batch
    "runner_config": ByHand("train.max_epochs, train.micro_batch_size and train.sink_size"),
    "runner_config.epochs": MapTo("train.max_epochs"),
    "runner_config.batch_size": MapTo("train.micro_batch_size"),
    "runner_config.gradient_accumulation_steps": MapTo("train.accumulation_steps"),
    "runner_config.per_epoch_size": Ignored("an epoch is all samples"),
    "runner_config.image_size": Ignored("there are no images"),
    **each(Fixed((0,), "the checkpoint that is resumed knows it; set 0"), """
        initial_epoch has_trained_epoches has_trained_steps
    """, "runner_config."),
    **each(ByHand("train.sink_size"), "sink_size sink_mode", "runner_config."),
    # model
    "model.arch.type": ByHand(),
    "model.model_config": ByHand("model"),
    **within("model.model_config", _MODEL),
    # optimizer and schedule
    "optimizer.type": MapTo("optimizer.name", one_of(
        FusedAdamWeightDecay="adamw", FP32StateAdamWeightDecay="adamw", AdamWeightDecay="adamw",
        AdamW="adamw", Adam="adam",
    )),
    **same("optimizer", "beta1 beta2 weight_decay learning_rate", "optimizer."),
    "optimizer.eps": MapTo("optimizer.epsilon"),
    "lr_schedule": ByHand("optimizer.schedule, optimizer.learning_rate and optimizer.warmup_steps"),
    "lr_schedule.type": MapTo("optimizer.schedule", one_of(
        polynomial="polynomial", PolynomialWithWarmUpLR="polynomial", cosine="cosine",
        CosineWithWarmUpLR="cosine", linear="linear", LinearWithWarmUpLR="linear",
        constant="constant", ConstantWarmUpLR="constant",
    )),
    "lr_schedule.learning_rate": MapTo("optimizer.learning_rate"),
    "lr_schedule.lr_end": MapTo("optimizer.min_learning_rate"),
    "lr_schedule.warmup_ratio": MapTo("optimizer.warmup_fraction"),
    "lr_schedule.warmup_steps": ByHand("optimizer.warmup_steps"),
    "lr_schedule.total_steps": MapTo("optimizer.decay_steps", lambda steps: None if steps == -1 else steps),
    **each(MapTo("optimizer.power", number), "power lr_power", "lr_schedule."),
    "lr_schedule.num_cycles": Fixed((0.5,), "the cosine falls once; set 0.5"),
    "lr_schedule.warmup_lr_init": Fixed((0, 0.0), "the warm-up begins at 0; set 0"),
    "lr_scale": Fixed((False,), "the learning rate is what lr_schedule says; set False"),
    "lr_scale_factor": Ignored("lr_scale is off"),
    "layer_scale": Fixed((False,), "all layers have one learning rate; set False"),
    "layer_decay": Ignored("layer_scale is off"),
    "runner_wrapper": ByHand("loss_scale and optimizer.clip_grad"),
    "runner_wrapper.type": Ignored("the engine follows from parallel"),
    **each(ByHand("optimizer.clip_grad"), "use_clip_grad max_grad_norm", "runner_wrapper."),
    "runner_wrapper.scale_sense": ByHand("loss_scale.initial"),
    "runner_wrapper.scale_sense.type": ByHand(),
    "runner_wrapper.scale_sense.loss_scale_value": MapTo("loss_scale.initial", number),
    "runner_wrapper.scale_sense.scale_factor": MapTo("loss_scale.factor", number),
    "runner_wrapper.scale_sense.scale_window": MapTo("loss_scale.window"),
    # parallel
    **within("parallel", _PARALLEL),
    "micro_batch_interleave_num": MapTo("parallel.micro_batch_interleave_num"),
    "parallel_config.expert_parallel": Fixed((1,), f"{_NO_EXPERTS}; set 1"),
    **same("parallel", "model_parallel pipeline_stage gradient_aggregation_group vocab_emb_dp",
        "parallel_config."),
    "parallel_config.data_parallel": ByHand("parallel.data_parallel"),
    "parallel_config.micro_batch_num": ByHand("parallel.micro_batch_num"),
    "parallel_config.optimizer_shard": MapTo("parallel.enable_parallel_optimizer"),
    "parallel_config.use_seq_parallel": MapTo("parallel.sequence_parallel"),
    **each(Fixed((1,), "sequences are not split in this version; set 1"),
        "context_parallel seq_split_num", "parallel_config."),
    "moe_config.expert_num": Fixed((1,), f"{_NO_EXPERTS}; set 1"),
    "moe_config.*": Ignored(_NO_EXPERTS),
    "recompute_config.recompute": MapTo("train.recompute",
        lambda value: ("none", "full")[value] if isinstance(value, bool) else value),
    "recompute_config.select_recompute": ByHand(),
    **same("train", "mp_comm_recompute recompute_slice_activation"
        " parallel_optimizer_comm_recompute", "recompute_config."),
    **each(Fixed((False, None), "train.recompute is full or selective for all blocks; set False"),
        "select_comm_recompute select_recompute_exclude select_comm_recompute_exclude",
        "recompute_config."),
    "swap_config.swap": Fixed((False,), "activations stay on the device; set False"),
    "swap_config.*": Ignored("activations stay on the device"),
    # data
    "train_dataset": ByHand("data.train"),
    **within("train_dataset.data_loader", _LOADER),
    "train_dataset.batch_size": ByHand("train.micro_batch_size"),
    "train_dataset.input_columns": ByHand(),
    "train_dataset.eod_reset": Fixed((False,), "set False, and data.reset_attention_mask=true"
        " data.reset_position_ids=true", "data.reset_position_ids and data.reset_attention_mask"),
    "train_dataset.dynamic_batch": Fixed((False,), "every window is full; set False"),
    "train_dataset.repeat": Fixed((1,), "runner_config.epochs says how often the samples are seen;"
        " set 1"),
    "train_dataset.drop_remainder": Ignored("every batch is full"),
    "train_dataset.*": Ignored(_LOADED),
    "train_dataset_task.type": Fixed(("CausalLanguageModelDataset",), "training predicts the next"
        " token; use CausalLanguageModelDataset"),
    "train_dataset_task.*": Ignored("train_dataset says it"),
    "eval_dataset": ByHand("data.validation"),
    "eval_dataset.data_loader.dataset_dir": MapTo("data.validation"),
    "eval_dataset.data_loader.num_samples": MapTo("validation.max_samples"),
    **each(Ignored("validation windows are read in order"), "eval_dataset.* eval_dataset_task.*"),
    "processor": ByHand("data.tokenizer"),
    "processor.*": Ignored("data.tokenizer names the files of the vocabulary"),
    "metric.*": Ignored("loss and perplexity are measured"),
    # checkpoints, watching
    "callbacks": ByHand("checkpoint.interval, checkpoint.keep, checkpoint.ckpt_prefix and"
        " logging.interval"),
    "load_checkpoint": ByHand("checkpoint.init_from"),
    "resume_or_finetune_checkpoint": ByHand("checkpoint.init_from or checkpoint.resume"),
    "resume_training": ByHand("checkpoint.resume"),
    "do_eval": ByHand("--run_mode eval"),
    **each(ByHand("validation.interval"), "eval_step_interval eval_epoch_interval"),
    **each(Ignored(WRITTEN), "eval_callbacks monitor_config.*"),
    **each(Ignored("checkpoints are read in every layout"), """
        auto_trans_ckpt src_strategy_path_or_dir
    """),
    "only_save_strategy": Fixed((False,), "strategy files are written by every run in modes 1 and"
        " 2; set False"),
    **each(Ignored("only a ModelArts job copies its output"), "remote_save_url aicc_config.*"),
    "auto_tune": Ignored("reading the data takes no part of a step that could be tuned"),
    **each(Ignored("there is no tuning"), "autotune_per_step filepath_prefix"),
    "profile": ByHand(),
    "profile_start_step": ByHand("profile.start"),
    "profile_stop_step": ByHand("profile.stop"),
    "profile_memory": ByHand("profile.memory"),
    "init_start_profile": Ignored("profile_start_step says it"),
    "profile_communication": Ignored("the trace has it"),
    "print_separate_loss": Ignored("there is one loss"),
}  # fmt: skip

CALLBACKS: dict[str, tuple[MapTo, Any]] = {
    "per_print_times": (MapTo("logging.interval", lambda steps: steps or 2**40), 1),
    "prefix": (
        MapTo("checkpoint.ckpt_prefix", hint="predict.prompt or checkpoint.ckpt_prefix"), "CKP"),
    "save_checkpoint_steps": (MapTo("checkpoint.interval"), 1),
    "keep_checkpoint_max": (MapTo("checkpoint.keep", lambda count: count or 1), 5),
    "async_save": (MapTo("checkpoint.asynchronous", bool), False),
}  # fmt: skip
"""Keys of callbacks, with the default of each. 0 prints nothing, and keeps one checkpoint
(MindSpore's CheckpointConfig).
"""

DEFAULTS: Defaults = {
    **within("model.model_config", {
        # GPT2Config; run_gpt2*.yaml of r0.3 have initializer_range
        "seq_length": 1024, "vocab_size": 50257, "hidden_size": 768, "num_layers": 12, "hidden_act": "gelu",
        "num_heads": 12, "initializer_range": 0.02, "embedding_dropout_prob": 0.1,
        "hidden_dropout_rate": 0.1, "attention_dropout_rate": 0.1, "param_init_type": "float32",
        "compute_dtype": "float16", "softmax_compute_type": "float32",
        "layernorm_compute_type": "float32", "repetition_penalty": 1.0, "top_k": 5, "top_p": 1.0,
        "do_sample": True,
        # LayerNorm of mindformers/modules/layers.py
        "layernorm_epsilon": 1e-5,
    }),
    # FusedAdamWeightDecay of core/optim/optim.py; nn.AdamWeightDecay has the same
    **within("optimizer", {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.0}),
    # trainer/base_trainer.py: the optimizer's rate, if there is no lr_schedule; core/lr
    **within("lr_schedule", {
        "type": "constant", "warmup_steps": 0, "power": 1.0, "lr_end": 0.0, "total_steps": -1,
    }),
    # MFTrainOneStepCell; TransformerOpParallelConfig, TransformerRecomputeConfig
    "runner_wrapper.max_grad_norm": 1.0,
    **within("parallel_config", {
        "data_parallel": 1, "model_parallel": 1, "pipeline_stage": 1, "micro_batch_num": 1,
        "vocab_emb_dp": True, "gradient_aggregation_group": 4, "use_seq_parallel": False,
    }),
    **within("recompute_config", {
        "mp_comm_recompute": True, "recompute_slice_activation": False, "recompute": False,
    }),
    # core/context/build_context.py
    **within("context", {
        "mode": 0, "device_id": 0, "save_graphs": False, "enable_graph_kernel": False,
    }),
    "parallel.parallel_mode": 0,
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
