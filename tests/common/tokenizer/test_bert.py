"""BERT's tokenizer: ids of transformers' BertTokenizer, and text of ids as GPT2-Chinese's generate.py prints it."""

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from common.errors import TokenizerError
from common.tokenizer import load_tokenizer
from common.tokenizer.bert import SPECIAL
from common.tokenizer.text_tokenizer import encode_documents, encode_prompt

transformers = pytest.importorskip("transformers")

TOKENS = [
    *SPECIAL, *"她说你好，。：！a1", "hello", "world", "un", "##aff", "##able", "##ing", "play",
    "é", "naive", "##e", "[", "]",
]  # fmt: skip
TEXTS = [
    "", " ", "她说：你好。", "她 说\t你\u3000好", "Hello WORLD, playing", "naïve Naive é e\u0301",
    "unaffable她unaffable", "\u00a0a\u200bb\u0000c\ufffd", "她\u0301说", "ＡＢＣ１２３", "豈更車",
    "한국어 カタカナ", "[CLS] 她[SEP]", "İstanbul ẞ ſ", "a" * 101 + " " + "a" * 99,
    "\u2028her\u2029", "Ǆ ﬁ ½ ①", "\U00020000\U0002ceaf\U0002ebf0", "😀她", "0x12，3.14%",
    "\r\n\x0b\x0c\x85",
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(TOKENS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Characters of several scripts, every third Chinese one, and pieces of words, as in GPT2-Chinese's."""
    letters = [chr(point) for point in (*range(0x21, 0x600), *range(0x3041, 0x3100))]
    letters = [letter for letter in letters if letter.isprintable() and not letter.isspace()]
    pieces = ["##" + letter for letter in letters] + ["##ing", "##un", "the", "world", "ab"]
    ideographs = [*map(chr, range(0x4E00, 0x9FA6, 3)), *"，。！？“”：；、《》"]
    path = tmp_path_factory.mktemp("large") / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, *letters, *pieces, *ideographs]), encoding="utf-8")
    return path


LOWER, CASED = "BertWordPieceLowerCase", "BertWordPieceCase"


def fast(file: Path, kind: str) -> Any:
    """Its backend, in which marks that text spells are text, as in ours."""
    backend = transformers.BertTokenizer(str(file), do_lower_case=kind == LOWER).backend_tokenizer
    backend.encode_special_tokens = True
    return backend


def ids_of(backend: Any, texts: list[str]) -> list[list[int]]:
    return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.mark.parametrize("kind", [LOWER, CASED])
def test_ids_of_odd_texts(vocabulary: Path, kind: str) -> None:
    tokenizer, theirs = load_tokenizer(kind, vocabulary), fast(vocabulary, kind)
    for repeated in (TEXTS, TEXTS[::-1]):  # the second time from the memory of words
        rows = [row.tolist() for row in tokenizer.encode_packed(repeated).rows()]
        assert rows == ids_of(theirs, repeated)
    assert [tokenizer.encode(text).tolist() for text in TEXTS] == ids_of(theirs, TEXTS)
    spelled = "[CLS]她[SEP]说[MASK]"
    marked = transformers.BertTokenizer(str(vocabulary))(spelled, add_special_tokens=False)
    assert tokenizer.encode(spelled, allow_special=True).tolist() == marked["input_ids"]


@pytest.mark.parametrize(
    ("kind", "forms", "step"),
    [
        (LOWER, ["a{}中b{}d"], 50),
        *(
            pytest.param(kind, [" {} ", "a{}中b{}d"], step, marks=mark)
            for kind in (LOWER, CASED)
            for step, mark in ((11, pytest.mark.long), (1, pytest.mark.campaign))
        ),
    ],
)
def test_ids_of_every_code_point(large, kind, forms, step) -> None:
    """Alone, and between a letter, a Chinese character and a space. step: among those unassigned or alike."""
    tokenizer, theirs = load_tokenizer(kind, large), fast(large, kind)
    numbers = (*range(0xD800), *range(0xE000, 0x110000))
    points = [chr(point) for point in numbers if point % step == 0 or not _is_alike(point)]
    for form in forms:
        texts = [
            " ".join(form.replace("{}", each) for each in points[first : first + 64])
            for first in range(0, len(points), 64)
        ]
        rows = zip(texts, tokenizer.encode_packed(texts).rows(), ids_of(theirs, texts), strict=True)
        wrong = [text for text, ours, expected in rows if ours.tolist() != expected]
        assert not wrong, [hex(ord(char)) for char in wrong[0]][:80]


OF_GPT2_CHINESE = ("vocab", "vocab_all", "vocab_guwen", "vocab_small")


