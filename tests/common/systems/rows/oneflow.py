"""OneFlow's smallest command line, its flags without a default, and its values that mean off.

Sources: OneFlow-Benchmark before fe1e78e, LanguageModeling/GPT/oneflow_gpt/config.py, training.py,
optimizer.py, snapshot.py and util.py.
"""

from __future__ import annotations

from typing import Any

from common.systems.oneflow.flags import DIALECT
from tests.common.systems.foreign_runs import Rows, Sentinel

MINIMAL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "micro_batch_size": 1,
    "train_iters": 5,
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    name: {"fp16": True} for name in ("initial_loss_scale", "loss_scale_window")
}
WITHOUT_DEFAULT: dict[str, str] = {
    **dict.fromkeys(
        ("num_layers", "hidden_size", "num_attention_heads", "train_iters", "dataset"),
        "a run there ends without it",
    ),
    **dict.fromkeys(
        ("micro_batch_size", "global_batch_size", "num_accumulation_steps", "lr_decay_iters"),
        "it follows from other flags, there and here",
    ),
    **dict.fromkeys(
        ("lr_warmup_iters", "lr_warmup_fraction"), "None, which is no warm-up, as here"
    ),
    "save_interval": "None, which is never before the last step, as here",
    **dict.fromkeys(("checkpoint_activations", "fp16"), "a switch, off"),
}
SENTINELS = [
    Sentinel("seed", 12345, "there is no validation", {"validation.interval": "never"}),
    Sentinel(
        "save_interval", 0, "only the last step: save_interval_ > 0", {"checkpoint.interval": 0},
    ),
    Sentinel(
        "save_interval", -1, "only the last step: save_interval_ > 0", {"checkpoint.interval": 0},
    ),
    Sentinel("lr_warmup_iters", 0, "no warm-up: iters > 0", {"optimizer.warmup_steps": 0}),
    Sentinel(
        "lr_warmup_fraction", 0.1, "nothing, without lr_decay_iters",
        {"optimizer.warmup_fraction": None},
    ),
    Sentinel(
        "make_vocab_size_divisible_by", 0, "no padding: if alignment == 0",
        {"model.vocab_multiple": 1},
    ),
    Sentinel("hidden_dropout", 0, "none", {"model.dropout": 0.0, "model.attention_dropout": 0.1}),
    Sentinel(
        "clip_grad", 0, "all gradients become 0: grad_clipping.by_global_norm(0)",
        "expected a number above 0",
    ),
    Sentinel(
        "loss_scale", 0, "all gradients become 0: static_loss_scale(0)",
        "expected a number above 0", {"fp16": True},
    ),
    Sentinel("log_interval", 0, "it ends at step 1: step_ % 0", "logging.interval: input"),
    Sentinel("train_samples", 0, "0 steps", "expected a whole number above 0", {"train_iters": ""}),
]  # fmt: skip
ROWS = {"oneflow": Rows(DIALECT, MINIMAL, WITHOUT_DEFAULT, BESIDE, SENTINELS)}
