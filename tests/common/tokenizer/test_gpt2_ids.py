"""The ids are those of tiktoken and of Hugging Face tokenizers, on every text."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from common.tokenizer.bpe_backends import _BEYOND, _BMP, _BORDER, is_disputed
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer

Encode = Callable[[str], list[int]]
ROOT = Path(__file__).resolve().parents[3]
TEXTS = ("plays", "novel", "pages")
CORPORA = [
    *("en/eltec_eng.txt", "en/state_union.txt", "en/tinyshakespeare.txt", "en/wikitext2_valid.txt"),
    *("zh/poet.tang.0.json", "zh/tang.txt", "zh/train.json", "zh/红楼梦.txt"),
]
ODD_TEXTS = (
    "", " ", "\n", "😀 👩‍👩‍👧‍👦🇬🇧 ❤️ 1️⃣ x😀y",
    "".join(map(chr, range(0x20))) + "\x7f" + "".join(map(chr, range(0x80, 0xA1))),
    "\u2028\u2029\u200b\u200d\u202e\u3000\ufeff\ufffd\uffff\U0010ffff\ue000 \u180e x\u1680",
    "it's IT'S we'll'd ''ve 's' 'tis ’s",
    "  a   b \t c\t\td \r\n\r\n e\n\n\n  f  ",
    "x1y²z½ Ⅷ٣٤ 3.14e-10 1,000,000",
    "<|endoftext|> a<|endoftext|><|endoftext|",
    "中文,字符。 日本語カタカナ 한국어 𠀀𠮷 עברית العربية हिन्दी ไทย",
)  # fmt: skip


def same(found: np.ndarray, expected: list[int]) -> bool:
    return np.array_equal(found, np.array(expected, dtype=np.int64))


@pytest.mark.parametrize("text", ODD_TEXTS, ids=range(len(ODD_TEXTS)))
def test_odd_texts(tokenizer, tiktoken_ids, huggingface_ids, text) -> None:
    expected = tiktoken_ids(text)
    assert expected == huggingface_ids(text)
    assert same(tokenizer.encode(text), expected)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", TEXTS)
def test_start_of_texts(tokenizer, tiktoken_ids, huggingface_ids, english, chinese, name) -> None:
    """pages: README and docs in both languages, with their code, tables and links."""
    slow = tokenizer.backend == "tokenizers"
    texts = {"plays": english, "novel": "".join(chinese)}
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    text = texts.get(name) or "".join(path.read_text(encoding="utf-8") for path in pages)
    text = text[: 125_000 if slow else 250_000]
    expected = tiktoken_ids(text)
    if slow:
        assert expected == huggingface_ids(text)  # the oracles need comparing once
    assert same(tokenizer.encode(text), expected)
    assert tokenizer.decode(expected) == text
    lines = text.splitlines(keepends=True)[:200]
    for line, ids in zip(lines, tokenizer.encode_packed(lines).rows(), strict=True):
        assert same(ids, tiktoken_ids(line))


@pytest.mark.campaign
@pytest.mark.parametrize("name", CORPORA)
def test_whole_corpora(tokenizer, tiktoken_ids, real_data, name) -> None:
    text = (real_data / "corpora" / name).read_text(encoding="utf-8")
    documents = text.split("<|endoftext|>")
    for document, ids in zip(documents, tokenizer.encode_packed(documents).rows(), strict=True):
        assert same(ids, tiktoken_ids(document))
        assert tokenizer.decode(ids) == document


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_characters_have_the_same_class(tokenizer, huggingface_ids, every) -> None:
    """Only gigatoken takes U+10955 for a letter, and so "'d" after it for a contraction. If every
    character fails, a library has moved to another Unicode release: extend _BMP and _RANGES.
    """
    ranges = [(0, 0xD7FF), (0xE000, 0x10FFFF)]
    if not every:
        ranges = [(first - 1, last + 1) for first, last in (*((ord(char), ord(char)) for char in _BMP), *_BEYOND)]
    points = [chr(point) for first, last in ranges for point in range(first, last + 1)]
    probes = [f"a{point}'d{point}1 {point}{point} b" for point in points]
    found = zip(probes, tokenizer.encode_packed(probes).rows(), strict=True)
    assert [ascii(each) for each, ids in found if ids.tolist() != huggingface_ids(each)] == []


def test_a_disputed_character_in_a_batch(tokenizer: GPT2BPETokenizer, tiktoken_ids: Encode) -> None:
    batch = ["plain", "\U00010955's", "é", "\ua7ce'd \U000323b0'll", "", "\U0001f600's"]
    expected = [tiktoken_ids(text) for text in batch]
    assert [ids.tolist() for ids in tokenizer.encode_packed(batch).rows()] == expected
    assert [tokenizer.encode(text).tolist() for text in batch] == expected
    assert [is_disputed(text) for text in batch] == [False, True, False, True, False, False]


# Any character, and far more often than chance those at which the pattern of GPT-2 cuts.
borders = st.sampled_from("\U00010955\ua7ce\U000323b0 \t\n\r\x1c\x85\xa0\u3000'sltdvremaZ09²½中é!-😀\u0301")
texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), borders), max_size=200)
quick = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(batch=st.lists(texts, max_size=8))
def test_any_texts_alone_and_in_a_batch(tokenizer: GPT2BPETokenizer, tiktoken_ids: Encode, batch: list[str]) -> None:
    expected = [list(tiktoken_ids(text)) for text in batch]
    assert [tokenizer.encode(text).tolist() for text in batch] == expected
    packed = tokenizer.encode_packed(batch)
    assert [ids.tolist() for ids in packed.rows()] == expected
    assert packed.ids.tolist() == [token for ids in expected for token in ids]
    assert packed.lengths.tolist() == [len(ids) for ids in expected]
    assert packed.ids.dtype == np.int32 and packed.offsets.dtype == np.int64
    assert [tokenizer.decode(ids) for ids in expected] == batch


@functools.cache
def long_text(name: str) -> str:
    draw, size = random.Random(0), 1_000_000
    make = {
        "one letter": lambda: "a" * size,
        "letters": lambda: "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=size)),
        "Chinese": lambda: "".join(chr(draw.randrange(0x4E00, 0x9FA6)) for _ in range(size // 3)),
        "marks": lambda: "-" * (size // 2) + "".join(draw.choices("!?.-=*", k=size // 2)),
        "spaces": lambda: " " * size,
        "spaces, a word": lambda: " " * size + "x",
        "lines, a word, spaces": lambda: "\n" * size + "word" + "\u3000" * (size // 2) + " y",
    }
    return make[name]()


@pytest.fixture(scope="module")
def oracle_of_long_text(huggingface_ids: Encode) -> Callable[[str], np.ndarray]:
    """Hugging Face's ids: its merges use a heap, its lexer does not backtrack. Made once for the three backends."""
    return functools.cache(lambda name: np.array(huggingface_ids(long_text(name))))


