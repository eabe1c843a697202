"""Corpora to pairs: framing, keys, sentences, empty documents, errors with their places, metadata."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from common.dataset import blocks
from common.dataset.encode import split_sentences
from common.dataset.encodings import checked_encoding
from common.dataset.indexed import IndexedDataset
from common.dataset.metadata import read_metadata
from common.dataset.options import PreprocessOptions
from common.dataset.preprocess import preprocess
from common.errors import ConfigError, DataError
from tests.common.dataset.conftest import files_of, sequences_of


def test_text_in_its_four_rules(tmp_path, read_back) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\ntwo\n\n\nthree<|endoftext|>four\n".encode())
    assert read_back(path) == ["one\ntwo¶", "three<|endoftext|>four¶"]
    for rule, expected in (
        ("line", ["one¶", "two¶", "three<|endoftext|>four¶"]),
        ("eot", ["one\ntwo\n\n\nthree¶", "four¶"]),
        ("file", ["one\ntwo\n\n\nthree<|endoftext|>four\n¶"]),
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
    assert (result.documents, result.empty) == (4, 1)
    assert read_metadata(Path(f"{body.prefix}.meta.json")).empty_documents == 1


def test_text_left_out_for_its_length_is_told(tmp_path, options_for, caplog) -> None:
    """Two of three paragraphs are short: 80 of 180 bytes. Below a third there is no warning."""
    path = tmp_path / "a.txt"
    options = options_for(path, min_length=64)
    for last, rule, left_out, is_said in (
        (40, "file", "", False),
        (90, "blank_line", ", 1 short ones left out (17 % of the text)", False),
        (40, "blank_line", ", 2 short ones left out (44 % of the text)", True),
    ):
        path.write_text("\n\n".join(["a" * 40, "b" * 96, "c" * last]))
        assert preprocess(replace(options, documents=rule)).left_out() == left_out
        assert ("--min-length" in caplog.text) == is_said
    assert all(said in caplog.text for said in ("--min-length 64 left out 44 % of the text: ", "--documents file"))


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
    record = tmp_path / "out_text_document.meta.json"
    told = asdict(read_metadata(record))
    source = {"name": "a.jsonl", "bytes": path.stat().st_size, "format": "jsonl"}
    assert told["sources"][0].items() >= source.items()
    expected = {"vocab_size": 257, "eod_id": 256, "documents": 2, "sequences": 1, "tokens": 3}
    assert told.items() >= (expected | {"tokenizer": "Byte", "empty_documents": 1}).items()
    for wrong in ("{}", record.read_text().replace('"tokens": 3', '"tokens": -3')):
        record.write_text(wrong)
        with pytest.raises(DataError, match="the file does not describe token files: delete it"):
            read_metadata(record)
    record.unlink()
    assert read_metadata(record) is None


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path, read_back) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    (tmp_path / "b.json").write_text(r'["a\ud83d", "\ud83d\ude00", "\udc00\ud83d\\ud83d"]')
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.json"]
    once = ["a\ufffd¶", "\U0001f600¶"]
    assert read_back(inputs) == [*once, *once, "\ufffd\ufffd\\ud83d¶"]


def run(tmp_path: Path, inputs: Path, files: tuple[Path, Path], name: str, **options: object) -> list[bytes]:
    tokenizer = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": files[0], "merge_file": files[1]}
    settings = PreprocessOptions(inputs=(inputs,), output_prefix=tmp_path / name, **tokenizer, **options)
    return files_of(preprocess(settings).prefixes[0], ".bin", ".idx", ".meta.json")


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
    with pytest.raises(ConfigError, match=r"is both an input and an output.*choose another --output-prefix"):
        read_back(corpus)
    assert file.read_text() == '"text"' and {*tmp_path.iterdir()} == {file, corpus}


def test_keys_and_prefixes_that_no_file_name_can_hold(tmp_path, options_for) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"..": "one"}))
    preprocess(options_for(path, output_prefix=tmp_path / "o" / "x", json_keys=("..",)))
    assert (tmp_path / "o" / "x_.._document.bin").is_file(), "it has no separator"
    for key in ("a/b", "a\0b"):
        with pytest.raises(DataError, match=r"--json-keys .*rename the key"):
            options_for(path, json_keys=(key,))
    for prefix in ("", "..", "a/.."):
        with pytest.raises(ConfigError, match="expected how the files begin"):
            options_for(output_prefix=Path(prefix))


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.txt", "first\n\n{}", "line 3"),
        ("a.jsonl", '{{"text": "first"}}\n{{"text": "{}"}}\n', "line 2(, column 1)?"),
        ("a.json", '["first",\n"{}"]', "item 2"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_document_beyond_the_limit_is_refused(tmp_path, monkeypatch, read_back, name, text, where, zipped) -> None:
    monkeypatch.setattr(blocks, "_READ_BYTES", 100)
    path, content = tmp_path / (name + ".gz" * zipped), text.format("ab " * 3000).encode()
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert read_back(path, document_bytes=10_000, block_bytes=100)[-1] == "ab " * 3000 + "¶"
    message = rf"{path.name}: .*{where}.* has more than .* Mi.*--max-document-mib N"
    with pytest.raises(DataError, match=message):
        read_back(path, document_bytes=5000, block_bytes=100)


# ---- GPT2-Chinese's data: its loop over transformers' BertTokenizer, written out here, is the reference ----


CHINESE = [
    "她说：你好，world！\n第二行 of 2019年。",
    "短",
    "",
    "一二三四五六七八九十\n\n甲乙丙丁",
    "unaffable 龘 [SEP]x 未收录",
    "  ",
    "天地玄黄宇宙洪荒日月盈昃辰宿列张",
    "寒来暑往秋收冬藏闰余成岁律吕调阳",
]
BERT_TOKENS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "world", "of", "2019",
    *dict.fromkeys("她说：你好，！第二行年。短一三四五六七八九十甲乙丙丁天地玄黄宇宙洪荒日月盈昃[]x"),
]  # fmt: skip


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(BERT_TOKENS) + "\n", encoding="utf-8")
    return tmp_path / "vocab.txt"


def build_files(texts: list[str], vocab_file: Path, pieces: int, least: int) -> list[str]:
    """Text that GPT2-Chinese writes into its pieces."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.BertTokenizer(str(vocab_file))
    # a spelled mark is text to us, and a mark to transformers: none but line ends are in the test
    lines = [text.replace("[SEP]", "[ SEP ]").replace("\n", " [SEP] ") for text in texts]
    share = len(lines) // pieces
    written = []
    for number in range(pieces):
        part = lines[share * number : share * (number + 1) if number < pieces - 1 else None]
        rows = [["[MASK]", *tokenizer.tokenize(line), "[CLS]"] for line in part if len(line) > least]
        ids = [each for row in rows for each in tokenizer.convert_tokens_to_ids(row)]
        written.append("".join(f"{each} " for each in ids))
    return written


