"""Formats are told by content; all give the same documents; what is no corpus is refused with its place."""

from __future__ import annotations

import gzip
import io
import json
import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from common.dataset import blocks
from common.dataset.blocks import DocumentRule, array_items, read_blocks
from common.dataset.corpus import open_corpus
from common.dataset.documents import documents_of
from common.dataset.preprocess import preprocess
from common.errors import DataError

TEXT, JSONL, ARRAY = "text", "jsonl", "array"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "[Chapter 1]\n\nIt was\n", TEXT),
        ("a.txt", '["Well," he said', TEXT),
        ("a.txt", "{braces} in a text\n", TEXT),
        ("a.txt", '["one", "two"]', ARRAY),
        ("a.txt", '{"text": "one"}\n{"text": "two"}\n', JSONL),
        ("a.json", '\ufeff \n[{"text": "one"}]', ARRAY),
        ("a.json", '{"text": "one"}', JSONL),
        ("a.json", '["broken', ARRAY),
        ("a.jsonl", '{"text": "broken\n', JSONL),
        ("a.txt", '"one"\n"two"\n', JSONL),
        ("a.txt", '"One," he said.\n"Two."\n', TEXT),
        ("a.txt", '"A quotation."\n', TEXT),
        ("a.txt", '[{"a": ' + "[" * 200_000, TEXT),
        ("a.txt", '{"a": ' + "9" * 5000 + "}\n", TEXT),
        ("a.bin", '["' + "x" * (2 << 20) + '"]', ARRAY),
        ("a.jsonl", '{"text": "' + "x" * (2 << 20) + '"}', JSONL),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_the_format_is_judged_by_content(tmp_path, caplog, name, content, expected, zipped) -> None:
    path = tmp_path / (name + (".gz" if zipped else ""))
    path.write_bytes(gzip.compress(content.encode(), 1) if zipped else content.encode())
    with caplog.at_level(logging.INFO, "common.dataset.corpus"):
        assert open_corpus(path).format == expected
    lies = expected is not TEXT and name in ("a.txt", "a.bin")
    assert [record.levelno for record in caplog.records] == [logging.WARNING if lies else logging.INFO]


def documents(path: Path, rule: DocumentRule = "blank_line", block_bytes: int = 1 << 20) -> list[str]:
    found = []
    for block in read_blocks(open_corpus(path), rule, ("text",), block_bytes):
        found += documents_of(block, ("text",))[0].texts
    return found


PARAGRAPH = st.text(st.sampled_from("ab é中\U0001f600.,"), min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(PARAGRAPH, min_size=1, max_size=12), block_bytes=st.integers(1, 60), windows=st.booleans())
def test_every_format_gives_the_same_documents(tmp_path, texts, block_bytes, windows) -> None:
    files = {
        "a.json": json.dumps(texts, ensure_ascii=False),
        "b.json": json.dumps([{"text": text} for text in texts]),
        "c.jsonl": "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts),
        "d.jsonl": "\n\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode())
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode(), 1))
        assert documents(tmp_path / name, block_bytes=block_bytes) == texts
        assert documents(tmp_path / f"{name}.gz", block_bytes=block_bytes) == texts
    plain = {
        "blank_line": ["\n\n", "\n\n\n\n", "\n \t\n", "\n\n \n\n"],
        "line": ["\n", "\n\n"],
        "eot": ["<|endoftext|>", "\n<|endoftext|>\n", "<|endoftext|><|endoftext|>"],
    }
    path = tmp_path / "e.txt"
    for rule, separators in plain.items():
        for separator in separators:
            content = separator.join(texts) + separator
            path.write_bytes((content.replace("\n", "\r\n") if windows else content).encode())
            assert documents(path, rule, block_bytes) == texts
    path.write_text(whole := "\n" + "\n\n".join(texts) + " \n", newline="")
    assert documents(path, "file", 2) == [whole]


VALUES = st.sampled_from(["12e3", "-1.5", "true", "null", "-Infinity", '{"a": [1e5, "x"]}', "[]"])
PARTS = [r"\ud83d\ude00", r"\ud83d", r"\uDC00", r"\\", r"\u0041", r"\n", "a", "漢", " , ] ", "[{"]
STRINGS = st.lists(st.sampled_from(PARTS)).map(lambda parts: f'"{"".join(parts)}"')


@settings(max_examples=150, deadline=None)
@given(items=st.lists(VALUES | STRINGS), size=st.integers(1, 40), comma=st.sampled_from([",", " ,", ",\n  "]))
def test_items_of_an_array_are_those_of_json(items, size, comma) -> None:
    """Whatever is read at once: values and escapes may be cut anywhere."""
    text = f"[{comma.join(items)}]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_READ_BYTES", size)
        file = io.BytesIO(b"\xef\xbb\xbf" * (size > 3) + text.encode())
        assert list(array_items(file, Path("a.json"))) == list(enumerate(json.loads(text), 1))


DEEP, LONG = "[" * 200_000, "9" * 5000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", " \n\n", "is empty"),
        ("a.json", '{\n "a": "one",\n "b": "two"\n}\n', "one JSON object over several lines"),
        ("a.json", gzip.compress(b"x" * 100, mtime=0)[:-9], "gzip stream is broken"),
        ("a.json", '["a"\n "b"]', "after 1 items: expected ',' or ']'"),
        ("a.json", '["a",\n]', "after 1 items: Expecting value"),
        ("a.json", '["a", "b\nc"]', "after 1 items: Invalid control character;"),
        ("a.json", '["a", "bcd', "after 1 items: Unterminated string; .* if it was cut short"),
        ("a.json", '["a"]\n["b"]', "after 1 items: the array has ended, and more text follows"),
        ("a.json", f'["a", {LONG}]', "after 1 items: a number of more digits than Python"),
        ("a.json", b'["ab",\n "\xe7\x94\xb2\xff"]', "byte 12 is not UTF-8 .*; convert it, for"),
        ("a.json", '[{"text": "a"},\n  {"body": "b"}]', "item 2: the key 'text' is missing.*'body"),
        ("a.json", '["", ""]', "all 2 documents under 'text' are empty"),
        ("a.jsonl", '{"text": "a"}\n\n{"b": 1, "n": 1}\n', "line 3, column 1: the key 'text' is"),
        ("a.jsonl", '{"text": "a"}\n{"text": 3}\n', "line 2, column 1: .*of 'text' is a number"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', "line 2, column 13: Expecting ',' delimiter"),
        ("a.jsonl", '{"text": "a"}\n{"n": ' + DEEP, "line 2, column 1: nested too deep"),
        ("a.jsonl", '{"text": "a"}\n\ufeff{"text": "b"}\n', "line 2, column 1: a byte order mark"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "line 2, column 11: byte 24 is not UTF-8"),
        ("a.txt", b"ab\n\nc\xe4d", "line 3, column 2: byte 5 is not UTF-8"),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path, monkeypatch, options_for, name, content, message) -> None:
    """Nothing is left of its output."""
    monkeypatch.setattr(blocks, "_READ_BYTES", 16)
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for block_bytes in (1, 1 << 20):
        options = options_for(path, output_prefix=tmp_path / "out" / "x", block_bytes=block_bytes)
        with pytest.raises(DataError, match=message):
            preprocess(options)
    assert not list((tmp_path / "out").glob("*"))
