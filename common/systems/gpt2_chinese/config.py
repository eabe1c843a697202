"""GPT2-Chinese's model_config.json as a configuration: its model, and the defaults of train.py.
Data, tokenizer and run folder are given with keys of this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.dialects.gpt2_chinese import TRAIN, TRAIN_DEFAULTS
from common.dialects.hugging_face import DEFAULTS as DEFAULTS, TABLE as TABLE
from common.systems.dialect import Theirs, Translation, apply
from common.systems.gpt2_chinese.flags import begin
from common.systems.gpt2_chinese.shared import SYSTEM as SYSTEM, take_sizes

BASE = "_base_config"
"""Key of base files; theirs have none."""
MARKS = frozenset({"n_ctx", "n_embd", "n_head", "n_layer", "model_type"})


def translate(tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str]) -> Translation:
    """Return our configuration of a model_config.json. Raises ConfigError for one without a
    vocabulary, and for another model.
    """
    ours = Translation()
    begin(ours)
    apply(TRAIN, Theirs(SYSTEM, {}, {}, TRAIN_DEFAULTS), ours)
    take_sizes(tree, next(iter(sources.values()), SYSTEM).rpartition(":")[0], ours)
    ours.set("data.stride", min(TRAIN_DEFAULTS["stride"], ours.get("model.seq_length")))
    return ours


def settle(ours: Translation) -> None:
    """Take nothing away: every key has its effect on both backends."""
