"""Tokenizer that is written with weights, as files of transformers' AutoTokenizer. They come from
beside the weights, or from the run's tokenizer where its files still exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import TokenizerError
from common.files import atomic_write
from common.structured_files import MAX_JSON_BYTES, parse_json, read_bytes
from common.systems.weights import Weights
from common.tensor_files.arrays import Bytes
from common.tensor_files.protobuf import read_message
from common.tokenizer import WORDS, Tokenizer, load_tokenizer
from common.tokenizer.folder import CONFIG, companions_in, ids_in, vocabulary_in
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer

_SPACE = "\u2581"
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Types of pieces that are not ordinary text."""
_UNIGRAM, _BPE = 1, 2


def tokenizer_json(model: bytes) -> str:
    """Return a tokenizer.json with the ids of a SentencePiece model. Raises TokenizerError for a
    model that ``tokenizers`` cannot express.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    pieces, trainer, normalizer = _read(model)
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE) or trainer.get(24, 0):
        raise TokenizerError(
            "the SentencePiece model is one of words, of characters, or of spaces at the end of"
            " words, which tokenizer.json cannot express; only the .model file goes along"
        )
    ids = {text: number for number, (text, _, _) in enumerate(pieces)}
    unknown = next((number for number, piece in enumerate(pieces) if piece[2] == _UNKNOWN), 0)
    fallback = any(piece[2] == _BYTE for piece in pieces)
    scores = [(text, score) for text, score, _ in pieces]
    if kind == _UNIGRAM:
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=unknown, byte_fallback=fallback))
    else:
        tokenizer = Tokenizer(
            models.BPE(ids, _merges(pieces, ids), unk_token=pieces[unknown][0], fuse_unk=True, byte_fallback=fallback)
        )
    steps: list[Any] = []
    charsmap = normalizer.get(2)
    if charsmap is not None and charsmap.size:
        steps.append(normalizers.Precompiled(charsmap.tobytes()))
    if normalizer.get(4, 1):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    has_prefix = bool(normalizer.get(3, 1))
    # not Metaspace, which adds no space before a text that begins with one
    steps += [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if has_prefix else []),
        ]
    )
    for add, kinds in (
        (tokenizer.add_special_tokens, (_UNKNOWN, _CONTROL)),
        (tokenizer.add_tokens, (_USER_DEFINED,)),
    ):
        add([AddedToken(text, normalized=False) for text, _, kind in pieces if kind in kinds])
    text: str = tokenizer.to_str()
    return text


def _read(model: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """Return the pieces (text, score, type), and the fields of trainer_spec and of normalizer_spec."""
    parts = read_message(np.frombuffer(model, np.uint8))

    def last(message: Bytes) -> dict[int, Any]:
        return {number: values[-1] for number, values in read_message(message).items()}

    pieces = []
    for fields in map(last, parts.get(_PIECE, ())):
        score = float(np.frombuffer(fields[2].tobytes(), "<f4")[0]) if 2 in fields else 0.0
        pieces.append((fields[1].tobytes().decode(), score, fields.get(3, 1)))
    trainer, normalizer = (last(parts[number][-1]) if number in parts else {} for number in (_TRAINER, _NORMALIZER))
    return pieces, trainer, normalizer


def _merges(pieces: list[tuple[str, float, int]], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, highest score first."""
    found = [
        (-score, ids[text[:at]], ids[text[at:]], text[:at], text[at:])
        for text, score, kind in pieces
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
        for at in range(1, len(text))
        if text[:at] in ids and text[at:] in ids
    ]
    return [(left, right) for _, _, _, left, right in sorted(found)]


_MODEL = "tokenizer.model"
_JSON = "tokenizer.json"


def files_of(tokenizer: Tokenizer, positions: int) -> dict[str, bytes]:
    """Return the content of each file by name. positions: of the model, for model_max_length.

    What transformers keeps beside the vocabulary goes along.
    """
    beside = companions_in(tokenizer.file.parent)
    if isinstance(tokenizer, GPT2BPETokenizer):
        files = _of_bpe(tokenizer)
    else:
        content = read_bytes(tokenizer.file, limit=MAX_JSON_BYTES, error=TokenizerError)
        files = _WRITERS[tokenizer.kind](tokenizer, content)
    config, settings = files[CONFIG], parse_json(beside.get(CONFIG, b"{}"))
    is_theirs = tokenizer.kind in (GPT2BPETokenizer.kind, "HuggingFaceTokenizer")
    config = settings or config if is_theirs else {**settings, **config}
    config |= {"model_max_length": positions, "clean_up_tokenization_spaces": False}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return {**files, **beside, CONFIG: text.encode()}


