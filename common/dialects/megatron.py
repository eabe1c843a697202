"""Flags of Megatron-LM and Megatron-DeepSpeed, and keys of the ds_config.json beside them.

Flags and defaults: Megatron-DeepSpeed b4d4a0e, megatron/arguments.py, and the other names in
Megatron-LM's megatron/training/arguments.py of 2025; 000c4ac has the same defaults.
"""

from __future__ import annotations

from common.dialects.rules import (
    ByHand,
    Defaults,
    Fixed,
    Ignored,
    MapTo,
    Switch,
    Table,
    each,
    joined,
    listed,
    number,
    off,
    one_of,
    same,
    whole,
)

SYSTEM = "Megatron"
PROGRAM = "pretrain_gpt.py"
_KERNELS = "the fastest kernels and collectives that the device has are taken"
_LAUNCHED = "the launcher (scripts/run_distribute.sh) says it"
_PREFETCHED = "batches are read ahead by data.prefetch"
_NOT_HERE = "is not in this version; leave the flag out"
STATIC = "it is for a dynamic scale, and --loss-scale makes it static"
HELD = "a checkpoint holds all that a run resumes from; leave the flag out"
_FORMAT = "checkpoints have this project's format; tools/convert_weight.py writes Megatron's"

OF_TASKS = "--run_mode eval has evaluation.task=text and lambada; fine-tuning on classes is not in this version"
OF_LOADING = {
    "no_load_optim": HELD, "no_load_rng": HELD, "no_load_lr_state": HELD,
    "reset_iteration": "give --finetune, which begins at step 0; leave the flag out",
    "use_checkpoint_args": "give the flags of the model, or model=from_checkpoint behind them",
    "use_mp_args_from_checkpoint_args": "give the flags of the layout",
    **dict.fromkeys(("use_checkpoint_lr_scheduler", "use_checkpoint_opt_param_scheduler"),
        "a resumed run takes the schedule of its configuration; give that in flags"),
}  # fmt: skip
"""Flags that act only where a checkpoint is loaded, and what to do instead."""
OTHER_PROGRAMS = {
    **{f"pretrain_{name}.py": f"it trains {name.upper()}, and the models here are GPT-2"
       for name in ("bert", "t5", "ict", "vit", "retro", "mamba", "vlm", "vision_classify",
       "vision_dino", "vision_inpaint")},
    "tasks/main.py": OF_TASKS,
    **{f"generate_samples_{name}.py": "--run_mode predict generates" for name in ("gpt", "gpt2")},
}  # fmt: skip
"""Programs of Megatron that take other flags, and what to do instead."""

