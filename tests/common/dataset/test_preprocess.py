"""Corpora to pairs: framing, keys, sentences, empty documents, errors with their places,
metadata.
"""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from common.dataset import IndexedDataset, blocks
from common.dataset.blocks import DocumentRule
from common.dataset.encode import split_sentences
from common.dataset.encodings import check_words
from common.dataset.preprocess import PreprocessOptions, preprocess
from common.dataset.workers import TokenizerChoice
from common.errors import ConfigError, DataError
from tests.common.dataset.conftest import files_of


def test_text_in_its_four_rules(tmp_path, read_back) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\ntwo\n\n\nthree<|endoftext|>four\n".encode())
    assert read_back(path) == ["one\ntwo¶", "three<|endoftext|>four¶"]
    for rule, expected in (
        (DocumentRule.LINE, ["one¶", "two¶", "three<|endoftext|>four¶"]),
        (DocumentRule.EOT, ["one\ntwo\n\n\nthree¶", "four¶"]),
        (DocumentRule.FILE, ["one\ntwo\n\n\nthree<|endoftext|>four\n¶"]),
    ):
        assert read_back(path, documents=rule) == expected
    assert read_back(path, append_eod=False) == ["one\ntwo", "three<|endoftext|>four"]


def test_inputs_are_read_in_their_order(tmp_path, read_back) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("one\n\ntwo")
    lines.write_text('{"text": "three"}\n')
    assert read_back([lines, text]) == ["three¶", "one¶", "two¶"]
    lines.write_text('{"body": "three"}\n')
    assert read_back(text, json_keys=("body",)) == ["one¶", "two¶"]
    with pytest.raises(DataError, match="in two runs"):
        read_back([text, lines], json_keys=("body",))
    (tmp_path / "c.json").write_text('["a"]')
    with pytest.raises(DataError, match="is a string and has no keys"):
        read_back(tmp_path / "c.json", json_keys=("body",))


@pytest.mark.parametrize("block_bytes", [1, 20, 1 << 20])
def test_several_keys_give_several_outputs(tmp_path, options_for, block_bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "A", "body": "aa", "n": 1}\n{"title": "B", "body": ""}\n')
    options = {"json_keys": ("title", "body"), "block_bytes": block_bytes}
    result = preprocess(options_for(path, output_prefix=tmp_path / "new" / "x", **options))
    assert [prefix.name for prefix in result.prefixes] == ["x_title_document", "x_body_document"]
    title, body = (IndexedDataset(prefix) for prefix in result.prefixes)
    assert title.tokens.tolist() == [65, 256, 66, 256]
    assert body.tokens.tolist() == [97, 97, 256]
    assert (result.progress.documents, result.progress.empty) == (4, 1)
    assert body.metadata().empty_documents == 1


def test_text_left_out_for_its_length_is_told(tmp_path, options_for, caplog) -> None:
    """Two of three paragraphs are short: 80 of 180 bytes."""
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(["a" * 40, "b" * 96, "c" * 40]))
    options = options_for(path, min_length=64)
    assert preprocess(replace(options, documents=DocumentRule.FILE)).progress.left_out() == ""
    assert "--min-length" not in caplog.text
    left_out = preprocess(options).progress.left_out()
    assert left_out == ", 2 short ones left out (44 % of the text)"
    for said in ("--min-length 64", "left out 44 % of the text: ", "--documents file"):
        assert said in caplog.text
    caplog.clear()
    path.write_text("\n\n".join(["a" * 40, "b" * 96, "c" * 90]))
    preprocess(options)
    assert "left out" not in caplog.text


