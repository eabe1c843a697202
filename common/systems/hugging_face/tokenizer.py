"""The tokenizer that goes along with weights, as the files that transformers' AutoTokenizer reads:
those beside the weights, or those of the run, where they are still there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import ConfigError, TokenizerError
from common.files import atomic_write
from common.structured_files import MAX_JSON_BYTES, read_bytes, read_json_mapping
from common.systems.weights import Weights
from common.tokenizer.bpe_files import END_OF_TEXT, BPEVocabulary, read_vocabulary
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer, files_in

TOKENIZER_FILES = {
    "encoder.json": "vocab.json", "vocab.bpe": "merges.txt",  # as OpenAI calls them
    **{
        name: name
        for name in (
            "vocab.json", "merges.txt", "vocab.txt", "tokenizer.json", "tokenizer_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
        )
    },
}  # fmt: skip
"""Files that go along when they lie beside the weights -> their names in the target."""


def put_tokenizer(folder: Path, weights: Weights) -> None:
    """Write the files into ``folder``, if they are known. Raises StorageError, and TokenizerError
    for what cannot be read.
    """
    for name, file in _beside(weights).items():
        content = read_bytes(file, limit=MAX_JSON_BYTES, error=TokenizerError)
        with atomic_write(folder / name) as copy:
            copy.write(content)
    vocabulary = _of_run(weights)
    if isinstance(vocabulary, BPEVocabulary):
        write_tokenizer(folder, vocabulary, weights.model.max_positions or weights.model.seq_length)


def without_tokenizer(weights: Weights) -> dict[str, str]:
    """Why what is written lacks the tokenizer of the run, if it does."""
    vocabulary = _of_run(weights)
    return (
        {"tokenizer": f"files of the tokenizer: {vocabulary}"}
        if isinstance(vocabulary, TokenizerError)
        else {}
    )


def end_of_text(weights: Weights) -> int | None:
    """Its id, as far as it is known."""
    vocabulary = _of_run(weights)
    if isinstance(vocabulary, BPEVocabulary):
        return vocabulary.eod_id
    named = 50256 if weights.model.vocab_size == 50257 else None
    with suppress(ConfigError):  # not from transformers
        named = read_json_mapping(_folder_of(weights) / "config.json", finite=False).get(
            "eos_token_id", named
        )
    return named if type(named) is int and 0 <= named < weights.model.vocab_size else None


def _folder_of(weights: Weights) -> Path:
    return weights.path if weights.path.is_dir() else weights.path.parent


def _beside(weights: Weights) -> dict[str, Path]:
    """Return the files beside the weights, by the names that they get."""
    source = _folder_of(weights)
    return {
        name: source / theirs
        for theirs, name in TOKENIZER_FILES.items()
        if (source / theirs).is_file()
    }


def _of_run(weights: Weights) -> BPEVocabulary | TokenizerError | None:
    """The tokenizer of the run, or why its files do not serve; None where there was none, or files
    lie beside the weights.
    """
    if weights.tokenizer is None or _beside(weights):
        return None
    try:
        return read_tokenizer(weights.tokenizer)
    except TokenizerError as error:
        return error


def read_tokenizer(record: Mapping[str, Any]) -> BPEVocabulary:
    """record: what a manifest says, with the keys of data.tokenizer; relative paths are taken from
    here. Raises TokenizerError unless the files are there and their content is what the run was
    trained with.
    """
    kind = record.get("kind", record.get("type"))
    if kind != GPT2BPETokenizer.kind:
        raise TokenizerError(
            f"the run's tokenizer is {kind}; expected {GPT2BPETokenizer.kind}; copy its files there"
            " yourself"
        )
    source, merge_file = record.get("vocab_file") or record.get("folder"), record.get("merge_file")
    if not source:
        raise TokenizerError(
            "data.tokenizer of the run's config names none; copy vocab.json and merges.txt there"
            " yourself"
        )
    files = (
        (Path(str(source)), Path(str(merge_file))) if merge_file else files_in(Path(str(source)))
    )
    vocabulary = read_vocabulary(*files)
    if vocabulary.sha256 != record.get("sha256"):
        raise TokenizerError(
            f"{files[0]}: its content (sha256 {vocabulary.sha256[:12]}) is not what the run"
            f" recorded ({str(record.get('sha256', 'nothing'))[:12]}); copy the vocab.json and"
            " merges.txt that it was trained with there yourself"
        )
    return vocabulary


def write_tokenizer(folder: Path, vocabulary: BPEVocabulary, positions: int) -> None:
    """vocab.json, merges.txt with the header that some readers skip unseen, and
    tokenizer_config.json. Raises StorageError.
    """
    config = {
        "tokenizer_class": "GPT2Tokenizer", "model_max_length": positions,
        "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT,
    }  # fmt: skip
    merges = "".join(f"{left} {right}\n" for left, right in vocabulary.merges)
    for name, text in {
        "vocab.json": json.dumps(vocabulary.ids, ensure_ascii=False),
        "merges.txt": f"#version: 0.2\n{merges}",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }.items():
        with atomic_write(folder / name, "w") as file:
            file.write(text)