TABLE: Table = {
    # model
    **same("model", "num_layers hidden_size ffn_hidden_size seq_length vocab_size"),
    "encoder_seq_length": MapTo("model.seq_length"),
    "num_attention_heads": MapTo("model.num_heads"),
    "max_position_embeddings": MapTo("model.max_positions"),
    "make_vocab_size_divisible_by": MapTo("model.vocab_multiple"),
    "padded_vocab_size": Ignored("the table is padded to a multiple of model.vocab_multiple",
        "model.vocab_size (without padding, which is added automatically)"),
    "kv_channels": Ignored("it is hidden_size / num_attention_heads"),
    "attention_dropout": MapTo("model.attention_dropout", number),
    "hidden_dropout": MapTo("model.dropout", number),
    "init_method_std": MapTo("model.initializer_range", number),
    **each(MapTo("model.layer_norm_epsilon", number), "layernorm_epsilon norm_epsilon"),
    "position_embedding_type": Fixed(("learned_absolute",), "GPT-2 learns its positions; use"
        " learned_absolute"),
    "normalization": Fixed(("LayerNorm",), "GPT-2 has LayerNorm"),
    "num_experts": Fixed((0, 1, [1]), "mixture of experts is not in this version; leave it out"),
    "mlp_type": Fixed(("standard",), "mixture of experts is not in this version; use standard"),
    "softmax_type": Fixed(("vanilla",), "GPT-2 has the plain softmax; use vanilla"),
    "spec": Fixed(("local",), "the layers are GPT-2's; leave the flag out"),
    **each(Fixed((), "GPT-2 has it otherwise; leave the flag out"), """
        apply_residual_connection_post_layernorm untie_embeddings_and_output_weights swiglu
        use_rotary_position_embeddings no_position_embedding disable_bias_linear
        group_query_attention init_method_xavier_uniform fp32_residual_connection window_size
        apply_layernorm_1p squared_relu quick_geglu embedding_init_method_std qk_layernorm
        qk_l2_norm multi_latent_attention mtp_num_layers is_hybrid_model
        heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
    """),
    **each(Ignored("it is GPT-2's own"), "openai_gelu add_qkv_bias"),
    "no_bias_gelu_fusion": MapTo("model.activation", Switch("gelu")),  # the fused one is the tanh form
    **each(Ignored("there is one expert"), """
        moe_* topk expert_interval expert_tensor_parallel_size create_moe_param_group
        disable_moe_token_dropping enable_expert_tensor_parallelism use_tutel
        overlap_moe_expert_parallel_comm delay_wgrad_compute use_fused_weighted_squared_relu
    """),
    "moe_expert_parallel_size": Fixed((1,), f"mixture of experts {_NOT_HERE}"),
    **each(Ignored("it is of a switch that is refused"), """
        num_query_groups window_attn_skip_freq rotary_* rope_* mrope_section no_rope_*
        use_rope_scaling relative_attention_* activation_func_clamp_value glu_linear_offset
        no_bias_swiglu_fusion mtp_* q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim
        v_head_dim mscale* cache_mla_latents hybrid_* mamba_* disable_mamba_mem_eff_path lr_wsd_*
        muon_* fp8_* fp4_* no_fp8_wgrad first_last_layers_bf16 num_layers_at_* main_grads_dtype
        main_params_dtype exp_avg_dtype exp_avg_sq_dtype retro_* rl_* grpo_* langrl_* sft_*
        num_layers_teacher num_experts_teacher hidden_size_teacher num_attention_heads_teacher kd_*
        reuse_grad_buf_for_mxfp8_param_ag
    """),
    **each(Fixed((), f"this {_NOT_HERE}"), """
        fp8_format fp4_format use_precision_aware_optimizer kitchen_config_file
        kitchen_recipe_number retro_project_dir retro_add_retriever perform_rl_step sft mos kd
        load_teacher mock_data iterations_to_skip decrease_batch_size_if_needed
        data_parallel_random_init
    """),
    **each(Ignored("it is for another model or another task"), """
        bert_* biencoder_* ict_* dino_* vision_* swin_* retriever_* indexer_* titles_data_path
        query_in_block_prob use_one_sent_docs evidence_data_path block_data_path embedding_path
        num_classes img_* num_channels patch_dim classes_fraction data_per_class_fraction
        no_data_sharding head_lr_mult mask_* iter_per_epoch sample_rate short_seq_prob
        decoder_seq_length output_bert_embeddings encoder_num_layers decoder_num_layers
    """),
    "task": Fixed((), OF_TASKS, "evaluation.task"),
    # batch and length
    **each(MapTo("train.micro_batch_size"), "micro_batch_size batch_size"),
    "global_batch_size": MapTo("train.global_batch_size"),
    "train_iters": MapTo("train.max_steps"),
    "train_tokens": MapTo("train.max_tokens"),
    "train_samples": ByHand("train.max_steps (that number divided by train.global_batch_size)"),
    "rampup_batch_size": ByHand("train.rampup_batch_size"),
    "step_batch_size_schedule": ByHand("train.rampup_batch_size", text=True),
    "skip_train": Fixed((), "--run_mode eval measures a file; leave the flag out"),
    **each(Fixed((), "--run_mode predict generates; leave the flag out"), "inference ds_inference"),
    **each(Ignored("--run_mode predict generates"), """
        inference_* flash_decode decode_only_cuda_graphs symmetric_ar_type
        nccl_all_reduce_for_prefill mlp_chunks_for_prefill disable_chunked_prefill max_tokens_to_oom
        use_legacy_static_engine
    """),
    "calculate_per_token_loss": Ignored("the loss is the mean over all tokens"),
    "exit_interval": MapTo("train.exit_interval", off(whole)),
    "exit_duration_in_mins": MapTo("train.exit_minutes", off(number)),
    **each(Ignored("the scheduler's signal stops the run with a checkpoint"), """
        exit_signal_handler adlr_autoresume*
    """),
    # optimizer
    "optimizer": MapTo("optimizer.name", one_of(adam="adamw", adamw="adamw", sgd="sgd")),
    "lr": MapTo("optimizer.learning_rate", number),
    "min_lr": MapTo("optimizer.min_learning_rate", number),
    "lr_decay_style": MapTo("optimizer.schedule",
    one_of(cosine="cosine", linear="linear", constant="constant")),
    "lr_decay_iters": MapTo("optimizer.decay_steps"),
    "lr_warmup_iters": MapTo("optimizer.warmup_steps"),
    "lr_decay_samples": MapTo("optimizer.decay_samples"),
    "lr_warmup_samples": MapTo("optimizer.warmup_samples"),
    "lr_warmup_fraction": MapTo("optimizer.warmup_fraction", number),
    "warmup": Fixed((), "give --lr-warmup-fraction",
        "optimizer.warmup_fraction or optimizer.warmup_steps"),
    "weight_decay": MapTo("optimizer.weight_decay", number),
    "adam_beta1": MapTo("optimizer.beta1", number),
    "adam_beta2": MapTo("optimizer.beta2", number),
    "adam_eps": MapTo("optimizer.epsilon", number),
    "sgd_momentum": MapTo("optimizer.momentum", number),
    "clip_grad": MapTo("optimizer.clip_grad", lambda norm: max(0.0, number(norm))),
    **each(Fixed((), "give it in iterations or samples"), "lr_decay_tokens lr_warmup_tokens"),
    **each(Ignored("a resumed run takes the schedule of its configuration"), """
        override_lr_scheduler override_opt_param_scheduler
    """),
    "lr_warmup_init": Fixed((0, 0.0), "the warm-up begins at 0; leave the flag out"),
    "weight_decay_incr_style": Fixed(("constant",), f"a weight decay that grows {_NOT_HERE}"),
    **each(Fixed((), f"a weight decay that grows {_NOT_HERE}"), """
        start_weight_decay end_weight_decay
    """),
    **each(Fixed((), f"one learning rate is for all layers, another {_NOT_HERE}"), """
        decoupled_lr decoupled_min_lr
    """),
    # precision
    "fp16": ByHand("precision=fp16", switch=True),
    "bf16": ByHand("precision=bf16", switch=True),
    "loss_scale": ByHand("loss_scale.initial"),
    "initial_loss_scale": MapTo("loss_scale.initial", number),
    "min_loss_scale": MapTo("loss_scale.minimum", number),
    "loss_scale_window": MapTo("loss_scale.window", whole),
    "hysteresis": MapTo("loss_scale.hysteresis"),
    "attention_softmax_in_fp32": Ignored("precision.softmax is float32"),
    "accumulate_allreduce_grads_in_fp32": Ignored("precision.reduction is float32"),
    "fp16_lm_cross_entropy": Fixed((), "the loss is taken in float32; leave the flag out"),
    "grad_reduce_in_bf16": MapTo("precision.reduction", Switch("bfloat16")),
    **each(Ignored("losses and gradients that are not finite are found anyway"), """
        no_check_for_nan_in_loss_and_grad check_for_spiky_loss check_for_large_grads rerun_mode
        error_injection_* result_rejected_tracker_filename
    """),
    "deterministic_mode": MapTo("train.deterministic", Switch(True)),
    # recomputation
    "checkpoint_activations": MapTo("train.recompute", Switch("full")),
    "recompute_activations": MapTo("train.recompute", Switch("selective")),
    "recompute_granularity": MapTo("train.recompute", one_of(full="full", selective="selective")),
    "deepspeed_activation_checkpointing": Ignored("train.recompute says it"),
    "recompute_num_layers": ByHand("train.recompute_layers"),
    "recompute_method": ByHand(),
    # layout
    "use_distributed_optimizer": MapTo("parallel.zero_stage", Switch(1), "parallel.zero_stage=1"),
    "data_parallel_sharding_strategy": MapTo("parallel.zero_stage",
        one_of(no_shard=0, optim=1, optim_grads=2, optim_grads_params=3)),
    **each(ByHand("parallel.virtual_stages"), """
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    """),
    "deepspeed": ByHand("engine=deepspeed", switch=True),
    "deepspeed_config": ByHand("deepspeed.config_file"),
    **each(MapTo("parallel.model_parallel"), "tensor_model_parallel_size model_parallel_size"),
    "pipeline_model_parallel_size": MapTo("parallel.pipeline_stage"),
    "sequence_parallel": MapTo("parallel.sequence_parallel", Switch(True)),
    **each(Ignored("there is one context-parallel rank"), "cp_comm_type hierarchical_context_parallel_sizes"),
    **each(Ignored("layers are split evenly over the stages"), """
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split microbatch_group_size_per_virtual_pipeline_stage
    """),
    "num_distributed_optimizer_instances": Fixed((1,), "parallel.shard_size says over how many"
        " ranks the state is split; leave the flag out"),
    "use_torch_fsdp2": MapTo("parallel.zero_stage", Switch(3), "parallel.zero_stage=3"),
    "optimizer_cpu_offload": Fixed((), "where DeepSpeed is installed give engine=deepspeed"
        " deepspeed.offload_optimizer=true instead"),
    "context_parallel_size": Fixed((1,), f"context parallelism {_NOT_HERE}"),
    "expert_model_parallel_size": Fixed((1,), f"mixture of experts {_NOT_HERE}"),
    "zero_stage": MapTo("parallel.zero_stage", whole),
    "cpu_optimizer": MapTo("deepspeed.offload_optimizer", Switch(True)),
    **each(Ignored(_LAUNCHED), "deepspeed_mpi deepscale deepscale_config local_rank lazy_mpu_init"),
    "no_pipeline_parallel": Ignored("--pipeline-model-parallel-size says it"),
    "distributed_backend": Ignored("the device says how ranks talk: NCCL, HCCL or Gloo"),
    "DDP_impl": Ignored("parallel says how gradients are summed"),
    "use_cpu_initialization": Ignored("initial weights do not depend on the device"),
    # data
    **each(ByHand("data.train"), "data_path train_data_path"),
    "split": MapTo("data.split", joined),
    "data_impl": Fixed(("mmap", "infer", "cached", "lazy"), "the data's index says how they were"
        " written; expected mmap, cached, lazy or infer"),
    "data_cache_path": Ignored("samples need no index files"),
    "valid_data_path": MapTo("data.validation", listed),
    "test_data_path": Ignored("the test part is not read; --run_mode eval measures a file"),
    **each(Fixed((), "write the paths behind --data-path"), """
        data_args_path per_split_data_args_path
    """),
    "dataloader_type": Fixed(("single",), "samples are read once in an epoch; use single"),
    **each(MapTo("data.tokenizer.vocab_file"), "vocab_file tokenizer_model"),
    "merge_file": MapTo("data.tokenizer.merge_file"),
    "tokenizer_type": MapTo("data.tokenizer.type"),
    **each(Ignored("the files of data.tokenizer say it"), """
        tokenizer_metadata tiktoken_* legacy_tokenizer trust_remote_code
    """),
    "vocab_extra_ids": Fixed((0,), "the vocabulary is the tokenizer's; leave it out"),
    "num_workers": Ignored(_PREFETCHED, "data.prefetch"),
    **each(Ignored(_PREFETCHED), """
        mmap_warmup no_mmap_bin_files num_dataset_builder_threads
        object_storage_cache_path mid_level_dataset_surplus no_create_attention_mask_in_dataloader
        allow_ambiguous_pad_tokens aml_data_download_path
    """),
    **same("data", "reset_position_ids reset_attention_mask eod_mask_loss", change=Switch(True)),
    # checkpoints, validation, log
    "save": ByHand("output_dir", text=True),
    "load": ByHand("checkpoint.load or checkpoint.resume", text=True),
    "finetune": ByHand("--run_mode finetune", switch=True),
    **each(ByHand(switch=True), " ".join(OF_LOADING)),
    "eval_iters": ByHand("validation.max_batches"),
    "full_validation": ByHand("validation", switch=True),
    "wandb_project": MapTo("logging.project", str),
    "profile": ByHand("profile.start", switch=True),
    "profile_step_start": ByHand("profile.start"),
    "profile_step_end": ByHand("profile.stop"),
    **each(MapTo("checkpoint.interval"), "save_interval persistent_save_interval"),
    "async_save": MapTo("checkpoint.asynchronous", Switch(True)),
    "pretrained_checkpoint": MapTo("checkpoint.init_from"),
    "ckpt_step": Fixed((), "checkpoint.resume takes the folder of a step; leave the flag out"),
    "ckpt_convert_*": Fixed((), "tools/convert_weight.py writes Megatron's checkpoints; leave the"
        " flag out"),
    "non_persistent_save_interval": Ignored(_FORMAT),
    "save_retain_interval": Ignored("checkpoint.keep says how many stay"),
    **each(Ignored(_FORMAT), """
        ckpt_* dist_ckpt_* use_dist_ckpt no_ckpt_* non_persistent_* auto_detect_ckpt_format
        use_persistent_ckpt_worker no_strict_fsdp_dtensor_load
        distrib_optim_fully_reshardable_mem_efficient replication* load_main_params_from_ckpt
    """),
    **each(Ignored("the configuration says what the model is"), """
        no_initialization no_use_tokenizer_model_from_checkpoint_args
    """),
    "exit_on_missing_checkpoint": Ignored("a checkpoint that is named and absent is an error"),
    "yaml_cfg": Fixed((), "give the file with --config, in the words of this project"),
    "eval_interval": MapTo("validation.interval"),
    "multiple_validation_sets": Fixed((), "data.validation is one set; leave the flag out"),
    "test_mode": Ignored("the test part is not read"),
    "log_interval": MapTo("logging.interval"),
    "seed": MapTo("seed"),
    **each(Fixed((), HELD), "no_save_optim no_save_rng"),
    "tensorboard_dir": Ignored("TensorBoard's events are in the run folder",
        "logging.tensorboard (in the run folder)"),
    **each(Ignored("metrics.jsonl and TensorBoard have the figures of every step"), """
        tensorboard_* log_* no_log_* timing_log_* wandb_* logging_level one_logger_* no_one_logger
        app_tag_* config_logger_dir no_barrier_with_level_1_timing disable_straggler_on_startup
        straggler_* run_workload_inspector_server record_memory_history memory_snapshot_path
    """),
    **each(Ignored("profile.start and profile.stop say which steps are traced, on rank 0"), """
        use_pytorch_profiler profile_ranks
    """),
    **each(Ignored(_LAUNCHED), """
        inprocess_* enable_ft_package calc_ft_timeouts distributed_timeout_* use_tp_pp_dp_mapping
        disable_gloo_process_groups
    """),
    **each(Ignored(_KERNELS), """
        no_masked_softmax_fusion no_bias_dropout_fusion
        no_gradient_accumulation_fusion no_async_tensor_model_parallel_allreduce
        no_query_key_layer_scaling apply_query_key_layer_scaling onnx_safe overlap_* no_overlap_*
        transformer_impl use_mcore_models attention_backend no_scatter_gather_tensors_in_pipeline
        synchronize_each_layer profile_backward use_legacy_models tp_comm_* disable_tp_comm_* ddp_*
        no_align_* cuda_graph_* enable_cuda_graph external_cuda_graph te_rng_tracker
        use_te_activation_func cross_entropy_* no_persist_layer_norm manual_gc* no_manual_gc_eval
        empty_unused_memory_level train_sync_interval no_clone_scatter_output_in_embedding
        defer_embedding_wgrad_compute wgrad_deferral_limit pipeline_model_parallel_comm_backend
        high_priority_stream_groups use_ring_exchange_p2p use_nccl_ub disable_symmetric_registration
        use_sharp sharp_enabled_group use_megatron_fsdp init_model_with_meta_device
        no_gradient_reduce_div_fusion fsdp_double_buffer suggested_communication_unit_size
        keep_fp8_transpose_cache enable_full_sharding_in_hsdp torch_fsdp2_no_reshard_after_forward
        nccl_communicator_config_path check_weight_hash_across_dp_replicas_interval cpu_torch_adam
        use_torch_optimizer_for_cpu_offload optimizer_offload_fraction dump_param_to_param_group_map
        no_pin_cpu_* enable_experimental disable_msc disable_bf16_reduced_precision_matmul
        use_contiguous_buffers_in_ddp
    """),
    "use_flash_attn": Ignored(_KERNELS, "train.fused_attention"),
    **each(Ignored("recomputed activations are not split"), """
        distribute_checkpointed_activations distribute_saved_activations partition_activations
        contigious_checkpointing
    """),
    "recompute_modules": Ignored("train.recompute=selective says which parts"),
    "checkpoint_num_layers": Ignored("each block is recomputed by itself",
        "train.recompute_layers"),
    **each(Ignored("train.offload_activations moves those of all blocks to the host",
        "train.offload_activations"), "checkpoint_in_cpu cpu_offloading_num_layers"),
    **each(Ignored("ZeRO's own settings are taken"), """
        zero_reduce_scatter zero_contigious_gradients use_pin_memory
    """),
    "remote_device": Fixed(("none",), "give deepspeed.offload_parameters=true"),
}  # fmt: skip

