"""Translation of the flags of GPT2-Chinese's generate.py and generate_texts.py.

--batch_size k gives k equal samples in the original, and different ones here. --nsamples must be a
multiple of it. A text has --length tokens and continues after [CLS] with another one, as in the
original; predict.stop_at_end_of_text=true ends it.

--n_ctx, or Lightning's .ckpt as --model_path, is the generate.py since April 2021. It has defaults
of its own and begins each text with [CLS].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.dialects.gpt2_chinese import (
    GENERATE as TABLE,
    GENERATE_DEFAULTS as DEFAULTS,
    OF_LATER,
    OF_SAMPLES,
    OF_TITLES,
)
from common.systems.dialect import Theirs, Translation, apply, require_all_taken
from common.systems.gpt2_chinese.shared import (
    SYSTEM as SYSTEM,
    flags_of,
    note_given,
    take_model,
    take_tokenizer,
)

PROGRAM = "generate.py"
PROGRAMS = (PROGRAM, "generate_texts.py")

LIGHTNING = ".ckpt"
"""Ending of PyTorch Lightning's checkpoints."""
START = "[CLS]"
"""Token before each text of the later generate.py."""


def translate(tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str]) -> Translation:
    """Return our configuration of the flags, by name and value. With flags of titles, it is that of
    generate_texts.py. Raises ConfigError for flags that this project cannot follow.
    """
    by_titles = bool(OF_TITLES.keys() & tree.keys())
    later = "n_ctx" in tree or str(tree.get("model_path", "")).endswith(LIGHTNING)
    defaults = DEFAULTS | (OF_TITLES if by_titles else OF_SAMPLES) | (OF_LATER if later else {})
    theirs, ours = flags_of(tree, sources, defaults), Translation()
    for key, value in (
        ("seed", 1234), ("optimizer.learning_rate", 1.5e-4), ("logging.style", "gpt2-chinese"),
        ("predict.strategy", "sampling"), ("predict.stop_at_end_of_text", False),
    ):  # fmt: skip
        ours.set(key, value)
    _take_lengths(theirs, ours)
    take_tokenizer(theirs, ours)
    (_take_titles if by_titles else _take_prefix)(theirs, ours)
    apply(TABLE, theirs, ours)
    require_all_taken(theirs, TABLE)
    return ours


def _take_lengths(theirs: Theirs, ours: Translation) -> None:
    """Take the model from --model_path, as the original does. The window is --n_ctx, or the
    model's.
    """
    weights, config = Path(str(theirs.peek("model_path"))), theirs.take("model_config")
    ours.set("output_dir", str(weights.parent), theirs.where("model_path"), "model_path")
    beside = weights / "config.json"
    if beside.is_file():
        take_model(beside, theirs.where("model_path"), ours)
        note_given(theirs, "model_config", "the weights have a config.json", ours)
    else:
        take_model(Path(str(config)), theirs.where("model_config"), ours)
    window, length = ours.get("model.seq_length"), theirs.take("length")
    if "n_ctx" in theirs.defaults:
        window = theirs.take_count("n_ctx")
        if theirs.is_left_out("n_ctx"):
            window = min(window, ours.get("model.max_positions"))
    ours.set("predict.window", window, theirs.where("n_ctx"), "n_ctx")
    length = window if length == -1 else length
    ours.set("predict.max_new_tokens", length, theirs.where("length"), "length")


def _take_prefix(theirs: Theirs, ours: Translation) -> None:
    start = START if "n_ctx" in theirs.defaults else ""
    ours.set("predict.prompt", f"{start}{theirs.take('prefix')}", theirs.where("prefix"), "prefix")
    ours.set("predict.num_sequences", theirs.take("nsamples"), theirs.where("nsamples"), "nsamples")
    folder = theirs.take("save_samples_path")
    if theirs.take("save_samples"):
        file = str(Path(str(folder)) / "samples.txt")
        ours.set("predict.output_file", file, theirs.where("save_samples"), "save_samples")
    else:
        note_given(theirs, "save_samples_path", "--save_samples is not given", ours)


def _take_titles(theirs: Theirs, ours: Translation) -> None:
    titles, file = theirs.take("titles"), theirs.take("titles_file")
    if file:
        ours.set("predict.prompt_file", str(file), theirs.where("titles_file"), "titles_file")
        note_given(theirs, "titles", "--titles_file has the titles", ours)
    else:
        ours.set("predict.prompt", str(titles).split(), theirs.where("titles"), "titles")
    for flag, key in (
        ("articles_per_title", "predict.num_sequences"),
        ("save_path", "predict.output_folder"),
    ):
        value = theirs.take(flag)
        ours.set(key, value if flag != "save_path" else str(Path(value)), theirs.where(flag), flag)


def settle(ours: Translation) -> None:
    """Take nothing away: every flag has its effect on both backends."""
