"""Formats are told apart by content; every kind of corpus gives the same documents."""

from __future__ import annotations

import gzip
import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from common.dataset.blocks import DocumentRule, read_blocks
from common.dataset.corpus import CorpusFormat, open_corpus
from common.dataset.documents import documents_of
from common.errors import DataError

TEXT, JSONL, ARRAY = CorpusFormat.TEXT, CorpusFormat.JSONL, CorpusFormat.ARRAY


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "Hello\n", TEXT),
        ("a.txt", "[Chapter 1]\n\nIt was\n", TEXT),
        ("a.txt", '["Well," he said', TEXT),
        ("a.txt", "{braces} in a text\n", TEXT),
        ("a.txt", '["one", "two"]', ARRAY),
        ("a.txt", '{"text": "one"}\n{"text": "two"}\n', JSONL),
        ("a.json", '\ufeff \n[{"text": "one"}]', ARRAY),
        ("a.json", '{"text": "one"}\n{"text": "two"}\n', JSONL),
        ("a.json", '{"text": "one"}', JSONL),
        ("a.json", '["broken', ARRAY),
        ("a.jsonl", '{"text": "broken\n', JSONL),
        ("a.json", '"one"\n\n"two"\n', JSONL),
        ("a.jsonl", '"one \\u4f60"', JSONL),
        ("a.txt", '"one"\n"two"\n', JSONL),
        ("a.txt", '"One," he said.\n"Two."\n', TEXT),
        ("a.txt", '"A quotation."\n', TEXT),
        ("a.txt", '[{"a": ' + "[" * 200_000, TEXT),
        ("a.txt", '{"a": ' + "9" * 5000 + "}\n", TEXT),
        ("a.jsonl", '{"a": ' + "[" * 200_000 + "\n", JSONL),
        ("a.bin", '["' + "x" * (2 << 20) + '"]', ARRAY),
        ("a.jsonl", '{"text": "' + "x" * (2 << 20) + '"}', JSONL),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_the_format_is_judged_by_content(tmp_path, caplog, name, content, expected, zipped) -> None:
    path = tmp_path / (name + (".gz" if zipped else ""))
    path.write_bytes(gzip.compress(content.encode(), 1) if zipped else content.encode())
    with caplog.at_level(logging.INFO, "common.dataset.corpus"):
        corpus = open_corpus(path)
    assert (corpus.format, corpus.gzipped) == (expected, zipped)
    lies = expected is not TEXT and name in ("a.txt", "a.bin")
    assert [record.levelno for record in caplog.records] == [
        logging.WARNING if lies else logging.INFO
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        ("text".encode("utf-16"), "is UTF-16"),
        (b'{\n "a": "one",\n "b": "two"\n}\n', "one JSON object over several lines"),
        (b"\x1f\x8bxx", "gzip stream is broken"),
        (gzip.compress(b"x" * 100, mtime=0)[:-9], "gzip stream is broken"),
    ],
)
def test_input_that_cannot_be_a_corpus_is_refused(tmp_path, content, message) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_corpus(path)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not found"):
        open_corpus(tmp_path / "absent.txt")
    with pytest.raises(DataError, match="is a folder"):
        open_corpus(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(
            DataError, match=r"is a device, a pipe or a socket.*write its content to a file first"
        ):
            open_corpus(special)


def documents(
    path: Path, rule: DocumentRule = DocumentRule.BLANK_LINE, block_bytes: int = 1 << 20
) -> list[str]:
    found = []
    for block in read_blocks(open_corpus(path), rule, ("text",), block_bytes):
        found += documents_of(block, ("text",))[0].texts
    return found


PARAGRAPH = st.text(st.sampled_from("ab é中\U0001f600.,"), min_size=1, max_size=12).filter(
    lambda text: not text.isspace()
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.lists(PARAGRAPH, min_size=1, max_size=12),
    block_bytes=st.integers(1, 60),
    windows=st.booleans(),
)
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
        DocumentRule.BLANK_LINE: ["\n\n", "\n\n\n\n", "\n \t\n", "\n\n \n\n"],
        DocumentRule.LINE: ["\n", "\n\n"],
        DocumentRule.EOT: ["<|endoftext|>", "\n<|endoftext|>\n", "<|endoftext|><|endoftext|>"],
    }
    for rule, separators in plain.items():
        for separator in separators:
            content = separator.join(texts) + separator
            (tmp_path / "e.txt").write_bytes(
                (content.replace("\n", "\r\n") if windows else content).encode()
            )
            assert documents(tmp_path / "e.txt", rule, block_bytes) == texts


def test_file_mode_keeps_the_text_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\na\n\nb \n")
    assert documents(tmp_path / "a.txt", DocumentRule.FILE, 2) == ["\na\n\nb \n"]
