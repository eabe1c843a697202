"""SentencePiece models, tokenizer.json and words against their libraries; kinds of files; what transformers opens."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.config.values import kind_named
from common.errors import TokenizerError
from common.files import atomic_write
from common.systems.hugging_face.tokenizer import files_of, read_tokenizer
from common.tokenizer import Tokenizer, load_tokenizer
from common.tokenizer.bert import SPECIAL
from common.tokenizer.text_tokenizer import encode_prompt, whole_text
from common.tokenizer.training import TRAINERS
from tools import make_vocab, train_tokenizer

TEXTS = [
    "她说：你好，world！ 世界。", "第二行，2019年３月。", 
    "黛玉道：“宝玉，你来了？”宝玉笑道：“来了，来了。”",
    "To be, or not to be: that is the question.", "寒来暑往，秋收冬藏；闰余成岁，律吕调阳。",
]  # fmt: skip
ODD = ["", " ", "  a  b ", "a\nb\tc", "龘😀\U00020000", "①２ﬁ", "<unk>x", "她" * 50]


@pytest.fixture(scope="module", params=sorted({*TRAINERS, "tokenizer.json", "words"}))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of each kind, trained on the texts."""
    folder, kind = tmp_path_factory.mktemp("kind"), request.param
    if kind == "tokenizer.json":
        write_json(folder)
        return folder
    if kind == "words":
        pytest.importorskip("rjieba", reason="the extra chinese is not installed")
        words = ["宝玉", "来", "了", "黛玉", "world", "她", "说", "：", "，", "##ld", "wor", "2"]
        (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *words]), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text('{"word_segmenter": "jieba"}')
        return folder
    if "Sentence" in kind:
        pytest.importorskip("sentencepiece", reason="the extra chinese is not installed")
    for name, content in TRAINERS[kind](lambda: TEXTS * 3, 330).items():
        (folder / name).write_bytes(content)
    if kind == "BertWordPieceCase":
        (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    return folder


def write_json(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer as Model, decoders, models, pre_tokenizers, trainers

    model, byte_level = Model(models.BPE()), pre_tokenizers.ByteLevel
    cut = pre_tokenizers.Split(Regex(r"\p{N}|[^\p{N}]+"), "isolated")  # not as GPT-2 cuts
    bytes_only = byte_level(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_only])
    model.decoder = decoders.ByteLevel()
    marks, alphabet = ["<|im_end|>", "<eos>"], byte_level.alphabet()
    options = {"vocab_size": 300, "special_tokens": marks, "initial_alphabet": alphabet}
    model.train_from_iterator(TEXTS, trainers.BpeTrainer(**options, show_progress=False))
    model.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def library_ids(folder: Path, kind: str, text: str) -> list[int]:
    """Ids by the library that the kind is of, with none of our code."""
    if (folder / "tokenizer.model").exists():
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        return model.encode(text)
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer as Model

        model = Model.from_file(str(folder / "tokenizer.json"))
        model.encode_special_tokens = True
        return model.encode(text, add_special_tokens=False).ids
    if (folder / "merges.txt").exists():
        from tokenizers import ByteLevelBPETokenizer

        names = ("vocab.json", "merges.txt")
        return ByteLevelBPETokenizer(*(str(folder / name) for name in names)).encode(text).ids
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {"do_lower_case": kind == "BertWordPieceLowerCase"}
    if kind == "BertWordLevel":
        settings, text = {"tokenize_chinese_chars": False}, cut_words(text)
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"), **settings)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def cut_words(text: str) -> str:
    """GPT2-Chinese's steps, with the other library that cuts words."""
    import rjieba

    apart = "".join(f" {char} " if char.isdigit() else char for char in text)
    return " ".join(word.strip() for word in rjieba.cut(apart))


def test_ids_and_text_are_those_of_the_library(folder: Path) -> None:
    tokenizer = load_tokenizer("AutoTokenizer", folder)
    assert isinstance(tokenizer, Tokenizer)
    rows = [row.tolist() for row in tokenizer.encode_packed([*TEXTS, *ODD]).rows()]
    assert rows == [library_ids(folder, tokenizer.kind, text) for text in [*TEXTS, *ODD]]
    assert rows == [tokenizer.encode(text).tolist() for text in [*TEXTS, *ODD]]
    if not tokenizer.kind.startswith("Bert"):  # which changes white space and case
        assert [tokenizer.decode(row) for row in rows] == [*TEXTS, *ODD]
    mark = next(text for text, token in tokenizer.special.items() if token == tokenizer.eod_id)
    assert tokenizer.eod_id in encode_prompt(tokenizer, f"她{mark}说").tolist()
    assert tokenizer.eod_id not in tokenizer.encode(f"她{mark}说").tolist()
    with pytest.raises(TokenizerError, match="is outside 0"):
        tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(TokenizerError, match=r"character 1 .line 1.: the surrogate"):
        tokenizer.encode("她\udc00")


def test_text_comes_in_whole_characters(folder: Path) -> None:
    """One id at a time, behind each prompt: never a part of a character, and all of the text."""
    tokenizer = load_tokenizer(None, folder)
    for text in (TEXTS[0], "龘😀\U00020000她x", "a  b"):
        ids = tokenizer.encode(text).tolist()
        whole = tokenizer.decode(ids)
        for cut in range(len(ids)):
            stream = tokenizer.stream(ids[:cut])
            parts = [stream([each]) for each in ids[cut:]] + [stream([], final=True)]
            behind = "".join(parts)
            assert whole_text(tokenizer, ids[:cut]) + behind == whole
            assert not any("\ufffd" in part for part in parts)
        halves = tokenizer.stream()
        assert halves(ids, final=True) == whole


def test_transformers_opens_what_is_exported(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(None, folder)
    record = {"folder": str(folder), "kind": tokenizer.kind, "sha256": tokenizer.sha256}
    for name, content in files_of(read_tokenizer(record), 1024).items():
        with atomic_write(tmp_path / name) as file:
            file.write(content)
    again = load_tokenizer(None, tmp_path)
    assert (again.kind, again.sha256) == (tokenizer.kind, tokenizer.sha256)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.model_max_length == 1024 and len(theirs) == tokenizer.vocab_size
    for text in [*TEXTS, "  a  b ", "龘😀"]:
        # it has no words: they are given apart
        shown = cut_words(text) if tokenizer.kind == "BertWordLevel" else text
        ids = theirs(shown, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer.encode(text).tolist()
    (folder / "later").mkdir(exist_ok=True)
    with pytest.raises(TokenizerError, match="is not what the run recorded"):
        read_tokenizer(record | {"sha256": "0" * 64})


WITHOUT_END = '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
SPECIALS = "\n".join(SPECIAL)


def test_names_of_other_systems() -> None:
    names = ("GPT2Tokenizer", "BertTokenizer", "GPTSentencePieceTokenizer", "PreTrainedTokenizerFast")
    kinds = ("GPT2BPETokenizer", "BertWordPieceLowerCase", "SentencePieceTokenizer", "HuggingFaceTokenizer")
    assert tuple(map(kind_named, names)) == kinds


@pytest.mark.parametrize(
    ("kind", "file", "content", "message"),
    [
        (None, "readme.md", "x", "no vocabulary: looked for vocab.json with merges.txt"),
        (None, "tokenizer.json", "{}", "not a tokenizer.json"),
        (None, "x.model", "no model", "not a SentencePiece model"),
        (None, "tokenizer.json", WITHOUT_END, "has no token that ends a document"),
        ("HuggingFaceTokenizer", "vocab.txt", SPECIALS, r"eeds tokenizer\.json there"),
        ("Bert", "vocab.txt", SPECIALS, "'Bert' is not known; did you mean Bert"),
    ],
)
def test_files_that_are_not_a_tokenizer(tmp_path, kind, file, content, message) -> None:
    if file == "x.model":
        pytest.importorskip("sentencepiece", reason="the extra chinese is not installed")
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(kind, tmp_path)


def test_a_library_that_is_not_there_or_broken_is_named(tmp_path, monkeypatch, break_package) -> None:
    for number, name in enumerate(("a.model", "vocab.txt")):
        monkeypatch.setitem(sys.modules, ("sentencepiece", "rjieba")[number], None)
        (tmp_path / name).write_text(SPECIALS)
        with pytest.raises(TokenizerError, match=r"is not installed; pip install -c constraints\.txt -e '\.\[chin"):
            load_tokenizer(("SentencePieceTokenizer", "BertWordLevel")[number], tmp_path / name)
        break_package(("sentencepiece", "rjieba")[number])
        with pytest.raises(TokenizerError, match=r"cannot be imported \(GLIBC_2\.38 not found\); pip install -c"):
            load_tokenizer(("SentencePieceTokenizer", "BertWordLevel")[number], tmp_path / name)


def test_a_merge_file_and_the_case_of_bert(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(SPECIALS)
    with pytest.raises(TokenizerError, match="has no merges"):
        load_tokenizer("BertTokenizer", tmp_path / "vocab.txt", tmp_path / "vocab.txt")
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert load_tokenizer(None, tmp_path).kind == "BertWordPieceCase"


# ---- vocabularies and tokenizers of own text: they cover it, give it back, and the same text gives the same files ----


ROOT = Path(__file__).resolve().parents[3]
OWN = [
    "她说：你好，world！Unaffable 世界。\n第二行，2019年３月。",
    "黛玉道：“宝玉，你来了？”宝玉笑道：“来了，来了。”",
    "To be, or not to be: that is the question.  Naïve café ﬁn.",
    "寒来暑往，秋收冬藏；闰余成岁，律吕调阳。龘 한국어 カタカナ 豈 😀",
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "train.json"
    path.write_text(json.dumps(OWN * 3, ensure_ascii=False), encoding="utf-8")
    return path


@pytest.mark.parametrize("cased", [False, True])
def test_a_vocabulary_of_all_characters_knows_every_text(corpus, tmp_path, cased) -> None:
    target = tmp_path / "cache" / "vocab.txt"
    words = ["--raw_data_path", str(corpus), "--vocab_file", str(target), "--vocab_size", "500"]
    assert make_vocab.main([*words, *(["--cased"] if cased else [])]) == 0
    lines = target.read_text(encoding="utf-8").splitlines()
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertTokenizer(str(target), do_lower_case=not cased)
    counts = Counter(token for text in OWN for token in theirs.tokenize(text))
    expected = sorted(counts, key=lambda token: (-counts[token], token))
    assert lines == ["[SEP]", "[CLS]", "[MASK]", "[PAD]", "[UNK]", *expected]
    ours = load_tokenizer("BertWordPieceCase" if cased else "BertWordPieceLowerCase", target)
    for text in OWN:
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
    assert all(tokenizer.unknown_id not in tokenizer.encode(text) for text in OWN)
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
    assert kind.startswith("Bert") or [tokenizer.decode(tokenizer.encode(text)) for text in OWN] == OWN


def test_options_that_cannot_be(corpus, tmp_path, capsys) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    train = ["--output-folder", str(tmp_path / "out")]
    sized = [*train, "--input", str(corpus), "--vocab-size"]
    make = ["--vocab_file", str(tmp_path / "out" / "vocab.txt"), "--raw_data_path"]
    for main, words, said in (
        (train_tokenizer.main, [*sized, "100"], "at least"),
        (train_tokenizer.main, [*sized, "300", "--type", "Word"], "--type Word: ex"),
        (train_tokenizer.main, [*train, "--input", str(empty), "--vocab-size", "300"], "is empty"),
        (make_vocab.main, [*make, str(tmp_path)], "Is a directory; give the path of a file"),
        (make_vocab.main, [*make, str(corpus), "--vocab_size", "0"], "expected 1 or more"),
        (make_vocab.main, ["--vocab_file", str(corpus), "--raw_data_path", str(corpus)], "choose"),
    ):
        assert main(words) == 2
        message = capsys.readouterr().err
        assert said in message and message.count("error:") == 1
    assert not (tmp_path / "out").exists()
    empty.write_text("她说：你好。" * 20, encoding="gbk")
    assert make_vocab.main([*make, str(empty), "--encoding", "gbk"]) == 0
    assert "她" in (tmp_path / "out" / "vocab.txt").read_text(encoding="utf-8")
    pytest.importorskip("sentencepiece", reason="the extra chinese is not installed")
    assert train_tokenizer.main([*sized, "280", "--type", "SentencePieceTokenizer"]) == 2
    assert capsys.readouterr().err.rstrip().endswith(" Increase vocab_size")
