"""Libraries that can run GPT-2's byte-level BPE, and the choice of the fastest one that is exact.

``tokenizers`` follows the merge list literally and is the reference. ``tiktoken`` and ``gigatoken`` are faster and are
compared with it when they are loaded. They leave to it the few characters on which libraries of different Unicode
releases disagree.

GPT-2's pattern asks whether a character is a letter, a digit or neither. Unicode 17.0 made letters and digits of 4,657
code points that 16.0 leaves unassigned. gigatoken 0.10 knows 17.0; tiktoken 0.13 and 0.14 and tokenizers 0.23 know
16.0. A comparison of the three on every code point found these; they agree on all others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.errors import TokenizerError
from common.interrupts import holding_signals
from common.tokenizer.base import Ids, PackedIds
from common.tokenizer.bpe_files import END_OF_TEXT, BPEVocabulary

# Content hash of the vocabulary that OpenAI published. It is known to pass the checks of other vocabularies.
GPT2_SHA256 = "c1e3cefd7c3749b320b1b08696e30ba187c23910de15ef8e5a33c6ee460e93e5"

# The pattern of openai/gpt-2 src/encoder.py in tiktoken's form, with possessive repeats. Both cut
# every text at the same places.
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# `\s+(?!\S)` backtracks one frame a character: tiktoken 0.13 and 0.14 panic between 900,000 and 1,000,000 of them.
_LONG_SPACE = re.compile(r"(?<!\s)\s{200000}")

# Stands between the texts of one call. Texts that hold it are encoded one by one.
_BORDER = "<|\x00border between texts\x00|>"


class Backend(Protocol):
    """Encoder of ordinary text, without special tokens.

    Raises TypeError or UnicodeError for a lone surrogate.
    """

    name: str

    def encode_one(self, text: str) -> Ids: ...
    def encode_many(self, texts: list[str]) -> PackedIds: ...


class _PassedOver(Exception):
    """This backend cannot serve this vocabulary here. The message says why and what to do."""


def pack(rows: Sequence[Sequence[int]] | Sequence[Ids]) -> PackedIds:
    """Return the ids of several texts in one buffer."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)), out=offsets[1:])
    if rows and isinstance(rows[0], np.ndarray):
        return PackedIds(ids=np.concatenate(rows), offsets=offsets)
    ids = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1]))
    return PackedIds(ids=ids, offsets=offsets)


class _Tokenizers:
    """Hugging Face tokenizers: exact for any merge list."""

    name = "tokenizers"

    def __init__(self, vocabulary: BPEVocabulary) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        self.model = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=list(vocabulary.merges)))
        self.model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    def encode_one(self, text: str) -> Ids:
        return np.array(self.model.encode(text).ids, dtype=np.int32)

    def encode_many(self, texts: list[str]) -> PackedIds:
        return pack([encoding.ids for encoding in self.model.encode_batch_fast(texts)])


class _Tiktoken:
    """tiktoken built from the local files; its own loaders would download them.

    It joins any two neighbours whose bytes are a token, while BPE requires a listed pair. The two
    agree on a vocabulary that was trained as BPE (see ``_check_ranks``).
    """

    name = "tiktoken"

    def __init__(self, vocabulary: BPEVocabulary, exact: _Tokenizers) -> None:
        from tiktoken import Encoding

        self._exact = exact
        if vocabulary.content_sha256 != GPT2_SHA256:
            _check_ranks(vocabulary, exact)
        # Keep tokens that no merge makes (added by hand) from tiktoken. It would produce them from ordinary text.
        made = {left + right for left, right in vocabulary.merges}
        ranks = {
            vocabulary.token_bytes[token_id]: token_id
            for token, token_id in vocabulary.ids.items()
            if len(token) == 1 or token in made
        }
        self._border = len(vocabulary.token_bytes)  # an id that no text has
        self._encoding = Encoding(
            "gpt2-local", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={_BORDER: self._border}
        )

    def encode_one(self, text: str) -> Ids:
        if len(text) >= 200_000 and _LONG_SPACE.search(text):
            return self._exact.encode_one(text)
        return self._encode(text, frozenset())

    def encode_many(self, texts: list[str]) -> PackedIds:
        """Encode all texts in one call, with a special token between them, which is twice as fast.

        tiktoken encodes the text between special tokens separately.
        """
        joined = _BORDER.join(texts)
        is_long = max(map(len, texts), default=0) >= 200_000
        if is_long or joined.count(_BORDER) != len(texts) - 1:
            return pack(list(map(self.encode_one, texts)))
        ids = self._encode(joined, frozenset({_BORDER}))
        borders = np.flatnonzero(ids == self._border)
        ends = np.append(borders - np.arange(len(borders)), len(ids) - len(borders))
        return PackedIds(ids=np.delete(ids, borders), offsets=np.insert(ends, 0, 0))

    def _encode(self, text: str, allowed: frozenset[str]) -> Ids:
        if not text.isascii():
            text.encode()  # raises for a lone surrogate, which tiktoken would replace silently
        return _as_int32(self._encoding.encode_to_numpy(text, allowed_special=allowed, disallowed_special=()))


