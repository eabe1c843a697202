"""GPT2-Chinese's model_config.json. Source: transformers 2.1.1, configuration_gpt2.py."""

from __future__ import annotations

from typing import Any

from common.systems.gpt2_chinese import FILES as DIALECT
from tests.common.systems.foreign_runs import Sentinel

__all__ = ["BESIDE", "DIALECT", "MINIMAL", "SENTINELS", "WITHOUT_DEFAULT"]

MINIMAL: dict[str, Any] = {"vocab_size": 100}
BESIDE: dict[str, dict[str, Any]] = {}
WITHOUT_DEFAULT = {
    "vocab_size": "from_json_file leaves -1, and a run there ends",
    "n_inner": "it is 4 n_embd, there and here",
}
SENTINELS: list[Sentinel] = []