@pytest.mark.parametrize("name", [None, *(pytest.param(name, marks=pytest.mark.campaign) for name in OF_GPT2_CHINESE)])
def test_ids_of_a_novel(large, chinese, name, request) -> None:
    file, chapters = large, chinese
    if name is not None:
        data = request.getfixturevalue("real_data")
        chapters = json.loads((data / "corpora/zh/train.json").read_text("utf-8"))[::12]
        file = data / "vocab" / "gpt2-chinese" / f"{name}.txt"
    tokenizer = load_tokenizer("BertTokenizer", file)
    rows = [row.tolist() for row in tokenizer.encode_packed(chapters).rows()]
    assert rows == ids_of(fast(file, LOWER), chapters)


def _is_alike(point: int) -> bool:
    ranges = ((0x3500, 0x9F00), (0xAC10, 0xD700), (0x20010, 0x2A600))
    return unicodedata.category(chr(point)) in ("Cn", "Co") or any(first <= point < last for first, last in ranges)


def spoken(tokens: list[str]) -> str:
    """GPT2-Chinese's generate.py: spaces between words of Latin letters, marks as line ends."""
    words = [
        f"{token} " if _is_word(token) and _is_word(following) else token
        for token, following in zip(tokens, [*tokens[1:], ""], strict=True)
    ]
    marks = {"[MASK]": "", "[CLS]": "\n\n", "[SEP]": "\n"}
    return "".join(marks.get(word, word) for word in words).replace("##", "")


def _is_word(token: str) -> bool:
    return bool(re.fullmatch("[a-z]+", token))


@pytest.mark.parametrize(
    "words",
    [
        "[MASK] 她 说 ： 你 好 。 [SEP] 你 hello world ， [CLS] 她",
        "un ##aff ##able 她 play ##ing 她 hello [SEP] hello",
        "play hello [CLS] hello",
    ],
)
def test_text_of_ids_is_that_of_generate(vocabulary: Path, words: str) -> None:
    tokenizer = load_tokenizer(None, vocabulary)
    tokens = words.split()
    ids = [TOKENS.index(token) for token in tokens]
    expected = spoken(tokens)
    assert tokenizer.decode(ids) == expected
    for cut in range(len(ids)):  # as it comes, behind any prompt
        stream = tokenizer.stream(ids[:cut])
        parts = [stream([each]) for each in ids[cut:]]
        whole = tokenizer.stream(ids[:cut])
        assert "".join(parts) == whole(ids[cut:], final=True)
        assert expected.endswith("".join(parts).lstrip(" "))


def test_english_keeps_its_spaces_and_parts_of_words_have_none(vocabulary: Path) -> None:
    tokenizer = load_tokenizer(None, vocabulary)
    ids = tokenizer.encode("hello unaffable world playing 她 说 1 a")
    assert tokenizer.decode(ids) == "hello unaffable world playing她说1 a"


def test_line_ends_are_marks_in_documents_and_prompts(vocabulary: Path) -> None:
    tokenizer = load_tokenizer(None, vocabulary)
    texts = ["她\n说\n", "", "\n", "你好", "a\n\nb"]
    theirs = transformers.BertTokenizer(str(vocabulary))
    expected = [theirs(text.replace("\n", " [SEP] "), add_special_tokens=False)["input_ids"] for text in texts]
    assert [row.tolist() for row in encode_documents(tokenizer, texts).rows()] == expected
    assert [encode_prompt(tokenizer, text).tolist() for text in texts] == expected
    assert encode_prompt(tokenizer, "[MASK]她\n").tolist() == [4, TOKENS.index("她"), 3]
    assert (tokenizer.framing.prefix, tokenizer.framing.suffix) == ((4,), (2,))
    assert tokenizer.eod_id == 2 and tokenizer.unknown_id == 1


def test_the_digest_is_of_the_ids(vocabulary: Path) -> None:
    tokenizer = load_tokenizer("BertTokenizerFast", vocabulary)
    cased = load_tokenizer("BertWordPieceCase", vocabulary)
    assert cased.sha256 != tokenizer.sha256, "other ids for the same text"
    crlf = vocabulary.with_name("crlf.txt")
    crlf.write_bytes("\r\n".join(TOKENS).encode("utf-8-sig"))
    assert load_tokenizer(None, crlf).sha256 == tokenizer.sha256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("她\n说\n".encode(), r"its 2 lines lack the special tokens \[PAD\] \[UNK\]"),
        ("\n".join([*TOKENS, "她"]).encode(), r"line 28: the token '她' stands on line 6 already"),
        ("\n".join([*TOKENS, "她们", "他们"]).encode("gbk", "ignore"), "it may be GBK, convert it"),
        (b'{"a": 1}', "is JSON, expected one token a line"),
    ],
)
def test_a_broken_vocabulary_is_one_message(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"vocab\.txt.*{message}"):
        load_tokenizer("BertTokenizer", tmp_path / "vocab.txt")
