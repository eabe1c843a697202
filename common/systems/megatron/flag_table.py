"""Rules for the flags of Megatron-LM and Megatron-DeepSpeed.

Flags and defaults: Megatron-DeepSpeed b4d4a0e, megatron/arguments.py, and the other names in
Megatron-LM's megatron/training/arguments.py of 2025.
"""

from __future__ import annotations

from common.systems.dialect import (
    Only,
    Switch,
    Table,
    To,
    Without,
    listed,
    number,
    off,
    one_of,
    whole,
)

_KERNELS = "the fastest kernels and collectives that the device has are taken"
_LOGGED = "metrics.jsonl and TensorBoard have the figures of every step"
_LAUNCHED = "the launcher says it"
_OTHER = "it is for another model or another task"
_IN_SAMPLES = "give it in iterations or samples"
_ONE_EXPERT = "there is one expert"
_NOT_HERE = "is not in this version; leave the flag out"
HELD = "a checkpoint holds all that a run resumes from; leave the flag out"
_FORMAT = "checkpoints have this project's format; tools/convert_weight.py writes Megatron's"
_OF_REFUSED = "it is of a switch that is refused"

OF_TASKS = (
    "--run_mode eval has evaluation.task=text and lambada; fine-tuning on classes is not in this"
    " version"
)
OF_LOADING = {
    "no_load_optim": HELD, "no_load_rng": HELD, "no_load_lr_state": HELD,
    "reset_iteration": "give --finetune, which begins at step 0; leave the flag out",
    "use_checkpoint_args": "give the flags of the model, or model=from_checkpoint behind them",
    "use_mp_args_from_checkpoint_args": "give the flags of the layout",
    **{name: "a resumed run takes the schedule of its configuration; give that in flags" for name
       in ("use_checkpoint_lr_scheduler", "use_checkpoint_opt_param_scheduler")},
}  # fmt: skip
"""Flags that act only where a checkpoint is loaded, and what to do instead."""

