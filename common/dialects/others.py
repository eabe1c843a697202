"""Names of systems without a table: nanoGPT, Hugging Face's Trainer, LitGPT, TorchTitan, OpenAI's
API and serving programs. Only hints are made of them.
"""

from __future__ import annotations

_HERE = {
    # model
    "model.num_layers": "n_layers num_hidden_layers",
    "model.hidden_size": "d_model",
    "model.num_heads": "n_heads",
    "model.seq_length": "block_size max_seq_length sequence_length data.seq_length model.length model.max_length",
    "model.vocab_multiple": "padded_vocab_size_multiple",
    "model.layer_norm_epsilon": "layer_norm_eps norm_eps",
    # length and batch
    "train.max_epochs": "num_epochs",
    "train.max_steps": "max_iters num_steps",
    "train.micro_batch_size": "per_device_train_batch_size data.batch_size",
    "train.accumulation_steps": "gradient_accumulation_iters num_micro_batches",
    "train.compile": "torch_compile",
    "train.compile_mode": "torch_compile_mode",
    "train.recompute": "gradient_checkpointing activation_checkpointing",
    "train.offload_activations": "cpu_offloading cpu_checkpointing activation_offloading"
    " activation_offload enable_activation_offloading",
    # optimizer and schedule
    "optimizer.learning_rate": "base_lr",
    "optimizer.min_learning_rate": "end_learning_rate",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type decay_lr optimizer.lr_scheduler",
    "optimizer.warmup_steps": "warmup_iters lr_warmup_steps num_warmup_steps",
    "optimizer.warmup_steps or optimizer.warmup_fraction": "optimizer.warmup",
    "optimizer.decay_steps": "lr_decay_steps",
    "optimizer.beta1 and optimizer.beta2": "betas",
    "optimizer.epsilon": "adam_epsilon",
    "optimizer.clip_grad": "grad_clip max_norm",
    "optimizer.name": "optim optimizer_type",
    # precision and loss scale
    "precision": "torch_dtype mixed_precision amp",
    "precision=fp16": "optimizer.fp16",
    "precision=fp8": "fp8",
    "precision.float8": "fp8_recipe",
    "loss_scale.minimum": "min_scale",
    # data
    "data.train": "data_dir train_dataset_dir",
    "data.validation": "eval_dataset_dir val_data_path",
    "data.tokenizer": "tokenizer tokenizer_name predict.tokenizer",
    "data.tokenizer.merge_file": "merges_file",
    "data.reset_attention_mask": "reset_attn_mask",
    "data.reset_position_ids": "reset_position_id",
    "data.eod_mask_loss": "mask_eod_loss",
    "data.eod_id": "eod eod_token eod_token_id eos_id",
    "data.prefetch": "prefetch_size",
    # validation, evaluation
    "validation.interval": "eval_steps evaluation_strategy validation.steps evaluation.interval",
    "validation.micro_batch_size": "per_device_eval_batch_size eval_batch_size validation.batch_size",
    "validation.max_batches": "max_eval_iters",
    "validation.max_samples": "validation.num_samples",
    "evaluation.max_samples": "evaluation.num_samples",
    "evaluation.file": "eval_data",
    "--run_mode eval": "eval_only",
    # checkpoints and the run folder
    "checkpoint.interval": "save_freq checkpoint.steps",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.init_from": "model_name_or_path init_from initial_checkpoint_dir",
    "checkpoint.resume": "resume resume_from_checkpoint",
    "checkpoint.load": "checkpoint_dir predict.checkpoint predict.model",
    "output_dir": "out_dir output_path save_dir exp_name run_name",
    # parallel
    "parallel.model_parallel": "tensor_parallel_size tensor_parallel tp_degree tp_size",
    "parallel.pipeline_stage": "pipeline_parallel_size pipeline_parallel pp_size pipeline_stages",
    "parallel.data_parallel": "data_parallel_size",
    "parallel.data_parallel (or the launcher's range of devices)": "devices context.device_num",
    "parallel.async_tensor_parallel": "tp_comm_overlap enable_async_tensor_parallel",
    "parallel.zero_stage": "zero_optimization",
    "parallel.zero_stage=3": "fsdp",
    "parallel": "distributed",
    # generation
    "predict": "generation",
    "predict.prompt": "predict_data start prefix_text prompts prompt_ids predict.prefix predict.text",
    "predict.num_sequences": "predict.n predict.num_samples predict.samples",
    "predict.max_new_tokens": "out_seq_length predict.max_length predict.max_tokens predict.length",
    "predict.min_new_tokens": "predict.min_tokens predict.min_length",
    "predict.stop": "stop_strings stop_sequences",
    "predict.bad_words": "bad_words_ids",
    "predict.logit_bias": "sequence_bias",
    "predict.logprobs": "top_logprobs",
    "predict.repetition_penalty": "repeat_penalty",
    "predict.output_file": "predict.output_dir",
    # log, device, the rest
    "logging.interval": "log_freq logging_steps print_every logging.steps",
    "logging.trackers": "report_to logging.wandb logging.tracker",
    "logging.project": "project_name experiment_name",
    "seed": "random_seed",
    "device": "target accelerator",
    "profile": "profiler profiler_config",
    "base": "defaults",
}
_ABSENT = {
    "trackers are a list: logging.trackers: [wandb] (or mlflow, swanlab)": "wandb_log wandb"
    " use_wandb mlflow use_mlflow swanlab use_swanlab",
    "VisualDL is not in this version; TensorBoard's events are in the run folder; leave it out":
    "visualdl use_visualdl",
    "GPT-2 has biases; leave it out": "bias",
    "every model is a GPT-2; leave it out": "architectures arch",
    "checkpoint.interval decides it; leave it out": "always_save_checkpoint",
    "the launcher takes it: bash scripts/run_distribute.sh; leave it out": "nnodes nproc_per_node"
    " master_addr",
    "the data's index says how they were written; leave it out": "dataset_impl",
    "samples need no index files; leave it out": "index_cache",
    "MindSpore's default is used; leave it out": "jit_config",
}  # fmt: skip

HERE = {name: here for here, names in _HERE.items() for name in names.split()}
"""Their name -> our key, several keys, a key with its value, or an option of the command line.
Brackets hold an explanation. A name with a dot has this meaning in its section.
"""
ABSENT = {name: advice for advice, names in _ABSENT.items() for name in names.split()}
"""Their names without a key here, and advice for each."""
