"""Tokenizer that is written with weights, as files of transformers' AutoTokenizer. They come from
beside the weights, or from the run's tokenizer where its files still exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import ConfigError, TokenizerError
from common.files import atomic_write
from common.structured_files import MAX_JSON_BYTES, read_bytes, read_json_mapping
from common.systems.hugging_face.tokenizer_files import FileTokenizer, files_of
from common.systems.weights import Weights
from common.tokenizer import TOKENIZERS, load_tokenizer
from common.tokenizer.bpe_files import BPEVocabulary, read_vocabulary
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer, files_in
from common.tokenizer.recognise import kind_of_files

TOKENIZER_FILES = {
    "encoder.json": "vocab.json", "vocab.bpe": "merges.txt",  # OpenAI's names
    **{
        name: name
        for name in (
            "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
            "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
            "added_tokens.json",
        )
    },
}  # fmt: skip
"""Files that are copied from beside the weights -> their names in the target."""


def put_tokenizer(folder: Path, weights: Weights) -> None:
    """Write the tokenizer's files into ``folder``, where there are any. Raises StorageError, and
    TokenizerError for files that cannot be read.
    """
    for name, file in _beside(weights).items():
        content = read_bytes(file, limit=MAX_JSON_BYTES, error=TokenizerError)
        with atomic_write(folder / name) as copy:
            copy.write(content)
    tokenizer = _of_run(weights)
    if tokenizer is not None and not isinstance(tokenizer, TokenizerError):
        positions = weights.model.max_positions or weights.model.seq_length
        for name, content in files_of(tokenizer, positions).items():
            with atomic_write(folder / name) as copy:
                copy.write(content)


def without_tokenizer(weights: Weights) -> dict[str, str]:
    """Return why the run's tokenizer cannot be written, None where it can."""
    tokenizer = _of_run(weights)
    return (
        {"tokenizer": f"files of the tokenizer: {tokenizer}"}
        if isinstance(tokenizer, TokenizerError)
        else {}
    )


def end_of_text(weights: Weights) -> int | None:
    """Return the id of the end of text, None where it is unknown."""
    tokenizer = _of_run(weights)
    if tokenizer is not None and not isinstance(tokenizer, TokenizerError):
        return tokenizer.eod_id
    named = 50256 if weights.model.vocab_size == 50257 else None
    with suppress(ConfigError):  # not from transformers
        named = read_json_mapping(_folder_of(weights) / "config.json", finite=False).get(
            "eos_token_id", named
        )
    return named if type(named) is int and 0 <= named < weights.model.vocab_size else None


def _folder_of(weights: Weights) -> Path:
    return weights.path if weights.path.is_dir() else weights.path.parent


def _beside(weights: Weights) -> dict[str, Path]:
    """Return the files beside the weights, by their names in the target."""
    source = _folder_of(weights)
    return {
        name: source / theirs
        for theirs, name in TOKENIZER_FILES.items()
        if (source / theirs).is_file()
    }


def _of_run(weights: Weights) -> BPEVocabulary | FileTokenizer | TokenizerError | None:
    """Return the run's tokenizer, or the reason why its files cannot be used. None: the run had
    none, or there are files beside the weights.
    """
    if weights.tokenizer is None or _beside(weights):
        return None
    try:
        return read_tokenizer(weights.tokenizer)
    except TokenizerError as error:
        return error


def read_tokenizer(record: Mapping[str, Any]) -> BPEVocabulary | FileTokenizer:
    """record: what a manifest says, with the keys of data.tokenizer; relative paths are taken from
    here. Raises TokenizerError unless the files are there and their content is what the run was
    trained with.
    """
    kind = record.get("kind") or record.get("type")
    source, merge_file = record.get("vocab_file") or record.get("folder"), record.get("merge_file")
    if not source:
        raise TokenizerError(
            "data.tokenizer of the run's config names none; copy vocab.json and merges.txt, or what"
            " else it was, there yourself"
        )
    path = Path(str(source))
    kind = kind_of_files(kind, path, merge_file)
    if kind not in TOKENIZERS:
        raise TokenizerError(
            f"the run's tokenizer is {kind}; expected {' or '.join(TOKENIZERS)}; copy its files"
            " with there yourself"
        )
    tokenizer: BPEVocabulary | FileTokenizer
    if kind == GPT2BPETokenizer.kind:
        files = (path, Path(str(merge_file))) if merge_file else files_in(path)
        path, tokenizer = files[0], read_vocabulary(*files)
    else:
        found = load_tokenizer(kind, path)
        if not isinstance(found, FileTokenizer):
            raise TokenizerError(
                f"the run's tokenizer is {kind}, and {path} is {found.kind}; copy its files there"
                " yourself"
            )
        path, tokenizer = found.file, found
    if tokenizer.sha256 != record.get("sha256"):
        raise TokenizerError(
            f"{path}: its content (sha256 {tokenizer.sha256[:12]}) is not what the run"
            f" recorded ({str(record.get('sha256', 'nothing'))[:12]}); copy what it was trained"
            " with there yourself"
        )
    return tokenizer