def test_sentences_belong_to_documents(tmp_path, read_back) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One. Two!\n\nThree?")
    assert read_back(path, split_sentences=True) == ["One.", "Two!¶", "Three?¶"]
    data = IndexedDataset(tmp_path / "out_text_sentence")
    assert data.document_index[:].tolist() == [0, 2, 3]
    kept = read_back(path, split_sentences=True, keep_newlines=True)
    assert kept == ["One. ", "Two!¶", "Three?¶"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two? Three!", ["One.", "Two?", "Three!"]),
        ("Mr. Smith met J. Doe at 3.14 p.m. yesterday.", None),
        ("He said, “Stop.” Then he left.", ["He said, “Stop.”", "Then he left."]),
        ("apples, etc. and so on. End", ["apples, etc. and so on.", "End"]),
        ("Wait... what? Yes... No", ["Wait... what?", "Yes...", "No"]),
        ("你好。他说：“走！”我们走了……好吗？", ["你好。", "他说：“走！”", "我们走了……", "好吗？"]),
        ("Title\n\nBody of text", ["Title", "Body of text"]),
        ("It was I. Then", ["It was I.", "Then"]),
        ("  ", []),
        ("One" + "." * 30_000 + "two", None),
    ],
)
def test_rules_of_sentences(text, expected) -> None:
    """None: it is one. A long run of signs takes 30 s where each begins a search of its own."""
    before = time.monotonic()
    assert split_sentences(text) == ([text] if expected is None else expected)
    assert time.monotonic() - before < 1


@given(st.text(st.sampled_from("aB .!?\n。”'1"), max_size=40))
def test_keeping_newlines_keeps_everything(text) -> None:
    kept = split_sentences(text, keep_newlines=True)
    assert "".join(kept) == (text if text.strip() else "")
    assert [sentence.strip() for sentence in kept] == split_sentences(text)


def test_metadata_tells_what_was_done(tmp_path, read_back) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab"}\n{"text": ""}\n')
    read_back(path)
    data, file = IndexedDataset(tmp_path / "out_text_document"), "out_text_document.meta.json"
    told = asdict(data.metadata())
    source = {"name": "a.jsonl", "bytes": path.stat().st_size, "format": "jsonl"}
    assert told["sources"][0].items() >= source.items()
    expected = {"vocab_size": 257, "eod_id": 256, "documents": 2, "sequences": 1, "tokens": 3}
    assert told.items() >= (expected | {"tokenizer": "Byte", "empty_documents": 1}).items()
    (tmp_path / file).write_text("{}")
    with pytest.raises(DataError, match="does not describe"):
        data.metadata()
    (tmp_path / file).unlink()
    assert data.metadata() is None


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path, read_back) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    (tmp_path / "b.json").write_text(r'["a\ud83d", "\ud83d\ude00", "\udc00\ud83d\\ud83d"]')
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.json"]
    once = ["a\ufffd¶", "\U0001f600¶"]
    assert read_back(inputs) == [*once, *once, "\ufffd\ufffd\\ud83d¶"]