def _of_bpe(tokenizer: GPT2BPETokenizer) -> dict[str, Any]:
    vocabulary, file = tokenizer.vocabulary, tokenizer.file
    named = vocabulary.marks.named
    merges = "".join(f"{left} {right}\n" for left, right in vocabulary.merges)
    files: dict[str, Any] = {
        "vocab.json": json.dumps(vocabulary.ids, ensure_ascii=False).encode(),
        "merges.txt": f"#version: 0.2\n{merges}".encode(),  # some readers skip line 1
        CONFIG: {
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": vocabulary.prefix_space,
            **{"unk_token": named.get("eos_token"), **named},
        },
    }
    beside = file if tokenizer.merge_file is None else file.parent / _JSON
    if beside.is_file():
        files[_JSON] = read_bytes(beside, limit=MAX_JSON_BYTES, error=TokenizerError)
    return files


def _of_bert(tokenizer: Tokenizer, content: bytes) -> dict[str, Any]:
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": tokenizer.kind != "BertWordPieceCase"}
    # transformers does not segment text: it expects spaces between words
    words = {"tokenize_chinese_chars": False, **WORDS} if tokenizer.kind == "BertWordLevel" else {}
    # not splitlines: U+2028 and other line separators are tokens of published vocabularies
    text = content.decode("utf-8-sig").replace("\r\n", "\n")
    return {"vocab.txt": text.encode(), CONFIG: config | words}


def _fast(tokenizer: Any) -> dict[str, Any]:
    marks = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eod_id}
    marks |= {"unk_token": tokenizer.unknown_id, "pad_token": tokenizer.pad_id}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | {
        name: tokenizer.piece(number) for name, number in marks.items() if number is not None
    }


_WRITERS: dict[str, Callable[[Tokenizer, bytes], dict[str, Any]]] = {
    **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase", "BertWordLevel"), _of_bert),
    "SentencePieceTokenizer": lambda tokenizer, content: {
        _MODEL: content,
        _JSON: tokenizer_json(content).encode(),
        CONFIG: _fast(tokenizer),
    },
    "HuggingFaceTokenizer": lambda tokenizer, content: {_JSON: content, CONFIG: _fast(tokenizer)},
}


def put_tokenizer(folder: Path, weights: Weights) -> TokenizerError | None:
    """Write the tokenizer's files into ``folder``, where there are any. Return why that of the run
    cannot be written. Raises StorageError, and TokenizerError for files that cannot be read.
    """
    why: TokenizerError | None = None
    files = vocabulary_in(weights.folder) | companions_in(weights.folder)
    try:
        tokenizer = _of_run(weights)
    except TokenizerError as error:
        tokenizer, why = None, error
    if tokenizer is not None:
        files |= files_of(tokenizer, weights.model.max_positions or weights.model.seq_length)
    for name, content in files.items():
        with atomic_write(folder / name) as copy:
            copy.write(content)
    return why


def tokenizer_of(weights: Weights) -> Tokenizer | None:
    """Return the tokenizer beside the weights, or that of the run. None: there is none. Raises TokenizerError."""
    if vocabulary_in(weights.folder):
        return load_tokenizer(None, weights.folder)
    with suppress(TokenizerError):
        return _of_run(weights)
    return None


def special_ids(weights: Weights) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id (a list of several ends) and pad_token_id as transformers'
    files have them. None stands for none; the padding is left out then.
    """
    rows = weights.model.vocab_size
    found = ids_in(weights.folder)
    with suppress(TokenizerError):
        if not found and (tokenizer := tokenizer_of(weights)) is not None:
            found = {"bos_token_id": tokenizer.bos_id, "eos_token_id": [*tokenizer.ends]}
            found["pad_token_id"] = tokenizer.pad_id
    end = 50256 if rows == 50257 else None
    found = {"bos_token_id": end, "eos_token_id": end} | found
    for name, value in found.items():
        values = value if isinstance(value, list) else [value]
        ids = [each for each in values if type(each) is int and 0 <= each < rows]
        found[name] = ids if len(ids) > 1 else next(iter(ids), None)
    return {name: each for name, each in found.items() if name != "pad_token_id" or each is not None}


def _of_run(weights: Weights) -> Tokenizer | None:
    """Return the run's tokenizer. None: it had none, or there are files beside the weights. Raises TokenizerError."""
    if weights.tokenizer is None or vocabulary_in(weights.folder):
        return None
    return read_tokenizer(weights.tokenizer)


def read_tokenizer(record: Mapping[str, Any]) -> Tokenizer:
    """record: what a manifest says, with the keys of data.tokenizer; relative paths are taken from here. Raises
    TokenizerError unless the files are there and their content is what the run was trained with.
    """
    kind = record.get("kind") or record.get("type")
    source, merge_file = record.get("vocab_file") or record.get("folder"), record.get("merge_file")
    if not source:
        raise TokenizerError(
            "data.tokenizer of the run's config names none; copy vocab.json and merges.txt, or what"
            " else it was, there yourself"
        )
    path = Path(str(source))
    tokenizer = load_tokenizer(kind, path, merge_file)
    if tokenizer.sha256 != record.get("sha256"):
        raise TokenizerError(
            f"{path}: its content (sha256 {tokenizer.sha256[:12]}) is not what the run"
            f" recorded ({str(record.get('sha256', 'nothing'))[:12]}); copy what it was trained with there yourself"
        )
    return tokenizer
