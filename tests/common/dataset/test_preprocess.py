"""Corpora to pairs: framing, keys, sentences, empty documents, errors with their places,
metadata.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.dataset import IndexedDataset, json_array
from common.dataset.blocks import DocumentRule
from common.dataset.limits import check_words
from common.dataset.preprocess import PreprocessOptions, preprocess
from common.dataset.workers import TokenizerChoice
from common.errors import ConfigError, DataError


def test_text_in_its_four_rules(tmp_path, read_back) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\ntwo\n\n\nthree<|endoftext|>four\n".encode())
    assert read_back(path) == ["one\ntwo¶", "three<|endoftext|>four¶"]
    assert read_back(path, documents=DocumentRule.LINE) == [
        "one¶",
        "two¶",
        "three<|endoftext|>four¶",
    ]
    assert read_back(path, documents=DocumentRule.EOT) == ["one\ntwo\n\n\nthree¶", "four¶"]
    assert read_back(path, documents=DocumentRule.FILE) == [
        "one\ntwo\n\n\nthree<|endoftext|>four\n¶"
    ]
    assert read_back(path, append_eod=False) == ["one\ntwo", "three<|endoftext|>four"]


def test_inputs_are_read_in_their_order(tmp_path, read_back) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n')
    assert read_back([tmp_path / "b.jsonl", tmp_path / "a.txt"]) == ["three¶", "one¶", "two¶"]


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
    said = {}
    for rule in (DocumentRule.BLANK_LINE, DocumentRule.FILE):
        caplog.clear()
        done = preprocess(replace(options, documents=rule)).progress
        said[rule] = (done.left_out(), "--min-length 64" in caplog.text)
    assert said == {
        DocumentRule.BLANK_LINE: (", 2 short ones left out (44 % of the text)", True),
        DocumentRule.FILE: ("", False),
    }
    preprocess(options)
    assert "left out 44 % of the text: " in caplog.text and "--documents file" in caplog.text
    caplog.clear()
    (tmp_path / "a.txt").write_text("\n\n".join(["a" * 40, "b" * 96, "c" * 90]))
    preprocess(options)
    assert "left out" not in caplog.text


def test_sentences_belong_to_documents(tmp_path, read_back) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One. Two!\n\nThree?")
    assert read_back(path, split_sentences=True) == ["One.", "Two!¶", "Three?¶"]
    data = IndexedDataset(tmp_path / "out_text_sentence")
    assert data.document_index[:].tolist() == [0, 2, 3]
    assert read_back(path, split_sentences=True, keep_newlines=True) == [
        "One. ",
        "Two!¶",
        "Three?¶",
    ]


def test_metadata_tells_what_was_done(tmp_path, read_back) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab"}\n{"text": ""}\n')
    read_back(path)
    metadata = IndexedDataset(tmp_path / "out_text_document").metadata()
    assert (metadata.tokenizer, metadata.vocab_size, metadata.eod_id) == ("Byte", 257, 256)
    assert (metadata.documents, metadata.sequences, metadata.tokens, metadata.empty_documents) == (
        2,
        1,
        3,
        1,
    )
    assert [(source.name, source.bytes, source.format) for source in metadata.sources] == [
        ("a.jsonl", path.stat().st_size, "jsonl")
    ]
    (tmp_path / "out_text_document.meta.json").write_text("{}")
    with pytest.raises(DataError, match="does not describe"):
        IndexedDataset(tmp_path / "out_text_document").metadata()
    (tmp_path / "out_text_document.meta.json").unlink()
    assert IndexedDataset(tmp_path / "out_text_document").metadata() is None


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("name", "content", "keys", "message"),
    [
        (
            "a.jsonl",
            '{"text": "a"}\n\n{"titel": "b", "n": 1}\n',
            ("text",),
            r"line 3, column 1: the key 'text' is missing.*'titel', 'n'",
        ),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": 3}\n',
            ("text",),
            "line 2, column 1: the value of 'text' is a number",
        ),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": "b"\n',
            ("text",),
            "line 2, column 13: Expecting ',' delimiter",
        ),
        (
            "a.jsonl",
            '{"text": "a"}\n{"n": ' + "[" * 200_000,
            ("text",),
            r"line 2, column 1: nested deeper than 64 levels; expected",
        ),
        (
            "a.jsonl",
            '{"text": "a"}\n{"n": ' + "9" * 5000 + "}",
            ("text",),
            "line 2, column 1: a number of more digits than Python converts; exp",
        ),
        ("a.json", '["a"]', ("body",), "is a string and has no keys"),
        (
            "a.json",
            '[{"text": "a"},\n  {"body": "b"}]',
            ("text",),
            r"item 2: the key 'text' is missing.*'body'",
        ),
        ("a.json", '["", ""]', ("text",), "all 2 documents under 'text' are empty"),
        ("a.txt", "ab\n\nc\0d", ("text",), "holds NUL bytes .0x00., 1 of 7; the file is binary"),
        (
            "a.jsonl",
            '{"text": "a"}\n\ufeff{"text": "b"}\n',
            ("text",),
            r"line 2, column 1: a byte order mark \(U\+FEFF\) begins this line",
        ),
        ("a.txt", b"ab\n\nc\xe4d", ("text",), "line 3, column 2: byte 5 is not UTF-8"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "\xff"}',
            ("text",),
            "line 2, column 11: byte 24 is not UTF-8",
        ),
    ],
)
def test_errors_name_the_place_and_leave_nothing(
    tmp_path, options_for, name, content, keys, message, block_bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    options = {"json_keys": keys, "block_bytes": block_bytes}
    with pytest.raises(DataError, match=message):
        preprocess(options_for(path, output_prefix=tmp_path / "out" / "x", **options))
    assert list((tmp_path / "out").glob("*")) == []


def test_text_beside_keyed_json_is_refused(tmp_path, read_back) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"body": "two"}\n')
    with pytest.raises(DataError, match="in two runs"):
        read_back([tmp_path / "a.txt", tmp_path / "b.jsonl"], json_keys=("body",))
    assert read_back(tmp_path / "a.txt", json_keys=("body",)) == ["one¶"]


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path, read_back) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    (tmp_path / "b.json").write_text(r'["a\ud83d", "\ud83d\ude00", "\udc00\ud83d\\ud83d"]')
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.json"]
    once = ["a\ufffd¶", "\U0001f600¶"]
    assert read_back(inputs) == [*once, *once, "\ufffd\ufffd\\ud83d¶"]


def run(
    tmp_path: Path, inputs: Path, files: tuple[Path, Path], name: str, **options: object
) -> tuple[bytes, ...]:
    choice = TokenizerChoice(
        kind="GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1], backend="auto"
    )
    settings = PreprocessOptions(
        inputs=(inputs,), output_prefix=tmp_path / name, tokenizer=choice, **options
    )
    (prefix,) = preprocess(settings).prefixes
    return tuple(
        prefix.with_name(prefix.name + extension).read_bytes()
        for extension in (".bin", ".idx", ".meta.json")
    )


@pytest.mark.campaign
def test_tinyshakespeare_is_one_document_of_338025_tokens(
    tmp_path, real_data, gpt2_vocab_files
) -> None:
    corpus = real_data / "corpora" / "en" / "tinyshakespeare.txt"
    run(tmp_path, corpus, gpt2_vocab_files, "x", documents=DocumentRule.FILE, append_eod=False)
    assert IndexedDataset(tmp_path / "x_text_document").sizes[:].tolist() == [338025]


@pytest.mark.parametrize("sentences", [False, True])
def test_two_workers_write_the_same_bytes(tmp_path, english, gpt2_vocab_files, sentences) -> None:
    corpus = tmp_path / "poems.txt"
    corpus.write_text(english[:200_000], encoding="utf-8")
    one = run(tmp_path, corpus, gpt2_vocab_files, "one", workers=1, split_sentences=sentences)
    two = run(
        tmp_path,
        corpus,
        gpt2_vocab_files,
        "two",
        workers=2,
        block_bytes=30_000,
        split_sentences=sentences,
    )
    assert one == two


def test_an_error_in_a_worker_is_the_same_error(tmp_path, gpt2_vocab_files) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 50 + '{"body": "b"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: line 51, column 1: the key 'text' is missing"):
        run(tmp_path, tmp_path / "a.jsonl", gpt2_vocab_files, "x", workers=2, block_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    "output", ["out_text_document.bin", "out_text_document.idx", "out_text_document.meta.json"]
)
@pytest.mark.parametrize("way", ["itself", "link", "hard link"])
def test_a_corpus_is_never_replaced_by_its_own_output(tmp_path, read_back, output, way) -> None:
    corpus = tmp_path / output
    if way == "itself":
        corpus.write_text('"text"')
    else:
        (tmp_path / "corpus.txt").write_text('"text"')
        (corpus.symlink_to if way == "link" else corpus.hardlink_to)(tmp_path / "corpus.txt")
    there = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(
        ConfigError, match=r"is both an input and an output.*choose another --output-prefix"
    ):
        read_back(corpus if way == "itself" else tmp_path / "corpus.txt")
    assert (
        corpus.read_text() == '"text"' and sorted(path.name for path in tmp_path.iterdir()) == there
    )


@pytest.mark.parametrize("key", ["a/b", "/a", "..", "../a", "a\0b"])
def test_a_key_that_no_file_name_can_hold(tmp_path, options_for, key) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({key: "one"}))
    options = {"output_prefix": tmp_path / "o" / "x", "json_keys": (key,)}
    if key == "..":  # no separator, no other folder
        preprocess(options_for(path, **options))
        assert (tmp_path / "o" / "x_.._document.bin").is_file()
        return
    with pytest.raises(DataError, match=r"--json-keys .*rename the key"):
        preprocess(options_for(path, **options))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("prefix", ["", ".", "..", "/", "a/.."])
def test_a_prefix_that_is_a_folder_is_refused(options_for, prefix) -> None:
    with pytest.raises(ConfigError, match="expected how the files begin"):
        options_for(output_prefix=Path(prefix))


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", "{}"), ("a.jsonl", '{{"text": "{}"}}'), ("a.json", '["b", "{}"]')]
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_document_beyond_the_limit_is_refused(
    tmp_path, monkeypatch, read_back, name, text, zipped
) -> None:
    monkeypatch.setattr(json_array, "_READ_BYTES", 100)
    path = tmp_path / (name + ".gz" * zipped)
    content = ("\n\n" * (name == "a.txt") + text.format("ab " * 3000)).encode()
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert read_back(path, document_bytes=10_000, block_bytes=100)[-1] == "ab " * 3000 + "¶"
    with pytest.raises(
        DataError,
        match=rf"{path.name}: .*(line [13]|item 2).* has more than .* Mi.*--max-document-mib N",
    ):
        read_back(path, document_bytes=5000, block_bytes=100)


@pytest.mark.parametrize("unit", ["a", "é", "字", "7", "½", "-", "_", "\x01", " ", "\u3000"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_a_word_without_end_is_refused(tmp_path, monkeypatch, read_back, unit, name) -> None:
    monkeypatch.setattr(check_words, "__defaults__", (1000,))
    path = tmp_path / name

    def write(word: str) -> list[str]:
        text = f"first\n\none{word}two"
        if name == "a.txt":
            path.write_text(text)
        else:
            item = json.dumps({"text": text})
            path.write_text(
                f'"first"\n{item}\n'.replace('"first"', '{"text": "0"}')
                if name == "a.jsonl"
                else f"[\n{item}]"
            )
        return read_back(path)

    for length in (10, 990):  # with the letters about it
        assert unit * length in "".join(write(unit * length))
    where = {"a.txt": "line 3", "a.jsonl": "line 2, column 1", "a.json": "item 1"}[name]
    with pytest.raises(
        DataError, match=rf"{name}: {where}: holds a word of 1000 or more characters"
    ):
        write(unit * 2006)


def test_many_words_are_not_a_word_without_end(tmp_path, monkeypatch, read_back) -> None:
    monkeypatch.setattr(check_words, "__defaults__", (10,))
    (tmp_path / "a.txt").write_text("a1 " * 1000 + "ab12" * 1000 + "天地，" * 1000)
    read_back(tmp_path / "a.txt")
