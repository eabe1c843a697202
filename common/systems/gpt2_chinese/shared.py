"""Parts of the translation that GPT2-Chinese's commands share: model_config.json, and the
tokenizer's flags.

Source: Morizeyao/GPT2-Chinese with transformers 2.1.1, and the study DistributedTrainingGPT2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.dialects.gpt2_chinese import DATA, SYSTEM as SYSTEM
from common.dialects.hugging_face import DEFAULTS, TABLE
from common.dialects.rules import Defaults
from common.errors import ConfigError
from common.paths import ROOT, looked_in
from common.structured_files import read_json_mapping
from common.systems.dialect import Theirs, Translation, apply, require_all_taken

TOKENS = "tokenized_train"
"""Stem of the names of the pieces in --tokenized_data_path, and of the .bin/.idx pair made from
them.
"""
_RATES = ("embedding_dropout", "attention_dropout", "hidden_dropout")
_OWN = ROOT / "compat" / "gpt2_chinese"
"""Folder that stands for the users' own, which has config/."""


def flags_of(
    tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str], defaults: Defaults
) -> Theirs:
    """Return their flags. The place of one that is left out is its default."""
    left_out: dict[tuple[str | int, ...], str]
    left_out = {(name,): f"default: --{name}" for name in defaults}
    return Theirs(SYSTEM, tree, {**left_out, **sources}, defaults)


def note_given(theirs: Theirs, flag: str, why: str, ours: Translation) -> None:
    """Note that a flag has no effect, unless it was left out."""
    if not theirs.is_left_out(flag):
        ours.note(flag, why)


def take_model(path: Path, where: str, ours: Translation) -> None:
    """Take the model from model_config.json, or from the config.json beside weights.

    where: the place that names the file, which may be one of GPT2-Chinese's own. Raises ConfigError
    for a missing file or size.
    """
    if not path.is_file() and not path.is_absolute():
        path = next(filter(Path.is_file, (path, _OWN / path)), path)
    if not path.is_file():
        raise ConfigError(
            f"{where}: {path}: no such file{looked_in(path)}; expected GPT2-Chinese's"
            " model_config.json, with n_ctx, n_embd, n_head, n_layer and vocab_size"
        )
    take_sizes(read_json_mapping(path, finite=False), str(path), ours)


def take_sizes(fields: Mapping[str, Any], path: str, ours: Translation) -> None:
    """Take the model from the fields of a model_config.json or config.json."""
    theirs = Theirs(SYSTEM, fields, dict.fromkeys(((name,) for name in fields), path), DEFAULTS)
    positions = theirs.peek("n_positions")
    if theirs.is_left_out("n_ctx") and isinstance(positions, int):
        ours.set("model.seq_length", min(positions, DEFAULTS["n_ctx"]))
    apply(TABLE, theirs, ours)
    require_all_taken(theirs, TABLE)
    rates = {name: ours.tree["model"][name] for name in _RATES}
    if len(set(rates.values())) == 1:  # one key, which model.dropout=0 of a user then replaces
        for name in _RATES:
            del ours.tree["model"][name]
        ours.set("model.dropout", rates[_RATES[0]], theirs.where("embd_pdrop"), "embd_pdrop")
    if ours.get("model.vocab_size") is None:
        raise ConfigError(f"{path}: vocab_size missing; give the number of lines of the vocabulary")


def take_tokenizer(theirs: Theirs, ours: Translation) -> None:
    """Take the kind and the files of the tokenizer, by --segment and --bpe_token."""
    path, segment = theirs.take("tokenizer_path"), theirs.take("segment")
    encoder, merges = theirs.take("encoder_json"), theirs.take("vocab_bpe")
    if theirs.take("bpe_token"):
        is_model = str(encoder).endswith(".model")
        kind = "SentencePieceTokenizer" if is_model else "GPT2BPETokenizer"
        ours.set("data.tokenizer.type", kind, theirs.where("bpe_token"), "bpe_token")
        files = {"vocab_file": ("encoder_json", encoder)}
        files |= {} if is_model else {"merge_file": ("vocab_bpe", merges)}
        for flag in ("tokenizer_path", "segment"):
            note_given(theirs, flag, "--bpe_token takes --encoder_json", ours)
    else:
        kind = "BertWordLevel" if segment else "BertWordPieceLowerCase"
        ours.set("data.tokenizer.type", kind, theirs.where("segment"), "segment" * bool(segment))
        files = {"vocab_file": ("tokenizer_path", path)}
        for flag in ("encoder_json", "vocab_bpe"):
            note_given(theirs, flag, "it is for --bpe_token", ours)
    for key, (flag, file) in files.items():
        ours.set(f"data.tokenizer.{key}", str(file), theirs.where(flag), flag)


def take_data_flags(theirs: Theirs, ours: Translation) -> None:
    """Check the flags of the data, which are made before the run."""
    theirs.take_count("num_pieces")
    shortest = theirs.take_number("min_length")
    if type(shortest) is not int:
        theirs.refuse("min_length", shortest, "expected a whole number")
    for flag in DATA:
        theirs.take(flag)
        note_given(theirs, flag, "the data are made before the run", ours)
