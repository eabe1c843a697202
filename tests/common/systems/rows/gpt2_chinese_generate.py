"""GPT2-Chinese's generate.py and generate_texts.py. Source: the study DistributedTrainingGPT2 and
Morizeyao/GPT2-Chinese c4288cd, generate_texts.py.
"""

from __future__ import annotations

from typing import Any

from common.systems.gpt2_chinese import GENERATION as DIALECT
from tests.common.systems.foreign_runs import Sentinel

__all__ = ["BESIDE", "DIALECT", "MINIMAL", "SENTINELS", "WITHOUT_DEFAULT"]

MINIMAL: dict[str, Any] = {}
BESIDE: dict[str, dict[str, Any]] = {}
WITHOUT_DEFAULT = {"batch_size": "only generate.py has it: OF_SAMPLES"}
SENTINELS = [
    Sentinel("length", -1, "as many tokens as n_ctx", {"predict.max_new_tokens": 1024}),
    Sentinel("length", 0, "adds nothing", "predict.max_new_tokens"),
    Sentinel("topk", 0, "all tokens (top_k > 0 filters)", {"predict.top_k": 0}),
    Sentinel("topk", -1, "all tokens (top_k > 0 filters)", {"predict.top_k": 0}),
    Sentinel("topp", 0, "all tokens (top_p > 0 filters)", {"predict.top_p": 1.0}),
    Sentinel("topp", -1, "all tokens (top_p > 0 filters)", {"predict.top_p": 1.0}),
    Sentinel("topp", 2, "all tokens: no sum is above it", {"predict.top_p": 1.0}),
    Sentinel(
        "temperature", 0, "divides by it; greedy here", "num_sequences=10: greedy gives equal"
    ),
    Sentinel("repetition_penalty", 0, "divides by it", "predict.repetition_penalty"),
    Sentinel("nsamples", 0, "writes nothing", "predict.num_sequences"),
    Sentinel("batch_size", 0, "divides by it", "predict.batch_size"),
    Sentinel("articles_per_title", 0, "writes nothing", "predict.num_sequences"),
]