def _check_ranks(vocabulary: BPEVocabulary, exact: _Tokenizers) -> None:
    """Reject a vocabulary on which joining by rank could differ from joining by listed pairs.

    Three conditions make them equal: ids rise in merge order, parts come before what they make, and BPE turns every
    made token into itself. Take two neighbours whose bytes spell a token t. The merges ranked before t have made them,
    inside their own borders. The last step towards t is a single listed pair, so the two neighbours are that pair.
    """
    advice = "use backend='tokenizers' for this vocabulary"
    rank = {token: -1 for token in vocabulary.ids if len(token) == 1}
    before = -1
    for left, right in vocabulary.merges:
        token, token_id = left + right, vocabulary.ids[left + right]
        if token in rank or token_id <= before:
            raise _PassedOver(
                f"the ids do not follow the order of the merges at {left + ' ' + right!r} (id {token_id}); {advice}"
            )
        if left not in rank or right not in rank:
            raise _PassedOver(
                f"the merge {left + ' ' + right!r} comes before a merge that makes one of its parts; {advice}"
            )
        rank[token] = before = token_id
    exact_pre_tokenizer = exact.model.pre_tokenizer
    # the merges get the spelling in the byte alphabet unchanged
    exact.model.pre_tokenizer = None
    try:
        for token in (token for token, token_id in rank.items() if token_id >= 0):
            if exact.model.encode(token).ids != [rank[token]]:
                raise _PassedOver(f"the merges never make the token {token!r} (id {rank[token]}); {advice}")
    finally:
        exact.model.pre_tokenizer = exact_pre_tokenizer


class _Gigatoken:
    """gigatoken: a hand-written lexer and a cache of words; about twenty times tiktoken's speed.
    Linear on any input.
    """

    name = "gigatoken"

    def __init__(self, vocabulary: BPEVocabulary, exact: _Tokenizers) -> None:
        try:
            from gigatoken import Tokenizer
        except ImportError as error:
            raise _PassedOver(
                f"gigatoken is not installed ({error}); install it with: pip install gigatoken (the extra 'fast' of"
                " this project)"
            ) from None
        # The special token is left out of added_tokens: gigatoken would recognise it in ordinary text.
        self._model = Tokenizer.from_json(exact.model.to_str())

    def encode_one(self, text: str) -> Ids:
        return _as_int32(self._model.encode(text))

    def encode_many(self, texts: list[str]) -> PackedIds:
        if not texts:
            return pack([])
        # The result is an array of the package awkward. Its two buffers are used directly, so no
        # rows are built. In a worker process gigatoken uses one thread.
        layout = self._model.encode_batch(texts).layout
        return PackedIds(ids=_as_int32(layout.content.data), offsets=np.asarray(layout.offsets.data, dtype=np.int64))


class _Guarded:
    """Fast backend that passes texts with a disputed character to the exact one."""

    def __init__(self, fast: Backend, exact: Backend) -> None:
        self.name = fast.name
        self._fast = fast
        self._exact = exact

    def encode_one(self, text: str) -> Ids:
        return (self._exact if is_disputed(text) else self._fast).encode_one(text)

    def encode_many(self, texts: list[str]) -> PackedIds:
        # Search the whole batch at once: disputed characters are rare.
        if not is_disputed("".join([text for text in texts if not text.isascii()])):
            return self._fast.encode_many(texts)
        exact = {number: self._exact.encode_one(text) for number, text in enumerate(texts) if is_disputed(text)}
        rows = self._fast.encode_many(["" if number in exact else text for number, text in enumerate(texts)]).rows()
        return pack([exact.get(number, row) for number, row in enumerate(rows)])


def _as_int32(ids: npt.ArrayLike) -> Ids:
    array = np.asarray(ids)
    return array.view(np.int32) if array.dtype == np.uint32 else array.astype(np.int32)


def _prove_equal(backend: Backend, exact: Backend, vocabulary: BPEVocabulary) -> None:
    texts = [SELF_CHECK, *SELF_CHECK.split("\n")]
    if vocabulary.content_sha256 != GPT2_SHA256:
        texts.append(" ".join(raw.decode(errors="replace") for raw in vocabulary.token_bytes))
    for text, found in zip(texts, backend.encode_many(texts).rows(), strict=True):
        # one by one: tokenizers warns in every forked child once its batch calls were used
        expected = exact.encode_one(text)
        if not np.array_equal(found, expected) or not np.array_equal(backend.encode_one(text), expected):
            raise _PassedOver(
                f"{backend.name} {version(backend.name)} gives other ids than tokenizers in the"
                f" self-check for {text[:40]!r}; use backend='tokenizers' and report it"
            )


_FAST: dict[str, Callable[[BPEVocabulary, _Tokenizers], Backend]] = {"gigatoken": _Gigatoken, "tiktoken": _Tiktoken}
BACKENDS = ("auto", *_FAST, "tokenizers")


