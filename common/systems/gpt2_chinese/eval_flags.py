"""Translation of the flags of GPT2-Chinese's eval.py.

Each token is scored once here, except a remainder of less than a window at the end of the corpus.
The original leaves out the remainder of each piece and the last windows that fill no batch. Its
writing of result.txt fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.systems.dialect import Table, To, Translation, Without, apply, require_all_taken, whole
from common.systems.gpt2_chinese.shared import (
    RAW,
    SYSTEM as SYSTEM,
    TOKENS,
    flags_of,
    take_data_flags,
    take_model,
    take_tokenizer,
)

PROGRAM = "eval.py"
PROGRAMS = (PROGRAM,)

TABLE: Table = {
    "batch_size": To("validation.micro_batch_size"),
    "log_step": To("logging.interval", whole),
    "output_dir": To("output_dir", lambda value: str(Path(value))),
    "pretrained_model": To("checkpoint.load", str),
    "device": Without("CUDA_VISIBLE_DEVICES says it"),
    "stride": Without("each token is scored once"),
}
SWITCHES = frozenset({"raw", "segment", "bpe_token"})
"""Flags without a value that this module reads itself."""
VALUED = frozenset({
    "model_config", "tokenized_data_path", "tokenizer_path", "encoder_json", "vocab_bpe", *RAW,
}) - SWITCHES  # fmt: skip
"""Flags with a value that this module reads itself."""
FLAGS = (*TABLE, *SWITCHES, *VALUED)
DEFAULTS: dict[str, Any] = {
    "model_config": "config/model_config_small.json", "tokenizer_path": "cache/vocab_small.txt",
    "raw_data_path": "data/eval.json", "tokenized_data_path": "data/tokenized_eval/",
    "batch_size": 8, "log_step": 1, "num_pieces": 100, "min_length": 128,
    "output_dir": "eval_result/",
}  # fmt: skip


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
    require_all_taken(theirs, FLAGS)
    return ours


def settle(ours: Translation) -> None:
    """Take nothing away: every flag has its effect on both backends."""
