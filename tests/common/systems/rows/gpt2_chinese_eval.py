"""GPT2-Chinese's eval.py. Source: Morizeyao/GPT2-Chinese c1c7d8e, eval.py."""

from __future__ import annotations

from typing import Any

from common.systems.gpt2_chinese import EVALUATION as DIALECT
from tests.common.systems.foreign_runs import Sentinel

__all__ = ["BESIDE", "DIALECT", "MINIMAL", "SENTINELS", "WITHOUT_DEFAULT"]

MINIMAL: dict[str, Any] = {"pretrained_model": "model/final_model"}
BESIDE: dict[str, dict[str, Any]] = {}
WITHOUT_DEFAULT = {"pretrained_model": "eval.py ends without it"}
SENTINELS = [
    Sentinel("log_step", 0, "divides by it", "logging.interval"),
    Sentinel("batch_size", 0, "divides by it", "validation.micro_batch_size"),
    Sentinel("num_pieces", 0, "reads no piece", "num_pieces=0: expected a whole number above 0"),
]
