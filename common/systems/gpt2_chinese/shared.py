"""Parts of the translation that GPT2-Chinese's commands share: model_config.json, the tokenizer's
flags, and defaults of flags.

Source: Morizeyao/GPT2-Chinese with transformers 2.1.1, and the study DistributedTrainingGPT2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.paths import ROOT, looked_in
from common.structured_files import read_json_mapping
from common.systems.dialect import Only, Table, Theirs, To, Translation, apply, number

SYSTEM = "GPT2-Chinese"
TOKENS = "tokenized_train"
"""Stem of the names of the pieces in --tokenized_data_path, and of the .bin/.idx pair made from
them.
"""
CONVERTED = "torch_gpt2"
"""Folder inside a folder of weights that holds the converted weights."""

_ELSE = "it does not change what GPT-2 computes"
MODEL: Table = {
    "n_ctx": To("model.seq_length"),
    "n_positions": To("model.max_positions"),
    "n_embd": To("model.hidden_size"),
    "n_layer": To("model.num_layers"),
    "n_head": To("model.num_heads"),
    "n_inner": To("model.ffn_hidden_size"),
    "vocab_size": To("model.vocab_size"),
    "layer_norm_epsilon": To("model.layer_norm_epsilon", number),
    "initializer_range": To("model.initializer_range", number),
    "embd_pdrop": To("model.embedding_dropout", number),
    "attn_pdrop": To("model.attention_dropout", number),
    "resid_pdrop": To("model.hidden_dropout", number),
    "activation_function": Only(
        ("gelu_new", "gelu_pytorch_tanh"), "GPT-2 has gelu_new; train with that"
    ),
}
_OWN = ROOT / "compat" / "gpt2_chinese"
"""Folder that stands for the users' own, which has config/."""
_SIZES = ("n_embd", "n_layer", "n_head", "vocab_size")


def with_defaults(
    defaults: Mapping[str, Any],
    tree: Mapping[str, Any],
    sources: Mapping[tuple[str | int, ...], str],
) -> Theirs:
    """Return their flags, with defaults for those that were not given."""
    left_out: dict[tuple[str | int, ...], str]
    left_out = {(name,): f"default: --{name}" for name in defaults}
    return Theirs(SYSTEM, {**defaults, **tree}, {**left_out, **sources})


def forget_defaults(
    ours: Translation, defaults: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Forget flags without effect that were not given, so that no remark names them."""
    for flag in ours.without_effect.keys() & defaults.keys() - given.keys():
        del ours.without_effect[flag]


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
    missing = [name for name in _SIZES if fields.get(name) is None]
    if fields.get("n_ctx") is None and fields.get("n_positions") is None:
        missing.append("n_ctx")
    if missing:
        raise ConfigError(f"{path}: {', '.join(missing)} missing; give all of a GPT-2's sizes")
    window = fields.get("n_ctx") or fields["n_positions"]
    fields = {**fields, "n_ctx": window, "n_positions": fields.get("n_positions") or window}
    theirs = Theirs(SYSTEM, fields, {(name,): f"{path}: {name}" for name in fields})
    ours.set("model.dropout", 0.1)  # GPT2Config's default
    apply(MODEL, theirs, ours)
    for name in theirs.left():
        ours.note(name, _ELSE)


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
        ours.note("tokenizer_path", "--bpe_token takes --encoder_json")
    else:
        kind = "BertWordLevel" if segment else "BertWordPieceLowerCase"
        ours.set("data.tokenizer.type", kind, theirs.where("segment"), "segment" * bool(segment))
        files = {"vocab_file": ("tokenizer_path", path)}
        for flag in {"encoder_json", "vocab_bpe"} & set(theirs.names):
            ours.note(flag, "it is for --bpe_token")
    for key, (flag, file) in files.items():
        ours.set(f"data.tokenizer.{key}", str(file), theirs.where(flag), flag)


def weights_in(path: str) -> str:
    """Return the folder to load: the converted one inside a folder of transformers' weights."""
    folder = Path(path)
    return str(folder / CONVERTED if (folder / "config.json").is_file() else folder)