LONG = ["letters", "Chinese", "spaces, a word"]
LONGER = [
    pytest.param(name, marks=pytest.mark.campaign)
    for name in ("one letter", "marks", "spaces", "lines, a word, spaces")
]


@pytest.mark.parametrize("name", [*LONG, *LONGER])
def test_a_megabyte_without_a_border(tokenizer, oracle_of_long_text, name) -> None:
    """Completes at all (quadratic code takes minutes here; tiktoken panics on the white space) and is exact."""
    text = long_text(name)
    oracle, began = oracle_of_long_text(name), time.monotonic()
    assert np.array_equal(tokenizer.encode_packed(["x", text]).rows()[1], oracle)
    if name == "spaces, a word" and tokenizer.backend != "tokenizers":
        assert np.array_equal(tokenizer.encode(text), oracle)
    assert time.monotonic() - began < 240


def test_texts_that_hold_the_border_between_texts(tokenizer, tiktoken_ids) -> None:
    """tiktoken gets many texts in one call, with a border between them; a text may hold that border."""
    texts = ["a", "", f"b{_BORDER}c", _BORDER, "d " * 5, "", _BORDER[:-1], _BORDER[1:]]
    for some in (texts, texts[:2], texts[4:]):
        for text, ids in zip(some, tokenizer.encode_packed(some).rows(), strict=True):
            assert ids.tolist() == list(tiktoken_ids(text)), text
