"""SentencePiece models, tokenizer.json and words against their libraries. Kinds are told from
files; what opens in transformers.
"""

import sys
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
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}'
    )


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
            parts = [stream.push([each]) for each in ids[cut:]] + [stream.push([], final=True)]
            behind = "".join(parts)
            assert whole_text(tokenizer, ids[:cut]) + behind == whole
            assert not any("\ufffd" in part for part in parts)
        halves = tokenizer.stream()
        assert halves.push(ids, final=True) == whole


def test_marks_in_a_prompt_are_tokens_and_in_a_corpus_are_text(folder: Path) -> None:
    tokenizer = load_tokenizer(None, folder)
    marks = {"SentencePieceTokenizer": "</s>", "HuggingFaceTokenizer": "<|im_end|>"}
    is_bert = tokenizer.kind.startswith("Bert")
    mark = "[CLS]" if is_bert else marks.get(tokenizer.kind, "<|endoftext|>")
    assert tokenizer.eod_id in encode_prompt(tokenizer, f"她{mark}说").tolist()
    assert tokenizer.eod_id not in tokenizer.encode(f"她{mark}说").tolist()


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
    names = ("GPT2Tokenizer", "BertTokenizer", "BertWordPieceCase", "LlamaTokenizer")
    kinds = ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
    assert tuple(map(kind_named, names)) == (*kinds, "SentencePieceTokenizer")
    assert kind_named("GPTSentencePieceTokenizer") == "SentencePieceTokenizer"
    assert kind_named("PreTrainedTokenizerFast") == "HuggingFaceTokenizer"


@pytest.mark.parametrize(
    ("kind", "file", "content", "message"),
    [
        (None, "readme.md", "x", "no vocabulary: looked for vocab.json with merges.txt"),
        (None, "tokenizer.json", "{}", "not a tokenizer.json"),
        (None, "tokenizer.json", "她", "not JSON"),
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


@pytest.mark.parametrize(
    ("library", "kind", "name"),
    [("sentencepiece", "SentencePieceTokenizer", "a.model"), ("rjieba", "BertWordLevel", "vocab.txt")],
)
def test_a_library_that_is_not_there_is_named(tmp_path, monkeypatch, library, kind, name) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / name).write_text(SPECIALS)
    message = r"install it with: pip install -c constraints\.txt -e '\.\[chinese\]'"
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(kind, tmp_path)


def test_a_merge_file_and_the_case_of_bert(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(SPECIALS)
    with pytest.raises(TokenizerError, match="has no merges"):
        load_tokenizer("BertTokenizer", tmp_path / "vocab.txt", tmp_path / "vocab.txt")
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert load_tokenizer(None, tmp_path).kind == "BertWordPieceCase"
