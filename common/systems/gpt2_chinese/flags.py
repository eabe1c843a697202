"""Translation of the flags of GPT2-Chinese's train.py and train_single.py.

Windows are cut from the whole corpus. The original loses the remainders of pieces, and gradients
that are accumulated for a step that never comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.systems.dialect import (
    Table,
    Theirs,
    To,
    Translation,
    Without,
    apply,
    number,
    require_all_taken,
)
from common.systems.gpt2_chinese.shared import (
    RAW,
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


def _norm(value: Any) -> float:
    """Return --max_grad_norm. With 0, all gradients would be 0 there; here it is off."""
    if not number(value) > 0:
        raise ValueError("expected a number above 0; optimizer.clip_grad=0 clips nothing")
    return number(value)


TABLE: Table = {
    "epochs": To("train.max_epochs", number),
    "batch_size": To("train.micro_batch_size"),
    "gradient_accumulation": To("train.accumulation_steps"),
    "lr": To("optimizer.learning_rate", number),
    "warmup_steps": To("optimizer.warmup_steps"),
    "max_grad_norm": To("optimizer.clip_grad", _norm),
    "output_dir": To("output_dir", lambda value: str(Path(value))),
    "pretrained_model": To("checkpoint.init_from", str),
    "device": Without("CUDA_VISIBLE_DEVICES says it; torchrun starts a process a device"),
    "local_rank": Without("the launcher says it"),
    "writer_dir": Without("TensorBoard's events are in output_dir/tensorboard"),
}
SWITCHES = frozenset({"raw", "fp16", "segment", "bpe_token"})
"""Flags without a value that this module reads itself."""
VALUED = frozenset({
    "model_config", "tokenized_data_path", "stride", "fp16_opt_level", "tokenizer_path",
    "encoder_json", "vocab_bpe", "log_step", *RAW,
}) - SWITCHES  # fmt: skip
"""Flags with a value that this module reads itself."""
SINCE_2021 = {
    "data_path": "--raw --raw_data_path", "config_path": "--model_config",
    "vocab_path": "--tokenizer_path", "max_length": "the n_ctx of --model_config",
    "t_total": "optimizer.decay_steps=N", "eval_interval": "validation.interval=N",
    "val_examples": "data.split=W,W,W",
}  # fmt: skip
"""Flags of the later train.py, which trains with PyTorch Lightning, and what says it here. Source:
Morizeyao/GPT2-Chinese a22ba9a, train.py. A step there has one text a row, which is cut or padded to
--max_length. The padding is learnt too.
"""
FLAGS = (*TABLE, *SWITCHES, *VALUED, *SINCE_2021)
DEFAULTS: dict[str, Any] = {
    "model_config": "config/model_config_small.json", "tokenizer_path": "cache/vocab_small.txt",
    "raw_data_path": "data/train.json", "tokenized_data_path": "data/tokenized/",
    "epochs": 5, "batch_size": 8, "lr": 1.5e-4, "warmup_steps": 2000, "log_step": 1, "stride": 768,
    "gradient_accumulation": 1, "fp16_opt_level": "O1", "max_grad_norm": 1.0, "num_pieces": 100,
    "min_length": 128, "output_dir": "model/", "encoder_json": "tokenizations/encoder.json",
    "vocab_bpe": "tokenizations/vocab.bpe",
}  # fmt: skip
"""Values of flags that are left out; the others are off. Source: Morizeyao/GPT2-Chinese 898a0ac,
train.py.
"""


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
    require_all_taken(theirs, FLAGS)
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
