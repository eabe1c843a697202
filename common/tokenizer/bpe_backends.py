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
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import TokenizerError
from common.interrupts import holding_signals
from common.paths import require_package
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


Encode = Callable[[list[str]], PackedIds]
"""Encoder of ordinary texts, without special tokens. Raises TypeError or UnicodeError for a lone surrogate."""


def pack(rows: Sequence[Sequence[int]] | Sequence[Ids]) -> PackedIds:
    """Return the ids of several texts in one buffer."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)), out=offsets[1:])
    if rows and isinstance(rows[0], np.ndarray):
        return PackedIds(ids=np.concatenate(rows), offsets=offsets)
    ids = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1]))
    return PackedIds(ids=ids, offsets=offsets)


def _encode_exactly(model: Any, texts: list[str]) -> PackedIds:
    if len(texts) == 1:  # once its batch calls were used, the library warns in every forked child
        return pack([model.encode(texts[0]).ids])
    return pack([encoding.ids for encoding in model.encode_batch_fast(texts)])


def _tiktoken(vocabulary: BPEVocabulary, model: Any) -> Encode:
    """Return tiktoken's encoder, built from the local files; its own loaders would download them.

    It joins any two neighbours whose bytes are a token, while BPE requires a listed pair. The two
    agree on a vocabulary that was trained as BPE (see ``_check_ranks``).
    """
    from tiktoken import Encoding

    if vocabulary.content_sha256 != GPT2_SHA256:
        _check_ranks(vocabulary, model)
    # Keep tokens that no merge makes (added by hand) from tiktoken. It would produce them from ordinary text.
    made = {left + right for left, right in vocabulary.merges}
    ranks = {
        vocabulary.token_bytes[token_id]: token_id
        for token, token_id in vocabulary.ids.items()
        if len(token) == 1 or token in made
    }
    border = len(vocabulary.token_bytes)  # an id that no text has
    encoding = Encoding("gpt2-local", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={_BORDER: border})

    def encode(texts: list[str]) -> PackedIds:
        """Encode all texts in one call, with a special token between them, which is twice as fast.

        tiktoken encodes the text between special tokens separately.
        """
        joined, is_one = _BORDER.join(texts), len(texts) == 1
        is_long = max(map(len, texts), default=0) >= 200_000
        if not is_one and (is_long or joined.count(_BORDER) != len(texts) - 1):
            return pack([encode([text]).ids for text in texts])
        if is_long and _LONG_SPACE.search(joined):
            return _encode_exactly(model, texts)
        if not joined.isascii():
            joined.encode()  # raises for a lone surrogate, which tiktoken would replace silently
        allowed = frozenset[str]() if is_one else frozenset({_BORDER})
        ids = _as_int32(encoding.encode_to_numpy(joined, allowed_special=allowed, disallowed_special=()))
        if is_one:  # what follows would take longer than a short text does
            return PackedIds(ids=ids, offsets=np.array([0, len(ids)]))
        borders = np.flatnonzero(ids == border)
        ends = np.append(borders - np.arange(len(borders)), len(ids) - len(borders))
        return PackedIds(ids=np.delete(ids, borders), offsets=np.insert(ends, 0, 0))

    return encode


def _check_ranks(vocabulary: BPEVocabulary, model: Any) -> None:
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
            raise TokenizerError(
                f"the ids do not follow the order of the merges at {left + ' ' + right!r} (id {token_id}); {advice}"
            )
        if left not in rank or right not in rank:
            raise TokenizerError(
                f"the merge {left + ' ' + right!r} comes before a merge that makes one of its parts; {advice}"
            )
        rank[token] = before = token_id
    pre_tokenizer = model.pre_tokenizer
    # the merges get the spelling in the byte alphabet unchanged
    model.pre_tokenizer = None
    try:
        for token, token_id in rank.items():
            if token_id >= 0 and model.encode(token).ids != [token_id]:
                raise TokenizerError(f"the merges never make the token {token!r} (id {token_id}); {advice}")
    finally:
        model.pre_tokenizer = pre_tokenizer


def _gigatoken(vocabulary: BPEVocabulary, model: Any) -> Encode:
    """Return gigatoken's encoder: a hand-written lexer and a cache of words; about twenty times tiktoken's speed.

    Linear on any input.
    """
    require_package("gigatoken", extra="fast", purpose="the fastest backend")
    from gigatoken import Tokenizer

    # The special token is left out of added_tokens: gigatoken would recognise it in ordinary text.
    fast = Tokenizer.from_json(model.to_str())

    def encode(texts: list[str]) -> PackedIds:
        if len(texts) < 2:
            return pack([_as_int32(fast.encode(text)) for text in texts])
        # The result is an array of the package awkward. Its two buffers are used directly, so no
        # rows are built. In a worker process gigatoken uses one thread.
        layout = fast.encode_batch(texts).layout
        return PackedIds(ids=_as_int32(layout.content.data), offsets=np.asarray(layout.offsets.data, dtype=np.int64))

    return encode


def _guarded(fast: Encode, exact: Encode, texts: list[str]) -> PackedIds:
    """Encode texts, those with a disputed character by the exact backend."""
    # Search the whole batch at once: disputed characters are rare.
    if not is_disputed("".join([text for text in texts if not text.isascii()])):
        return fast(texts)
    own = {number: exact([text]).ids for number, text in enumerate(texts) if is_disputed(text)}
    rows = fast(["" if number in own else text for number, text in enumerate(texts)]).rows()
    return pack([own.get(number, row) for number, row in enumerate(rows)])


def _as_int32(ids: npt.ArrayLike) -> Ids:
    array = np.asarray(ids)
    return array.view(np.int32) if array.dtype == np.uint32 else array.astype(np.int32)


def _prove_equal(name: str, encode: Encode, exact: Encode, vocabulary: BPEVocabulary) -> None:
    texts = [SELF_CHECK, *SELF_CHECK.split("\n")]
    if vocabulary.content_sha256 != GPT2_SHA256:
        texts.append(" ".join(raw.decode(errors="replace") for raw in vocabulary.token_bytes))
    for text, found in zip(texts, encode(texts).rows(), strict=True):
        expected = exact([text]).ids
        if not np.array_equal(found, expected) or not np.array_equal(encode([text]).ids, expected):
            raise TokenizerError(
                f"{name} {version(name)} gives other ids than tokenizers in the self-check for {text[:40]!r}; use"
                " backend='tokenizers' and report it"
            )


_FAST: dict[str, Callable[[BPEVocabulary, Any], Encode]] = {"gigatoken": _gigatoken, "tiktoken": _tiktoken}
BACKENDS = ("auto", *_FAST, "tokenizers")


@holding_signals()  # Rust libraries load numpy in their first call, and panic at KeyboardInterrupt
def choose_backend(vocabulary: BPEVocabulary, wanted: str) -> tuple[str, Encode]:
    """Return the name of a backend, and its encoder.

    wanted: its name, or "auto" for the fastest one that is installed and exact.
    Raises TokenizerError for an unknown name, or when ``wanted`` is missing or fails its check.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    if wanted not in BACKENDS:
        raise TokenizerError(f"tokenizer backend {wanted!r} is not known; choose one of: {', '.join(BACKENDS)}")
    model = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=list(vocabulary.merges)))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    exact = partial(_encode_exactly, model)
    for name, build in _FAST.items():
        if wanted not in ("auto", name):
            continue
        try:
            encode = partial(_guarded, build(vocabulary, model), exact)
            _prove_equal(name, encode, exact, vocabulary)
            return name, encode
        except Exception as error:  # try the next library, whatever error this one raises
            if wanted == name:
                raise TokenizerError(f"tokenizer backend {wanted!r} cannot be used: {error}") from error
    return "tokenizers", exact


_BMP = "\u088f\u0c5c\u0cdc\ua7ce\ua7cf\ua7d2\ua7d4\ua7f1"
_RANGES = """
10940-10959 10EC5-10EC7 11DB0-11DDB 11DE0-11DE9 16EA0-16EB8 16EBB-16ED3 16FF2-16FF6 187F8-187FF
18D09-18D1E 18D80-18DF2 1E6C0-1E6DE 1E6E0-1E6E2 1E6E4-1E6E5 1E6E7-1E6ED 1E6F0-1E6F4 1E6FE-1E6FF
2B73A-2B73F 2CEA2-2CEAD 323B0-33479
"""
_BEYOND = [(int(first, 16), int(last, 16)) for first, last in (each.split("-") for each in _RANGES.split())]
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
    """Return whether ``text`` holds a character of ``_BMP`` or ``_BEYOND``, on which the libraries disagree.

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
