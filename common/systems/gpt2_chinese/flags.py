"""Translation of the flags of GPT2-Chinese's train.py and train_single.py.

Windows are cut from the whole corpus. The original loses the remainders of pieces, and gradients
that are accumulated for a step that never comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.dialects.gpt2_chinese import SINCE_2021, TRAIN as TABLE, TRAIN_DEFAULTS as DEFAULTS
from common.errors import ConfigError
from common.systems.dialect import Theirs, Translation, apply, require_all_taken
from common.systems.gpt2_chinese.shared import (
    SYSTEM as SYSTEM,
    TOKENS,
    flags_of,
    note_given,
    take_data_flags,
    take_model,
    take_tokenizer,
)

PROGRAM = "train.py"
PROGRAMS = (PROGRAM, "train_single.py")


def translate(tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str]) -> Translation:
    """Return our configuration of train.py's flags, by name and value. Raises ConfigError for flags
    that this project cannot follow, and for a model_config.json that cannot be read.
    """
    if later := [name for name in SINCE_2021 if name in tree]:
        raise ConfigError(
            f"{sources[later[0],]}: a flag of GPT2-Chinese's train.py since April 2021 (PyTorch"
            " Lightning), and the flags before that are taken here; write "
            + ", ".join(f"{SINCE_2021[name]} for --{name}" for name in later)
            + "; its data file, one JSON string a line, can stay"
        )
    theirs, ours = flags_of(tree, sources, DEFAULTS), Translation()
    begin(ours)
    take_model(Path(str(theirs.take("model_config"))), theirs.where("model_config"), ours)
    take_tokenizer(theirs, ours)
    _take_data(theirs, ours)
    level = str(theirs.take("fp16_opt_level"))
    if theirs.take("fp16"):
        # training fails with Apex's O3, which keeps no float32 weights; ours keeps them
        word = "pure_fp16" if level == "O3" else level
        ours.set("precision", word, theirs.where("fp16_opt_level"), "fp16_opt_level")
    else:
        note_given(theirs, "fp16_opt_level", "--fp16 is not given", ours)
    # theirs counts micro batches
    lines = -(-theirs.take_count("log_step") // theirs.peek_count("gradient_accumulation"))
    ours.set("logging.interval", lines, theirs.where("log_step"), "log_step")
    take_data_flags(theirs, ours)
    apply(TABLE, theirs, ours)
    require_all_taken(theirs, TABLE)
    return ours


def begin(ours: Translation) -> None:
    """Set what train.py does with any flags: AdamW of transformers 2.1.1, a learning rate that
    falls to 0, all documents for training, and a model after each epoch.
    """
    for key, value in (
        ("seed", 1234), ("precision", "float32"),
        ("optimizer.name", "adamw"), ("optimizer.schedule", "linear"),
        ("optimizer.beta1", 0.9), ("optimizer.beta2", 0.999), ("optimizer.epsilon", 1e-6),
        ("optimizer.weight_decay", 0.0), ("data.split", "1,0,0"),
        ("checkpoint.epoch_models", True), ("logging.style", "gpt2-chinese"),
    ):  # fmt: skip
        ours.set(key, value)


def _take_data(theirs: Theirs, ours: Translation) -> None:
    folder = Path(str(theirs.take("tokenized_data_path")))
    where = theirs.where("tokenized_data_path")
    prefix = folder / f"{TOKENS}_text_document"
    ours.set("data.train", str(prefix), where, "tokenized_data_path")
    stride, window = theirs.take("stride"), ours.get("model.seq_length")
    if isinstance(stride, int) and isinstance(window, int) and stride > window:
        # the original leaves the tokens between windows out, in every epoch
        stride = window
    ours.set("data.stride", stride, theirs.where("stride"), "stride")


def settle(ours: Translation) -> None:
    """Take nothing away: every flag has its effect on both backends."""