DEFAULTS: Defaults = {
    # model
    "make_vocab_size_divisible_by": 128, "layernorm_epsilon": 1e-5, "norm_epsilon": 1e-5,
    "attention_dropout": 0.1, "hidden_dropout": 0.1, "init_method_std": 0.02, "seed": 1234,
    # optimizer
    "optimizer": "adam", "min_lr": 0.0, "lr_decay_style": "linear", "weight_decay": 0.01,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "sgd_momentum": 0.9,
    "clip_grad": 1.0,
    "initial_loss_scale": 2.0**32, "min_loss_scale": 1.0, "loss_scale_window": 1000,
    "hysteresis": 2,
    # layout
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "data_parallel_sharding_strategy": "no_shard",
    # data, validation, log
    "split": "969, 30, 1", "eval_iters": 100, "eval_interval": 1000, "log_interval": 100,
    "profile_step_start": 10, "profile_step_end": 12,
}  # fmt: skip
"""Values of flags that are left out."""

DEEPSPEED: Table = {
    "train_batch_size": MapTo("train.global_batch_size"),
    "train_micro_batch_size_per_gpu": MapTo("train.micro_batch_size"),
    "gradient_accumulation_steps": MapTo("train.accumulation_steps"),
    "gradient_clipping": MapTo("optimizer.clip_grad", number),
    "zero_optimization.stage": MapTo("parallel.zero_stage"),
    "fp16.loss_scale": MapTo("loss_scale.mode", lambda scale: "static" if scale else "dynamic"),
    "fp16.initial_scale_power": MapTo("loss_scale.initial",
        lambda power: 2.0 ** whole(power), "loss_scale.initial (2 to that power)"),
    "fp16.loss_scale_window": MapTo("loss_scale.window", whole),
    "fp16.hysteresis": MapTo("loss_scale.hysteresis"),
    "fp16.min_loss_scale": MapTo("loss_scale.minimum", number),
}  # fmt: skip
"""Keys of a ds_config.json with one of ours. The engine compares all others with the run."""

DEEPSPEED_DEFAULTS: Defaults = {
    "gradient_clipping": 1.0, "zero_optimization.stage": 0, "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16, "fp16.loss_scale_window": 1000, "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
}  # fmt: skip
"""Values of keys that are left out: DeepSpeed 0.19.8, deepspeed/runtime/constants.py,
precision_config.py and zero/config.py. The sizes of batches follow from the flags.
"""

DEEPSPEED_FLAGS = {
    "clip_grad": "gradient_clipping", "zero_stage": "zero_optimization.stage",
    "loss_scale": "fp16.loss_scale", "initial_loss_scale": "fp16.initial_scale_power",
    **{name: f"fp16.{name}" for name in ("loss_scale_window", "hysteresis", "min_loss_scale")},
}  # fmt: skip
"""Megatron's flags that DeepSpeed does not read, with the key of the file that says the same."""
