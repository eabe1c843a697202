"""Tokenizer that is written with weights, as files of transformers' AutoTokenizer. They come from
beside the weights, or from the run's tokenizer where its files still exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import TokenizerError
from common.files import atomic_write
from common.systems.hugging_face.tokenizer_files import files_of
from common.systems.weights import Weights
from common.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer
from common.tokenizer.copies import companions_in, ids_in, vocabulary_in
from common.tokenizer.recognise import kind_of_files


def put_tokenizer(folder: Path, weights: Weights) -> None:
    """Write the tokenizer's files into ``folder``, where there are any. Raises StorageError, and
    TokenizerError for files that cannot be read.
    """
    source = _folder_of(weights)
    files = vocabulary_in(source) | companions_in(source)
    tokenizer = _of_run(weights)
    if tokenizer is not None and not isinstance(tokenizer, TokenizerError):
        files |= files_of(tokenizer, weights.model.max_positions or weights.model.seq_length)
    for name, content in files.items():
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


def tokenizer_of(weights: Weights) -> Tokenizer | None:
    """Return the tokenizer beside the weights, or that of the run. None: there is none. Raises
    TokenizerError.
    """
    if vocabulary_in(folder := _folder_of(weights)):
        return load_tokenizer(None, folder)
    tokenizer = _of_run(weights)
    return None if isinstance(tokenizer, TokenizerError) else tokenizer


def special_ids(weights: Weights) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id (a list of several ends) and pad_token_id as transformers'
    files have them. None stands for none; the padding is left out then.
    """
    rows = weights.model.vocab_size
    found = ids_in(_folder_of(weights))
    with suppress(TokenizerError):
        if not found and (tokenizer := tokenizer_of(weights)) is not None:
            found = {"bos_token_id": tokenizer.bos_id, "eos_token_id": [*tokenizer.ends]}
            found["pad_token_id"] = tokenizer.pad_id
    end = 50256 if rows == 50257 else None
    found = {"bos_token_id": end, "eos_token_id": end} | found
    ids = {name: _ids_below(rows, value) for name, value in found.items()}
    return {name: each for name, each in ids.items() if name != "pad_token_id" or each is not None}


def _ids_below(rows: int, value: object) -> int | list[int] | None:
    values = value if isinstance(value, list) else [value]
    ids = [each for each in values if type(each) is int and 0 <= each < rows]
    return ids if len(ids) > 1 else next(iter(ids), None)


def _folder_of(weights: Weights) -> Path:
    return weights.path if weights.path.is_dir() else weights.path.parent


def _of_run(weights: Weights) -> Tokenizer | TokenizerError | None:
    """Return the run's tokenizer, or the reason why its files cannot be used. None: the run had
    none, or there are files beside the weights.
    """
    if weights.tokenizer is None or vocabulary_in(_folder_of(weights)):
        return None
    try:
        return read_tokenizer(weights.tokenizer)
    except TokenizerError as error:
        return error


def read_tokenizer(record: Mapping[str, Any]) -> Tokenizer:
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
    tokenizer = load_tokenizer(kind, path, merge_file)
    if tokenizer.kind != kind:
        raise TokenizerError(
            f"the run's tokenizer is {kind}, and {path} is {tokenizer.kind}; copy its files there"
            " yourself"
        )
    if tokenizer.sha256 != record.get("sha256"):
        raise TokenizerError(
            f"{path}: its content (sha256 {tokenizer.sha256[:12]}) is not what the run"
            f" recorded ({str(record.get('sha256', 'nothing'))[:12]}); copy what it was trained"
            " with there yourself"
        )
    return tokenizer