TABLE: Table = {
    # model
    **{name: To(f"model.{name}") for name in ("num_layers", "hidden_size", "ffn_hidden_size",
    "seq_length", "vocab_size")},
    "encoder_seq_length": To("model.seq_length"),
    "num_attention_heads": To("model.num_heads"),
    "max_position_embeddings": To("model.max_positions"),
    "make_vocab_size_divisible_by": To("model.vocab_multiple"),
    "padded_vocab_size": Without("the table is padded to a multiple of model.vocab_multiple"),
    "kv_channels": Without("it is hidden_size / num_attention_heads"),
    "attention_dropout": To("model.attention_dropout", number),
    "hidden_dropout": To("model.dropout", number),
    "init_method_std": To("model.initializer_range", number),
    "layernorm_epsilon": To("model.layer_norm_epsilon", number),
    "norm_epsilon": To("model.layer_norm_epsilon", number),
    "position_embedding_type": Only(("learned_absolute",), "GPT-2 learns its positions; use"
        " learned_absolute"),
    "normalization": Only(("LayerNorm",), "GPT-2 has LayerNorm"),
    "num_experts": Only((0, 1, [1]), "mixture of experts is not in this version; leave it out"),
    "mlp_type": Only(("standard",), "mixture of experts is not in this version; use standard"),
    "softmax_type": Only(("vanilla",), "GPT-2 has the plain softmax; use vanilla"),
    "spec": Only(("local",), "the layers are GPT-2's; leave the flag out"),
    **{name: Only((), "GPT-2 has it otherwise; leave the flag out") for name in (
        "apply_residual_connection_post_layernorm", "untie_embeddings_and_output_weights", "swiglu",
        "use_rotary_position_embeddings", "no_position_embedding",
        "disable_bias_linear", "group_query_attention", "init_method_xavier_uniform",
        "fp32_residual_connection", "window_size", "apply_layernorm_1p", "squared_relu",
        "quick_geglu", "embedding_init_method_std", "qk_layernorm", "qk_l2_norm",
        "multi_latent_attention", "mtp_num_layers", "is_hybrid_model",
        "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json",
    )},
    **{name: Without("it is GPT-2's own") for name in ("openai_gelu", "add_qkv_bias")},
    **{name: Without(_ONE_EXPERT) for name in (
        "moe_*", "topk", "expert_interval", "expert_tensor_parallel_size", "create_moe_param_group",
        "disable_moe_token_dropping", "enable_expert_tensor_parallelism", "use_tutel",
        "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
        "use_fused_weighted_squared_relu",
    )},
    "moe_expert_parallel_size": Only((1,), f"mixture of experts {_NOT_HERE}"),
    **{name: Without(_OF_REFUSED) for name in (
        "num_query_groups", "window_attn_skip_freq", "rotary_*", "rope_*", "mrope_section",
        "no_rope_*", "use_rope_scaling", "relative_attention_*", "activation_func_clamp_value",
        "glu_linear_offset", "no_bias_swiglu_fusion", "mtp_*", "q_lora_rank", "kv_lora_rank",
        "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mscale*", "cache_mla_latents",
        "hybrid_*", "mamba_*", "disable_mamba_mem_eff_path", "lr_wsd_*", "muon_*", "fp8_*", "fp4_*",
        "no_fp8_wgrad", "first_last_layers_bf16", "num_layers_at_*", "main_grads_dtype",
        "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "retro_*", "rl_*", "grpo_*",
        "langrl_*", "sft_*", "num_layers_teacher", "num_experts_teacher", "hidden_size_teacher",
        "num_attention_heads_teacher", "kd_*", "reuse_grad_buf_for_mxfp8_param_ag",
    )},
    **{name: Only((), f"this {_NOT_HERE}") for name in (
        "fp8_format", "fp4_format", "use_precision_aware_optimizer", "kitchen_config_file",
        "kitchen_recipe_number", "retro_project_dir", "retro_add_retriever", "perform_rl_step",
        "sft", "mos", "kd", "load_teacher", "mock_data", "iterations_to_skip",
        "decrease_batch_size_if_needed", "data_parallel_random_init",
    )},
    **{name: Without(_OTHER) for name in (
        "bert_*", "biencoder_*", "ict_*", "dino_*", "vision_*", "swin_*", "retriever_*",
        "indexer_*", "titles_data_path", "query_in_block_prob", "use_one_sent_docs",
        "evidence_data_path", "block_data_path", "embedding_path", "num_classes", "img_*",
        "num_channels", "patch_dim", "classes_fraction", "data_per_class_fraction",
        "no_data_sharding", "head_lr_mult", "mask_*", "iter_per_epoch", "sample_rate",
        "short_seq_prob", "decoder_seq_length", "output_bert_embeddings", "encoder_num_layers",
        "decoder_num_layers",
    )},
    "task": Only((), OF_TASKS),
    # batch and length
    "micro_batch_size": To("train.micro_batch_size"),
    "batch_size": To("train.micro_batch_size"),
    "global_batch_size": To("train.global_batch_size"),
    "train_iters": To("train.max_steps"),
    "train_tokens": To("train.max_tokens"),
    "skip_train": Only((), "--run_mode eval measures a file; leave the flag out"),
    **{name: Only((), "--run_mode predict generates; leave the flag out") for name in ("inference",
    "ds_inference")},
    **{name: Without("--run_mode predict generates") for name in ("inference_*", "flash_decode",
    "decode_only_cuda_graphs", "symmetric_ar_type", "nccl_all_reduce_for_prefill",
    "mlp_chunks_for_prefill", "disable_chunked_prefill", "max_tokens_to_oom",
    "use_legacy_static_engine")},
    "calculate_per_token_loss": Without("the loss is the mean over all tokens"),
    "exit_interval": To("train.exit_interval", off(whole)),
    "exit_duration_in_mins": To("train.exit_minutes", off(number)),
    **{name: Without("the scheduler's signal stops the run with a checkpoint") for name in (
        "exit_signal_handler", "adlr_autoresume*")},
    # optimizer
    "optimizer": To("optimizer.name", one_of(adam="adamw", adamw="adamw", sgd="sgd")),
    "lr": To("optimizer.learning_rate", number),
    "min_lr": To("optimizer.min_learning_rate", number),
    "lr_decay_style": To("optimizer.schedule",
    one_of(cosine="cosine", linear="linear", constant="constant")),
    "lr_decay_iters": To("optimizer.decay_steps"),
    "lr_warmup_iters": To("optimizer.warmup_steps"),
    "lr_decay_samples": To("optimizer.decay_samples"),
    "lr_warmup_samples": To("optimizer.warmup_samples"),
    "lr_warmup_fraction": To("optimizer.warmup_fraction", number),
    "warmup": Only((), "give --lr-warmup-fraction"),
    "weight_decay": To("optimizer.weight_decay", number),
    "adam_beta1": To("optimizer.beta1", number),
    "adam_beta2": To("optimizer.beta2", number),
    "adam_eps": To("optimizer.epsilon", number),
    "sgd_momentum": To("optimizer.momentum", number),
    "clip_grad": To("optimizer.clip_grad", lambda norm: max(0.0, number(norm))),
    **{name: Only((), _IN_SAMPLES) for name in ("lr_decay_tokens", "lr_warmup_tokens")},
    **{name: Without("a resumed run takes the schedule of its configuration") for name in (
        "override_lr_scheduler", "override_opt_param_scheduler")},
    "lr_warmup_init": Only((0, 0.0), "the warm-up begins at 0; leave the flag out"),
    "weight_decay_incr_style": Only(("constant",), f"a weight decay that grows {_NOT_HERE}"),
    **{name: Only((), f"a weight decay that grows {_NOT_HERE}") for name in ("start_weight_decay",
    "end_weight_decay")},
    **{name: Only((), f"one learning rate is for all layers, another {_NOT_HERE}") for name in (
        "decoupled_lr", "decoupled_min_lr")},
    # precision
    "initial_loss_scale": To("loss_scale.initial", number),
    "min_loss_scale": To("loss_scale.minimum", number),
    "loss_scale_window": To("loss_scale.window", whole),
    "hysteresis": To("loss_scale.hysteresis"),
    "attention_softmax_in_fp32": Without("precision.softmax is float32"),
    "accumulate_allreduce_grads_in_fp32": Without("precision.reduction is float32"),
    "fp16_lm_cross_entropy": Only((), "the loss is taken in float32; leave the flag out"),
    "grad_reduce_in_bf16": To("precision.reduction", Switch("bfloat16")),
    "disable_bf16_reduced_precision_matmul": Without(_KERNELS),
    **{name: Without("losses and gradients that are not finite are found anyway") for name in (
        "no_check_for_nan_in_loss_and_grad", "check_for_spiky_loss", "check_for_large_grads",
        "rerun_mode", "error_injection_*", "result_rejected_tracker_filename")},
    "deterministic_mode": To("train.deterministic", Switch(True)),
    # layout
    "tensor_model_parallel_size": To("parallel.model_parallel"),
    "model_parallel_size": To("parallel.model_parallel"),
    "pipeline_model_parallel_size": To("parallel.pipeline_stage"),
    "sequence_parallel": To("parallel.sequence_parallel", Switch(True)),
    "cp_comm_type": Without("there is one context-parallel rank"),
    "hierarchical_context_parallel_sizes": Without("there is one context-parallel rank"),
    **{name: Without("layers are split evenly over the stages") for name in (
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split", "microbatch_group_size_per_virtual_pipeline_stage")},
    "num_distributed_optimizer_instances": Only((1,), "parallel.shard_size says over how many ranks"
        " the state is split; leave the flag out"),
    "use_torch_fsdp2": To("parallel.zero_stage", Switch(3)),
    "optimizer_cpu_offload": Only((), "where DeepSpeed is installed give engine=deepspeed"
        " deepspeed.offload_optimizer=true instead"),
    "context_parallel_size": Only((1,), "context parallelism is not in this version; leave it out"),
    "expert_model_parallel_size": Only((1,), "mixture of experts is not in this version; leave it"
        " out"),
    "zero_stage": To("parallel.zero_stage", whole),
    "cpu_optimizer": To("deepspeed.offload_optimizer", Switch(True)),
    **{name: Without(_LAUNCHED) for name in ("deepspeed_mpi", "deepscale", "deepscale_config")},
    "no_pipeline_parallel": Without("--pipeline-model-parallel-size says it"),
    "distributed_backend": Without("the device says how ranks talk: NCCL, HCCL or Gloo"),
    "DDP_impl": Without("parallel says how gradients are summed"),
    "use_contiguous_buffers_in_ddp": Without(_KERNELS),
    "local_rank": Without(_LAUNCHED),
    "use_cpu_initialization": Without("initial weights do not depend on the device"),
    "lazy_mpu_init": Without(_LAUNCHED),
    # data
    "split": To("data.split",
    lambda value: ",".join(map(str, value)) if isinstance(value, list) else str(value).replace(" ",
    "")),
    "data_impl": Only(("mmap", "infer", "cached", "lazy"), "expected mmap, cached, lazy or infer"),
    "data_cache_path": To("data.index_cache"),
    "valid_data_path": To("data.validation", listed),
    "test_data_path": Without("the test part is not read; --run_mode eval measures a file"),
    **{name: Only((), "write the paths behind --data-path") for name in ("data_args_path",
    "per_split_data_args_path")},
    "dataloader_type": Only(("single",), "samples are read once in an epoch; use single"),
    "vocab_file": To("data.tokenizer.vocab_file"),
    "merge_file": To("data.tokenizer.merge_file"),
    "tokenizer_type": To("data.tokenizer.type"),
    "tokenizer_model": To("data.tokenizer.vocab_file"),
    **{name: Without("the files of data.tokenizer say it") for name in ("tokenizer_metadata",
    "tiktoken_*", "legacy_tokenizer", "trust_remote_code")},
    "vocab_extra_ids": Only((0,), "the vocabulary is the tokenizer's; leave it out"),
    **{name: Without("batches are read ahead by data.prefetch") for name in ("num_workers",
    "mmap_warmup", "no_mmap_bin_files", "num_dataset_builder_threads", "object_storage_cache_path",
    "mid_level_dataset_surplus", "no_create_attention_mask_in_dataloader",
    "allow_ambiguous_pad_tokens", "aml_data_download_path")},
    **{name: To(f"data.{name}", Switch(True)) for name in
       ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")},
    # checkpoints, validation, log
    **{name: To("checkpoint.interval") for name in ("save_interval", "persistent_save_interval")},
    "async_save": To("checkpoint.asynchronous", Switch(True)),
    "pretrained_checkpoint": To("checkpoint.init_from"),
    "ckpt_step": Only((), "checkpoint.resume takes the folder of a step; leave the flag out"),
    "ckpt_convert_*": Only((), "tools/convert_weight.py writes Megatron's checkpoints; leave the"
        " flag out"),
    "non_persistent_save_interval": Without(_FORMAT),
    "save_retain_interval": Without("checkpoint.keep says how many stay"),
    **{name: Without(_FORMAT) for name in (
        "ckpt_*", "dist_ckpt_*", "use_dist_ckpt", "no_ckpt_*", "non_persistent_*",
        "auto_detect_ckpt_format", "use_persistent_ckpt_worker", "no_strict_fsdp_dtensor_load",
        "distrib_optim_fully_reshardable_mem_efficient", "replication*",
        "load_main_params_from_ckpt")},
    **{name: Without("the configuration says what the model is") for name in (
        "no_initialization", "no_use_tokenizer_model_from_checkpoint_args")},
    "exit_on_missing_checkpoint": Without("a checkpoint that is named and absent is an error"),
    "yaml_cfg": Only((), "give the file with --config, in the words of this project"),
    "eval_interval": To("validation.interval"),
    "multiple_validation_sets": Only((), "data.validation is one set; leave the flag out"),
    "test_mode": Without("the test part is not read"),
    "log_interval": To("logging.interval"),
    "seed": To("seed"),
    **{name: Only((), HELD) for name in ("no_save_optim", "no_save_rng")},
    "tensorboard_dir": Without("TensorBoard's events are in the run folder"),
    **{name: Without(_LOGGED) for name in (
        "tensorboard_*", "log_*", "no_log_*", "timing_log_*", "wandb_*", "logging_level",
        "one_logger_*", "no_one_logger", "app_tag_*", "config_logger_dir",
        "no_barrier_with_level_1_timing", "disable_straggler_on_startup", "straggler_*",
        "run_workload_inspector_server", "record_memory_history", "memory_snapshot_path",
    )},
    **{name: Without("profile.start and profile.stop say which steps are traced, on rank 0") for
       name in ("use_pytorch_profiler", "profile_ranks")},
    **{name: Without(_LAUNCHED) for name in ("inprocess_*", "enable_ft_package", "calc_ft_timeouts",
    "distributed_timeout_*", "use_tp_pp_dp_mapping", "disable_gloo_process_groups")},
    **{name: Without(_KERNELS) for name in (
        "no_masked_softmax_fusion", "no_bias_gelu_fusion", "no_bias_dropout_fusion",
        "no_gradient_accumulation_fusion", "use_flash_attn",
        "no_async_tensor_model_parallel_allreduce", "no_query_key_layer_scaling",
        "apply_query_key_layer_scaling", "onnx_safe",
        "overlap_*", "no_overlap_*", "transformer_impl", "use_mcore_models",
        "attention_backend",
        "no_scatter_gather_tensors_in_pipeline", "synchronize_each_layer", "profile_backward",
        "use_legacy_models", "tp_comm_*", "disable_tp_comm_*", "ddp_*",
        "no_align_*", "cuda_graph_*", "enable_cuda_graph", "external_cuda_graph", "te_rng_tracker",
        "use_te_activation_func", "cross_entropy_*", "no_persist_layer_norm", "manual_gc*",
        "no_manual_gc_eval", "empty_unused_memory_level", "train_sync_interval",
        "no_clone_scatter_output_in_embedding", "defer_embedding_wgrad_compute",
        "wgrad_deferral_limit", "pipeline_model_parallel_comm_backend",
        "high_priority_stream_groups", "use_ring_exchange_p2p", "use_nccl_ub",
        "disable_symmetric_registration", "use_sharp", "sharp_enabled_group",
        "use_megatron_fsdp", "init_model_with_meta_device", "no_gradient_reduce_div_fusion",
        "fsdp_double_buffer", "suggested_communication_unit_size", "keep_fp8_transpose_cache",
        "enable_full_sharding_in_hsdp", "torch_fsdp2_no_reshard_after_forward",
        "nccl_communicator_config_path", "check_weight_hash_across_dp_replicas_interval",
        "cpu_torch_adam", "use_torch_optimizer_for_cpu_offload", "optimizer_offload_fraction",
        "dump_param_to_param_group_map", "no_pin_cpu_*", "enable_experimental", "disable_msc",
    )},
    **{name: Without("recomputed activations are not split") for name in (
        "distribute_checkpointed_activations", "distribute_saved_activations",
        "partition_activations", "contigious_checkpointing",
    )},
    "recompute_modules": Without("train.recompute=selective says which parts"),
    "checkpoint_num_layers": Without("each block is recomputed by itself"),
    **{name: Without("train.offload_activations moves those of all blocks to the host") for name in
    ("checkpoint_in_cpu", "cpu_offloading_num_layers")},
    **{name: Without("ZeRO's own settings are taken") for name in ("zero_reduce_scatter",
    "zero_contigious_gradients", "use_pin_memory")},
    "remote_device": Only(("none",), "give deepspeed.offload_parameters=true"),
}  # fmt: skip
