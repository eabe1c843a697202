"""A tokenizer as the files from which transformers' AutoTokenizer builds the same ids."""

from __future__ import annotations

import json
from typing import Any

from common.errors import TokenizerError
from common.structured_files import MAX_JSON_BYTES, read_bytes, read_json_mapping
from common.systems.hugging_face.sentencepiece_json import tokenizer_json
from common.tokenizer.bpe_files import END_OF_TEXT, BPEVocabulary
from common.tokenizer.folder import CONFIG
from common.tokenizer.recognise import WORDS
from common.tokenizer.text_tokenizer import TextTokenizer as FileTokenizer

_MODEL = "tokenizer.model"
_JSON = "tokenizer.json"


def files_of(tokenizer: BPEVocabulary | FileTokenizer, positions: int) -> dict[str, bytes]:
    """Return the content of each file by name. positions: of the model, for model_max_length."""
    if isinstance(tokenizer, BPEVocabulary):
        files = _of_bpe(tokenizer)
    else:
        content = read_bytes(tokenizer.file, limit=MAX_JSON_BYTES, error=TokenizerError)
        files = _WRITERS[tokenizer.kind](tokenizer, content)
    if isinstance(config := files.get(CONFIG), dict):
        config = {**config, "model_max_length": positions, "clean_up_tokenization_spaces": False}
        files[CONFIG] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def _of_bpe(vocabulary: BPEVocabulary) -> dict[str, Any]:
    merges = "".join(f"{left} {right}\n" for left, right in vocabulary.merges)
    return {
        "vocab.json": json.dumps(vocabulary.ids, ensure_ascii=False).encode(),
        "merges.txt": f"#version: 0.2\n{merges}".encode(),  # some readers skip line 1
        CONFIG: {
            "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False,
            "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT,
        },
    }  # fmt: skip


def _of_bert(tokenizer: FileTokenizer, content: bytes) -> dict[str, Any]:
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": tokenizer.kind != "BertWordPieceCase",
    }
    # transformers does not segment text: it expects spaces between words
    words = {"tokenize_chinese_chars": False, **WORDS} if tokenizer.kind == "BertWordLevel" else {}
    # not splitlines: U+2028 and other line separators are tokens of published vocabularies
    text = content.decode("utf-8-sig").replace("\r\n", "\n")
    return {"vocab.txt": text.encode(), CONFIG: config | words}


def _of_sentencepiece(tokenizer: FileTokenizer, content: bytes) -> dict[str, Any]:
    return {
        _MODEL: content,
        _JSON: tokenizer_json(content).encode(),
        CONFIG: _fast(tokenizer),
    }


def _of_json(tokenizer: FileTokenizer, content: bytes) -> dict[str, Any]:
    beside = tokenizer.file.parent / CONFIG
    config = (
        read_json_mapping(beside, error=TokenizerError, finite=False)
        if beside.is_file()
        else _fast(tokenizer)
    )
    return {_JSON: content, CONFIG: config}


def _fast(tokenizer: FileTokenizer) -> dict[str, Any]:
    marks = {
        "bos_token": tokenizer.bos_id, "eos_token": tokenizer.eod_id,
        "unk_token": tokenizer.unknown_id,
    }  # fmt: skip
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | {
        name: tokenizer.piece(number) for name, number in marks.items() if number is not None
    }


_WRITERS = {
    **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase", "BertWordLevel"), _of_bert),
    "SentencePieceTokenizer": _of_sentencepiece,
    "HuggingFaceTokenizer": _of_json,
}
