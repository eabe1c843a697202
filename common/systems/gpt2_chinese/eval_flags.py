"""Translation of the flags of GPT2-Chinese's eval.py.

Each token is scored once here, except a remainder of less than a window at the end of the corpus.
The original leaves out the remainder of each piece and the last windows that fill no batch. Its
writing of result.txt fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.dialects.gpt2_chinese import EVAL as TABLE, EVAL_DEFAULTS as DEFAULTS
from common.errors import ConfigError
from common.systems.dialect import Translation, apply, require_all_taken
from common.systems.gpt2_chinese.shared import (
    SYSTEM as SYSTEM,
    TOKENS,
    flags_of,
    take_data_flags,
    take_model,
    take_tokenizer,
)

PROGRAM = "eval.py"
PROGRAMS = (PROGRAM,)


def translate(tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str]) -> Translation:
    """Return our configuration of eval.py's flags, by name and value. Raises ConfigError for flags
    that this project cannot follow.
    """
    theirs, ours = flags_of(tree, sources, DEFAULTS), Translation()
    if theirs.peek("pretrained_model") is None:
        raise ConfigError(
            "--pretrained_model is not given; name the trained model, such as model/final_model"
        )
    for key, value in (
        ("seed", 1234), ("optimizer.learning_rate", 1.5e-4), ("logging.style", "gpt2-chinese"),
    ):  # fmt: skip
        ours.set(key, value)
    take_model(Path(str(theirs.take("model_config"))), theirs.where("model_config"), ours)
    take_tokenizer(theirs, ours)
    folder = Path(str(theirs.take("tokenized_data_path")))
    where = theirs.where("tokenized_data_path")
    prefix = folder / f"{TOKENS}_text_document"
    ours.set("data.validation", str(prefix), where, "tokenized_data_path")
    take_data_flags(theirs, ours)
    apply(TABLE, theirs, ours)
    require_all_taken(theirs, TABLE)
    return ours


def settle(ours: Translation) -> None:
    """Take nothing away: every flag has its effect on both backends."""