def run_bert(target: Path, vocab: Path, source: Path, **options: object) -> Path:
    wish = PreprocessOptions(inputs=(source,), output_prefix=target / "tokenized_train", vocab_file=vocab, **options)
    return preprocess(wish).prefixes[0]


def write_array(path: Path, texts: list[str]) -> Path:
    path.write_text(json.dumps(texts), encoding="utf-8")
    return path


@pytest.mark.parametrize(("pieces", "least"), [(1, 0), (3, 10), (8, 0), (20, 12)])
def test_pieces_equal_those_of_gpt2_chinese(tmp_path, bert, pieces, least) -> None:
    texts = [text.replace("[SEP]", "[ SEP ]") for text in CHINESE]
    source = write_array(tmp_path / "train.json", texts)
    texts = ["" if text.isspace() else text for text in texts]
    expected = build_files(texts, bert, pieces, least)
    options = {"format": "pieces", "num_pieces": pieces, "min_length": least}
    for size in (1, 1 << 20):
        run_bert(tmp_path, bert, source, block_bytes=size, **options)
        names = [f"tokenized_train_{n}.txt" for n in range(pieces)]
        assert [(tmp_path / name).read_text() for name in names] == expected
    assert not list(tmp_path.glob("*spool*"))


def test_pieces_are_read_as_the_documents_that_they_were(tmp_path, bert) -> None:
    source, folder = write_array(tmp_path / "train.json", CHINESE * 4), tmp_path / "pieces"
    run_bert(folder, bert, source, format="pieces", num_pieces=12)
    pair = sequences_of(IndexedDataset(run_bert(tmp_path / "a", bert, source)))
    again = run_bert(tmp_path / "b", bert, folder, input_format="ids", block_bytes=64)
    back = sequences_of(IndexedDataset(again))
    assert len(pair) == len(back) == 6 * 4
    assert all(map(np.array_equal, pair, back))
    assert back[0][0] == BERT_TOKENS.index("[MASK]") and back[0][-1] == BERT_TOKENS.index("[CLS]")


def test_invalid_ids_a_missing_piece_one_too_many_and_short_documents_are_refused(tmp_path, bert) -> None:
    (tmp_path / "a").mkdir()
    for content, message in (
        ("4 -1 2 ", "byte 2: found '-1', expected ids"),
        ("4 2147483648 2 ", "id 2147483648 .number 2 from byte 0. is beyond the"),
        ("4 " + "9" * 5000, "byte 2: found '99999999999999999999', expected ids"),
        ("4 她 2 ", "byte 2: found '她', expected ids"),
        ("", "all 0 documents"),
    ):
        (tmp_path / "a" / "tokenized_train_0.txt").write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            run_bert(tmp_path, bert, tmp_path / "a", input_format="ids")
    source = write_array(tmp_path / "train.json", CHINESE)
    run_bert(tmp_path, bert, source, format="pieces", num_pieces=3)
    with pytest.raises(ConfigError, match=r"tokenized_train_2.txt: is of an earlier run"):
        run_bert(tmp_path, bert, source, format="pieces", num_pieces=2)
    (tmp_path / "tokenized_train_1.txt").unlink()
    with pytest.raises(DataError, match=r"tokenized_train_1.txt is not there, 2 others are"):
        run_bert(tmp_path / "out", bert, tmp_path, input_format="ids")
    with pytest.raises(DataError, match="none of the 8 documents has more than 128 characters"):
        run_bert(tmp_path, bert, source, min_length=128)


@pytest.mark.parametrize("name", ["train.json", "train.txt"])
def test_gbk_is_named_and_read_when_said(tmp_path, bert, name) -> None:
    text = "她说：你好。" * 30
    content = json.dumps([text], ensure_ascii=False) if name.endswith("json") else text
    source, utf8 = tmp_path / name, tmp_path / f"utf8.{name}"
    source.write_text(content, encoding="gbk")
    utf8.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"it looks like GBK: convert it .*, or use a tool that takes --encoding gbk"):
        run_bert(tmp_path / "a", bert, source)
    ours = run_bert(tmp_path / "b", bert, source, encoding=checked_encoding("gbk"))
    assert files_of(ours) == files_of(run_bert(tmp_path / "c", bert, utf8))
    with pytest.raises(DataError, match="is not big5"):
        run_bert(tmp_path / "d", bert, utf8, encoding=checked_encoding("big5"))
    for name in ("gkb", "rot13"):
        with pytest.raises(ConfigError, match=f"'{name}': not an encoding"):
            checked_encoding(name)
