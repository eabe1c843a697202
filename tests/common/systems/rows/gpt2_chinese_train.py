"""GPT2-Chinese's train.py. Source: Morizeyao/GPT2-Chinese 898a0ac, train.py."""

from __future__ import annotations

from typing import Any

from common.systems.gpt2_chinese import TRAINING as DIALECT
from tests.common.systems.foreign_runs import Sentinel

__all__ = ["BESIDE", "DIALECT", "MINIMAL", "SENTINELS", "WITHOUT_DEFAULT"]

MINIMAL: dict[str, Any] = {}
BESIDE = {
    "fp16_opt_level": {"fp16": True},
    "encoder_json": {"bpe_token": True},
    "vocab_bpe": {"bpe_token": True},
}
WITHOUT_DEFAULT = {"pretrained_model": "it is empty there: the model is new"}
_FAILS = "divides by it"
SENTINELS = [
    Sentinel(
        "max_grad_norm", 0, "makes all gradients 0 (clip_grad_norm_)", "expected a number above 0"
    ),
    Sentinel("max_grad_norm", -1, "turns gradients round", "expected a number above 0"),
    Sentinel("warmup_steps", 0, "no warm-up", {"optimizer.warmup_steps": 0}),
    Sentinel("epochs", 0, "trains nothing, and saves a new model", "train.max_epochs"),
    Sentinel("log_step", 0, _FAILS, "log_step=0: expected a whole number above 0"),
    Sentinel("gradient_accumulation", 0, _FAILS, "gradient_accumulation=0: expected a whole"),
    Sentinel("batch_size", 0, _FAILS, "train.micro_batch_size"),
    Sentinel("stride", 0, _FAILS, "data.stride"),
    Sentinel("num_pieces", 0, "reads no piece", "num_pieces=0: expected a whole number above 0"),
    Sentinel("min_length", 0, "leaves only empty texts out", {"data.split": "1,0,0"}),
    Sentinel("min_length", 1.5, "argparse refuses it", "min_length=1.5: expected a whole number"),
    # "log_step counts micro batches": (overall_step + 1) % log_step
    Sentinel(
        "log_step", 8, "a line every 8 micro batches", {"logging.interval": 2},
        {"gradient_accumulation": 4},
    ),
]  # fmt: skip
