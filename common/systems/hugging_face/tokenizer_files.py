"""A tokenizer as the files from which transformers' AutoTokenizer builds the same ids."""

from __future__ import annotations

import json
from typing import Any

from common.errors import TokenizerError
from common.structured_files import MAX_JSON_BYTES, parse_json, read_bytes
from common.systems.hugging_face.sentencepiece_json import tokenizer_json
from common.tokenizer import Tokenizer
from common.tokenizer.copies import companions_in
from common.tokenizer.folder import CONFIG
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer
from common.tokenizer.recognise import WORDS
from common.tokenizer.text_tokenizer import TextTokenizer

_MODEL = "tokenizer.model"
_JSON = "tokenizer.json"


def files_of(tokenizer: Tokenizer, positions: int) -> dict[str, bytes]:
    """Return the content of each file by name. positions: of the model, for model_max_length.

    What transformers keeps beside the vocabulary goes along.
    """
    if isinstance(tokenizer, GPT2BPETokenizer):
        beside = companions_in(tokenizer.vocab_file.parent)
        files = _of_bpe(tokenizer)
    else:
        assert isinstance(tokenizer, TextTokenizer)
        beside = companions_in(tokenizer.file.parent)
        content = read_bytes(tokenizer.file, limit=MAX_JSON_BYTES, error=TokenizerError)
        files = _WRITERS[tokenizer.kind](tokenizer, content)
    config, settings = files[CONFIG], parse_json(beside.get(CONFIG, b"{}"))
    is_theirs = tokenizer.kind in (GPT2BPETokenizer.kind, "HuggingFaceTokenizer")
    config = settings or config if is_theirs else {**settings, **config}
    config |= {"model_max_length": positions, "clean_up_tokenization_spaces": False}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return {**files, **beside, CONFIG: text.encode()}


def _of_bpe(tokenizer: GPT2BPETokenizer) -> dict[str, Any]:
    vocabulary, file = tokenizer.vocabulary, tokenizer.vocab_file
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


def _of_bert(tokenizer: TextTokenizer, content: bytes) -> dict[str, Any]:
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": tokenizer.kind != "BertWordPieceCase",
    }
    # transformers does not segment text: it expects spaces between words
    words = {"tokenize_chinese_chars": False, **WORDS} if tokenizer.kind == "BertWordLevel" else {}
    # not splitlines: U+2028 and other line separators are tokens of published vocabularies
    text = content.decode("utf-8-sig").replace("\r\n", "\n")
    return {"vocab.txt": text.encode(), CONFIG: config | words}


def _of_sentencepiece(tokenizer: TextTokenizer, content: bytes) -> dict[str, Any]:
    return {
        _MODEL: content,
        _JSON: tokenizer_json(content).encode(),
        CONFIG: _fast(tokenizer),
    }


def _of_json(tokenizer: TextTokenizer, content: bytes) -> dict[str, Any]:
    return {_JSON: content, CONFIG: _fast(tokenizer)}


def _fast(tokenizer: TextTokenizer) -> dict[str, Any]:
    marks = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eod_id}
    marks |= {"unk_token": tokenizer.unknown_id, "pad_token": tokenizer.pad_id}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | {
        name: tokenizer.piece(number) for name, number in marks.items() if number is not None
    }


_WRITERS = {
    **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase", "BertWordLevel"), _of_bert),
    "SentencePieceTokenizer": _of_sentencepiece,
    "HuggingFaceTokenizer": _of_json,
}