def run(tmp_path: Path, inputs: Path, files: tuple[Path, Path], name: str, **options: object) -> list[bytes]:
    choice = TokenizerChoice(kind="GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1], backend="auto")
    settings = PreprocessOptions(inputs=(inputs,), output_prefix=tmp_path / name, tokenizer=choice, **options)
    return files_of(preprocess(settings).prefixes[0], ".bin", ".idx", ".meta.json")


@pytest.mark.campaign
def test_tinyshakespeare_is_one_document_of_338025_tokens(tmp_path, real_data, gpt2_vocab_files) -> None:
    corpus = real_data / "corpora" / "en" / "tinyshakespeare.txt"
    run(tmp_path, corpus, gpt2_vocab_files, "x", documents=DocumentRule.FILE, append_eod=False)
    assert IndexedDataset(tmp_path / "x_text_document").sizes[:].tolist() == [338025]


def test_two_workers_write_the_same_bytes(tmp_path, english, gpt2_vocab_files) -> None:
    corpus, options = tmp_path / "poems.txt", {"split_sentences": True}
    corpus.write_text(english[:200_000], encoding="utf-8")
    one = run(tmp_path, corpus, gpt2_vocab_files, "one", workers=1, **options)
    options |= {"workers": 2, "block_bytes": 30_000}
    assert run(tmp_path, corpus, gpt2_vocab_files, "two", **options) == one


def test_an_error_in_a_worker_is_the_same_error(tmp_path, gpt2_vocab_files) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 50 + '{"body": "b"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: line 51, column 1: the key 'text' is missing"):
        run(tmp_path, tmp_path / "a.jsonl", gpt2_vocab_files, "x", workers=2, block_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(("output", "way"), [(".bin", "itself"), (".idx", "link"), (".meta.json", "hard link")])
def test_a_corpus_is_never_replaced_by_its_own_output(tmp_path, read_back, output, way) -> None:
    file = tmp_path / f"out_text_document{output}"
    corpus = file if way == "itself" else tmp_path / "corpus.txt"
    corpus.write_text('"text"')
    if way != "itself":
        (file.symlink_to if way == "link" else file.hardlink_to)(corpus)
    there = sorted(tmp_path.iterdir())
    message = r"is both an input and an output.*choose another --output-prefix"
    with pytest.raises(ConfigError, match=message):
        read_back(corpus)
    assert file.read_text() == '"text"' and sorted(tmp_path.iterdir()) == there


@pytest.mark.parametrize("key", ["a/b", "..", "a\0b"])
def test_a_key_that_no_file_name_can_hold(tmp_path, options_for, key) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({key: "one"}))
    options = {"output_prefix": tmp_path / "o" / "x", "json_keys": (key,)}
    if key == "..":  # no separator, no other folder
        preprocess(options_for(path, **options))
        assert (tmp_path / "o" / "x_.._document.bin").is_file()
        return
    with pytest.raises(DataError, match=r"--json-keys .*rename the key"):
        options_for(path, **options)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("prefix", ["", "..", "/", "a/.."])
def test_a_prefix_that_is_a_folder_is_refused(options_for, prefix) -> None:
    with pytest.raises(ConfigError, match="expected how the files begin"):
        options_for(output_prefix=Path(prefix))


PLACES = pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.txt", "first\n\n{}", "line 3"),
        ("a.jsonl", '{{"text": "first"}}\n{{"text": "{}"}}\n', "line 2(, column 1)?"),
        ("a.json", '["first",\n"{}"]', "item 2"),
    ],
)


@PLACES
@pytest.mark.parametrize("zipped", [False, True])
def test_a_document_beyond_the_limit_is_refused(tmp_path, monkeypatch, read_back, name, text, where, zipped) -> None:
    monkeypatch.setattr(blocks, "_READ_BYTES", 100)
    path, content = tmp_path / (name + ".gz" * zipped), text.format("ab " * 3000).encode()
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert read_back(path, document_bytes=10_000, block_bytes=100)[-1] == "ab " * 3000 + "¶"
    message = rf"{path.name}: .*{where}.* has more than .* Mi.*--max-document-mib N"
    with pytest.raises(DataError, match=message):
        read_back(path, document_bytes=5000, block_bytes=100)


@PLACES
def test_a_word_without_end_is_refused(tmp_path, monkeypatch, read_back, name, text, where) -> None:
    monkeypatch.setattr(check_words, "__defaults__", (1000,))
    path = tmp_path / name
    for unit in ("a", "é", "字", "7", "½", "-", "_", "\x7f", " ", "\u3000"):
        for length in (10, 990):  # with the letters about it
            path.write_text(text.format(f"one{unit * length}two"))
            assert unit * length in read_back(path)[1]
        path.write_text(text.format(f"one{unit * 2006}two"))
        message = rf"{name}: {where}: holds a word of 1000 or more characters"
        with pytest.raises(DataError, match=message):
            read_back(path)
    monkeypatch.setattr(check_words, "__defaults__", (10,))
    path.write_text(text.format("a1 " * 1000 + "ab12" * 1000 + "天地，" * 1000))
    assert len(read_back(path)) == 2