@holding_signals()  # Rust libraries load numpy in their first call, and panic at KeyboardInterrupt
def choose_backend(vocabulary: BPEVocabulary, wanted: str) -> tuple[Backend, tuple[str, ...]]:
    """Return a backend, and the reasons why faster ones were not chosen.

    wanted: its name, or "auto" for the fastest one that is installed and exact.
    Raises TokenizerError for an unknown name, or when ``wanted`` is missing or fails its check.
    """
    if wanted not in BACKENDS:
        raise TokenizerError(f"tokenizer backend {wanted!r} is not known; choose one of: {', '.join(BACKENDS)}")
    exact = _Tokenizers(vocabulary)
    reasons: list[str] = []
    for name, build in _FAST.items():
        if wanted not in ("auto", name):
            continue
        try:
            backend = _Guarded(build(vocabulary, exact), exact)
            _prove_equal(backend, exact, vocabulary)
            return backend, tuple(reasons)
        except Exception as error:  # try the next library, whatever error this one raises
            if wanted == name:
                raise TokenizerError(f"tokenizer backend {wanted!r} cannot be used: {error}") from error
            reasons.append(f"{name}: {error}")
    return exact, tuple(reasons)


_BMP = "\u088f\u0c5c\u0cdc\ua7ce\ua7cf\ua7d2\ua7d4\ua7f1"
_RANGES = """
10940-10959 10EC5-10EC7 11DB0-11DDB 11DE0-11DE9 16EA0-16EB8 16EBB-16ED3 16FF2-16FF6 187F8-187FF
18D09-18D1E 18D80-18DF2 1E6C0-1E6DE 1E6E0-1E6E2 1E6E4-1E6E5 1E6E7-1E6ED 1E6F0-1E6F4 1E6FE-1E6FF
2B73A-2B73F 2CEA2-2CEAD 323B0-33479
"""
_BEYOND = [(int(first, 16), int(last, 16)) for first, last in (each.split("-") for each in _RANGES.split())]
DISPUTED = (*((ord(char), ord(char)) for char in _BMP), *_BEYOND)
"""First and last code point of each range."""

_BORDERS = np.array([border for first, last in _BEYOND for border in (first, last + 1)], dtype=np.uint32)


SELF_CHECK = "\n".join(
    [
        "Hello world, it's I'm you're we've they'll he'd don't 'S 'T ''s 'sx 'lll x'd.",
        " gazed  two   three    four\t tab\t\ttabs \n \n\n  \r\n end of lines \n\n\n x",
        "0 12 345 6789 1e-9 3.14159 ½ ² Ⅷ ٣٤٥ ४५६ 一二三 x1y2 1a 2 b",
        "!? ... --- *** === ///// «quotes» “curly” ‘single’ it’s — – … • § © ™ € £ ¥ ₿",
        "naïve café Ångström e\u0301 Straße ŒUVRE İstanbul ıi ǅ ﬁ ǆ",
        "Ελληνικά Русский Українська עִבְרִית العربية فارسی हिन्दी বাংলা தமிழ் ไทย ລາວ မြန်မာ ქართული Հայերեն አማርኛ",
        "中文字符,日本語ひらがなカタカナ한국어 𠀀𠮷 ﾊﾝｶｸ 全角　スペース 。、「」",
        "😀😃🏽👩‍👩‍👧‍👦🇬🇧🏳️‍🌈❤️ 1️⃣ 𝒜𝓑 𝟘𝟙 ☃ a😀b",
        "".join(map(chr, range(0x21))) + "\x7f\x80\x85x\x85 \x9f\xa0x\xa0 \xad",
        "\u1680 \u180e\u2000\u2003 \u200a\u200b\u200d\u2028 \u2029\u202f\u205f\u3000x\u3000"
        " \ufeff\ufffd\uffff\U0010ffff \ue000",
        f"{END_OF_TEXT} x{END_OF_TEXT}{END_OF_TEXT} <|endoftext |>",
        "a" * 300 + " " * 300 + "x" + "-" * 300 + "中" * 100 + "\n" * 300 + "8" * 300 + " ",
        "internationalization Antidisestablishmentarianism supercalifragilisticexpialidocious qzxjkvbw ZQXJKVBW",
        "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # note\n\n\tif x!=None:\r\n\t\tpass",
    ]
)
"""Text for the comparison of two encoders, with what a hand-written lexer may get wrong: scripts,
emoji, digits, contractions, white space, control characters, long runs.
"""


def is_disputed(text: str) -> bool:
    """Return whether ``text`` holds a character of ``DISPUTED``.

    Speed: about 0.5 GB/s on text that is not ASCII; ASCII text costs nothing. Raises
    UnicodeEncodeError for a lone surrogate.
    """
    if text.isascii():
        return False
    # eight scans at the speed of memchr; a regular expression takes ten times as long
    if any(char in text for char in _BMP):
        return True
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    codes = codes[codes > 0xFFFF]
    return bool((np.searchsorted(_BORDERS, codes, side="right") % 2).any())
