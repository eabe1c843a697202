"""Libraries that can run GPT-2's byte-level BPE, and the choice of the fastest one that is exact.

``tokenizers`` follows the merge list literally and is the reference. ``tiktoken`` and ``gigatoken``
are faster and are compared with it when they are loaded. They leave to it the few characters on
which libraries of different Unicode releases disagree.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from common.errors import TokenizerError
from common.interrupts import holding_signals
from common.tokenizer.base import Ids, PackedIds
from common.tokenizer.bpe_files import BPEVocabulary
from common.tokenizer.unicode_drift import SELF_CHECK, is_disputed

# Content hash of the vocabulary that OpenAI published. It is known to pass the checks of other
# vocabularies.
GPT2_SHA256 = "c1e3cefd7c3749b320b1b08696e30ba187c23910de15ef8e5a33c6ee460e93e5"

# The pattern of openai/gpt-2 src/encoder.py in tiktoken's form, with possessive repeats. Both cut
# every text at the same places.
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# `\s+(?!\S)` backtracks one frame a character: tiktoken 0.13 and 0.14 panic between 900,000 and
# 1,000,000 of them.
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


def _load_library(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _PassedOver(f"{name} is not installed ({error}); install it with: pip install {install}") from None


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
        library = _load_library("tokenizers", "tokenizers")
        merges = list(vocabulary.merges)
        self.model = library.Tokenizer(library.models.BPE(vocab=vocabulary.ids, merges=merges))
        self.model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

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
        self._exact = exact
        library = _load_library("tiktoken", "'tiktoken>=0.13'")
        if (version := _version("tiktoken")) < (0, 13):
            raise _PassedOver(
                f"tiktoken {'.'.join(map(str, version))} takes minutes for 1 MB without a space;"
                " install a later one with: pip install 'tiktoken>=0.13'"
            )
        if vocabulary.content_sha256 != GPT2_SHA256:
            _check_ranks(vocabulary, exact)
        # Keep tokens that no merge makes (added by hand) from tiktoken. It would produce them from
        # ordinary text.
        made = {left + right for left, right in vocabulary.merges}
        ranks = {
            vocabulary.token_bytes[token_id]: token_id
            for token, token_id in vocabulary.ids.items()
            if len(token) == 1 or token in made
        }
        self._border = len(vocabulary.token_bytes)  # an id that no text has
        self._encoding = library.Encoding(
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

    Three conditions make them equal: ids rise in merge order, parts come before what they make, and
    BPE turns every made token into itself. Take two neighbours whose bytes spell a token t. The
    merges ranked before t have made them, inside their own borders. The last step towards t is a
    single listed pair, so the two neighbours are that pair.
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
        library = _load_library("gigatoken", "gigatoken (the extra 'fast' of this project)")
        # The special token is left out of added_tokens: gigatoken would recognise it in ordinary
        # text.
        self._model = library.Tokenizer.from_json(exact.model.to_str())

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


def _version(distribution: str) -> tuple[int, ...]:
    from importlib.metadata import version

    return tuple(int(part) for part in re.findall(r"\d+", version(distribution))[:3])


def _prove_equal(backend: Backend, exact: Backend, vocabulary: BPEVocabulary) -> None:
    texts = [SELF_CHECK, *SELF_CHECK.split("\n")]
    if vocabulary.content_sha256 != GPT2_SHA256:
        texts.append(" ".join(raw.decode(errors="replace") for raw in vocabulary.token_bytes))
    for text, found in zip(texts, backend.encode_many(texts).rows(), strict=True):
        # one by one: tokenizers warns in every forked child once its batch calls were used
        expected = exact.encode_one(text)
        if not np.array_equal(found, expected) or not np.array_equal(backend.encode_one(text), expected):
            raise _PassedOver(
                f"{backend.name} {'.'.join(map(str, _version(backend.name)))} gives other ids than"
                f" tokenizers in the self-check for {text[:40]!r}; use backend='tokenizers' and"
                " report it"
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
    try:
        exact = _Tokenizers(vocabulary)
    except _PassedOver as reason:
        raise TokenizerError(
            f"tokenizer backend {wanted!r} needs tokenizers, the measure of exactness: {reason}"
        ) from None
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
