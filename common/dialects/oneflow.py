"""Flags of OneFlow-Benchmark, many of which are Megatron's.

Source: OneFlow-Benchmark before fe1e78e, LanguageModeling/GPT/oneflow_gpt/config.py.
"""

from __future__ import annotations

from common.dialects.megatron import DEFAULTS as MEGATRON_DEFAULTS, TABLE as MEGATRON
from common.dialects.rules import (
    Defaults,
    Ignored,
    MapTo,
    Switch,
    Table,
    above_zero,
    each,
    number,
    one_of,
    whole,
    words,
)

_LAUNCHED = "the launcher (scripts/run_distribute.sh) says it"


POSITIVE = above_zero("with 0 OneFlow's weights would not change")
_SHARED = words("""
    num_layers hidden_size seq_length vocab_size num_attention_heads attention_dropout
    hidden_dropout init_method_std micro_batch_size global_batch_size train_iters train_samples
    checkpoint_activations min_lr lr_decay_style lr_decay_iters lr_warmup_iters lr_warmup_fraction
    weight_decay adam_beta1 adam_beta2 adam_eps loss_scale initial_loss_scale loss_scale_window
    tensor_model_parallel_size pipeline_model_parallel_size split seed log_interval save load
""")
"""Flags that mean what Megatron's do."""

TABLE: Table = {
    **{name: rule for name, rule in MEGATRON.items() if name in _SHARED},
    "make_vocab_size_divisible_by": MapTo("model.vocab_multiple", lambda size: whole(size) or 1),
    "num_accumulation_steps": MapTo("train.accumulation_steps"),
    "optimizer": MapTo("optimizer.name", one_of(adamw="adamw", adam="adam", sgd="sgd")),
    "learning_rate": MapTo("optimizer.learning_rate", number),
    "clip_grad": MapTo("optimizer.clip_grad", POSITIVE),
    "fp16": MapTo("precision", Switch("fp16"), "precision=fp16"),
    "dataset": MapTo("data.train"),
    "save_interval": MapTo("checkpoint.interval", lambda steps: max(0, whole(steps))),
    "log": Ignored("the run folder holds the log"),
    "metric_print_format": MapTo("logging.style", one_of(table="oneflow", normal="oneflow-normal")),
    "save_last": Ignored("the last step is always saved"),
    "save_init": Ignored("the weights before the first step are not saved"),
    "profile_transformer_layer": Ignored("profile.start and profile.stop say which steps are"
        " traced"),
    "use_external_dataset": Ignored("data.train is read anyway"),
    **each(Ignored(_LAUNCHED), "num_gpus_per_node node_ips ctrl_port"),
    "num_nodes": Ignored(_LAUNCHED, "parallel.data_parallel (or the launcher's range of ranks)"),
    "use_rdma": Ignored("NCCL and HCCL take the fastest network that they find"),
    **each(Ignored("the fastest kernels that the device has are taken"), """
        no_scale_tril_softmax_dropout_fusion no_bias_gelu_fusion no_bias_dropout_fusion
        multihead_attention_fusion no_query_key_layer_scaling
    """),
}  # fmt: skip

DEFAULTS: Defaults = {
    **{name: value for name, value in MEGATRON_DEFAULTS.items() if name in TABLE},
    "vocab_size": 50257, "seq_length": 1024, "optimizer": "adamw", "learning_rate": 1e-3,
    "seed": 12345, "metric_print_format": "table",
}  # fmt: skip
"""Values of flags that are left out: OneFlow-Benchmark 2a18877, LanguageModeling/GPT/oneflow_gpt/config.py."""
