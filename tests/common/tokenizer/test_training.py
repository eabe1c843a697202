"""Vocabularies and tokenizers of own text: they cover it, they give it back, and the same text
gives the same files.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from common.tokenizer import load_tokenizer
from tools import make_vocab, train_tokenizer

ROOT = Path(__file__).resolve().parents[3]
TEXTS = [
    "她说：你好，world！Unaffable 世界。\n第二行，2019年３月。",
    "黛玉道：“宝玉，你来了？”宝玉笑道：“来了，来了。”",
    "To be, or not to be: that is the question.  Naïve café ﬁn.",
    "寒来暑往，秋收冬藏；闰余成岁，律吕调阳。龘 한국어 カタカナ 豈 😀",
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "train.json"
    path.write_text(json.dumps(TEXTS * 3, ensure_ascii=False), encoding="utf-8")
    return path


@pytest.mark.parametrize("cased", [False, True])
def test_a_vocabulary_of_all_characters_knows_every_text(corpus, tmp_path, cased) -> None:
    target = tmp_path / "cache" / "vocab.txt"
    words = ["--raw_data_path", str(corpus), "--vocab_file", str(target), "--vocab_size", "500"]
    assert make_vocab.main([*words, *(["--cased"] if cased else [])]) == 0
    lines = target.read_text(encoding="utf-8").splitlines()
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertTokenizer(str(target), do_lower_case=not cased)
    counts: Counter[str] = Counter()
    for text in TEXTS:
        for token in theirs.tokenize(text):
            counts[token] += 3
    expected = sorted(counts, key=lambda token: (-counts[token], token))
    assert lines == ["[SEP]", "[CLS]", "[MASK]", "[PAD]", "[UNK]", *expected]
    ours = load_tokenizer("BertWordPieceCase" if cased else "BertWordPieceLowerCase", target)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text).tolist() == ids and theirs.unk_token_id not in ids
    assert make_vocab.main([*words[:-1], "3", *(["--cased"] if cased else [])]) == 0
    assert len(target.read_text(encoding="utf-8").splitlines()) == 5 + 3


def test_a_vocabulary_of_words_knows_every_text(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("rjieba", reason="the extra chinese is not installed")
    target = tmp_path / "vocab_seg.txt"
    words = ["--raw_data_path", str(corpus), "--vocab_file", str(target), "--segment"]
    assert make_vocab.main(words) == 0
    tokenizer = load_tokenizer("BertWordLevel", target)
    assert all(tokenizer.unknown_id not in tokenizer.encode(text) for text in TEXTS)
    assert "宝玉" in target.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("GPT2BPETokenizer", 300),
        ("BertWordPieceLowerCase", 230),
        ("BertTokenizer", 150),
        ("SentencePieceTokenizer", 350),
        ("SentencePieceTokenizer/bpe", 350),
    ],
)
def test_the_same_text_gives_the_same_tokenizer(corpus, tmp_path, kind, size) -> None:
    if "Sentence" in kind:
        pytest.importorskip("sentencepiece", reason="the extra chinese is not installed")
    words = ["--input", str(corpus), "--vocab-size", str(size), "--type", kind]
    assert train_tokenizer.main([*words, "--output-folder", str(tmp_path / "a")]) == 0
    # another process: the libraries' hash tables begin with other seeds there
    command = [sys.executable, str(ROOT / "tools/train_tokenizer.py"), *words]
    subprocess.run([*command, "--output-folder", str(tmp_path / "b")], check=True, timeout=120)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    tokenizer = load_tokenizer(None, tmp_path / "a")
    assert tokenizer.vocab_size == size or kind.startswith("Bert")
    assert tokenizer.kind == kind.partition("/")[0].replace("BertTokenizer", "BertWordPieceLowerCase")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        if not kind.startswith("Bert"):
            assert tokenizer.decode(ids) == text


def test_options_that_cannot_be(corpus, tmp_path, capsys) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    gbk = tmp_path / "gbk.txt"
    gbk.write_text("她说：你好。" * 20, encoding="gbk")
    train = ["--output-folder", str(tmp_path / "out")]
    make = ["--vocab_file", str(tmp_path / "out" / "vocab.txt"), "--raw_data_path"]
    for main, words, said in (
        (train_tokenizer.main, [*train, "--input", str(corpus), "--vocab-size", "100"], "at least"),
        (
            train_tokenizer.main,
            [*train, "--input", str(corpus), "--vocab-size", "300", "--type", "Word"],
            "--type Word: expected GPT2BPETokenizer",
        ),
        (train_tokenizer.main, [*train, "--input", str(empty), "--vocab-size", "300"], "is empty"),
        (make_vocab.main, [*make, str(empty)], "is empty"),
        (make_vocab.main, [*make, str(gbk)], "the file looks like GBK: add --encoding gbk"),
        (make_vocab.main, [*make, str(tmp_path / "no.json")], "not found"),
        (make_vocab.main, [*make, str(corpus), "--vocab_size", "0"], "expected 1 or more"),
        (make_vocab.main, ["--vocab_file", str(corpus), "--raw_data_path", str(corpus)], "choose"),
    ):
        assert main(words) == 2
        message = capsys.readouterr().err
        assert said in message and message.count("error:") == 1
    assert not (tmp_path / "out").exists()
    assert make_vocab.main([*make, str(gbk), "--encoding", "gbk"]) == 0
