"""Encode documents into token ids with their boundaries, in bulk.

Only the tokenizer runs once per document.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from common.dataset.blocks import Block
from common.dataset.corpus import CorpusFormat
from common.dataset.documents import Documents, documents_of
from common.dataset.id_files import parse_ids
from common.tokenizer import Framing, Tokenizer
from common.tokenizer.text_tokenizer import encode_documents

_Ids = npt.NDArray[np.int32]
_Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class EncodingRules:
    """Settings of the encoding.

    json_keys: one output for each; the columns of tables. A corpus without keys (text, an array of
    strings) has the one key ``text``.
    format: of the outputs: a .bin/.idx pair, FleetX's files, or GPT2-Chinese's with ``pieces``
    files. For these, documents that are left out are in ``EncodedBlock.documents``, with 0
    sequences. min_length: characters that a document must exceed. append_eod: put the tokenizer's
    document frame around each document (GPT-2: end-of-text at the end). special_tokens: what
    special tokens in a document are; left out, tokens where the tokenizer has marks beyond its end,
    else text.
    """

    json_keys: tuple[str, ...] = ("text",)
    format: Literal["indexed", "fleetx", "pieces"] = "indexed"
    min_length: int = 0
    append_eod: bool = True
    special_tokens: Literal["tokens", "text"] | None = None
    split_sentences: bool = False
    keep_newlines: bool = False


@dataclass(frozen=True, kw_only=True)
class EncodedBlock:
    """Tokens of a block under one key.

    tokens: (sum of sizes,). sizes: (sequences,) tokens of each, at least 1. documents: (documents,)
    sequences of each; 0 for a text without a token, as in Megatron's preprocess_data.py.
    empty: number of those, and of blank pieces of plain text, which are not counted as documents.
    short: documents skipped; short_bytes: their text. text_bytes: bytes of text read. read_bytes:
    bytes taken from disk. marks: how often each special token is spelled that stays text.
    """

    tokens: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    text_bytes: int
    read_bytes: int
    empty: int = 0
    short: int = 0
    short_bytes: int = 0
    marks: Mapping[str, int] = field(default_factory=dict)


def encode_block(block: Block, tokenizer: Tokenizer, rules: EncodingRules) -> list[EncodedBlock]:
    """Return one entry per key.

    This is a pure function, so that any number of workers writes the same bytes.
    Raises DataError naming file, line and column.
    """
    if block.format is CorpusFormat.IDS:
        return [_of_ids(block, tokenizer)]
    return [
        _encode(documents, tokenizer, rules, block.read_bytes) for documents in documents_of(block, rules.json_keys)
    ]


def _encode(documents: Documents, tokenizer: Tokenizer, rules: EncodingRules, read_bytes: int) -> EncodedBlock:
    texts, places = documents.texts, documents.places
    short_bytes = 0
    if rules.min_length:
        texts, places = _long_ones(documents, rules.min_length, tokenizer.framing)
        all_bytes = len("".join(documents.texts).encode())
        short_bytes = all_bytes - len("".join(texts).encode())
    short = len(documents.texts) - len(texts)
    counts = np.ones(len(texts), dtype=np.int64)
    if rules.split_sentences:
        texts, counts = _sentences_of(texts, rules.keep_newlines)
    is_token = rules.special_tokens == "tokens"
    packed = encode_documents(tokenizer, texts, special=is_token)
    ids, sizes = packed.ids, packed.lengths
    if not sizes.all():
        held = np.concatenate([[0], np.cumsum(sizes > 0)])[np.cumsum(counts)]
        sizes, counts = sizes[sizes > 0], np.diff(held, prepend=0)
    if rules.append_eod and len(sizes):
        ids, sizes = _frame(ids, sizes, counts[counts > 0], tokenizer.framing)
    empty = documents.blank + int(np.count_nonzero(counts == 0))
    if rules.format == "pieces":
        every = np.zeros(len(documents.texts) + documents.blank, dtype=np.int64)
        every[places] = counts
        counts = every
    return EncodedBlock(
        tokens=ids,
        sizes=sizes,
        documents=counts,
        empty=empty,
        short=short,
        short_bytes=short_bytes,
        text_bytes=documents.size,
        read_bytes=read_bytes,
        marks=_spelled(texts, () if is_token else tokenizer.special),
    )


def _spelled(texts: list[str], marks: Iterable[str]) -> dict[str, int]:
    """Return how often each mark is spelled in the texts, if at all."""
    counts = ((mark, sum(text.count(mark) for text in texts)) for mark in marks)
    return {mark: count for mark, count in counts if count}


def _of_ids(block: Block, tokenizer: Tokenizer) -> EncodedBlock:
    assert isinstance(block.data, bytes)
    ids, sizes = parse_ids(block.data, str(block.path), block.offset, tokenizer.vocab_size, tokenizer.eod_id)
    return EncodedBlock(
        tokens=ids,
        sizes=sizes,
        documents=np.ones(len(sizes), dtype=np.int64),
        text_bytes=len(block.data),
        read_bytes=block.read_bytes,
    )


def _long_ones(documents: Documents, least: int, framing: Framing) -> tuple[list[str], list[int]]:
    """Return the texts of more than ``least`` characters, and their places.

    Like GPT2-Chinese, count each line end as the characters of `` [SEP] ``.
    """
    line_end = 0 if framing.newline is None else len(" [SEP] ") - 1
    kept = [
        (text, place)
        for text, place in zip(documents.texts, documents.places, strict=True)
        if len(text) + line_end * text.count("\n") > least
    ]
    return [text for text, _ in kept], [place for _, place in kept]


def _sentences_of(texts: list[str], keep_newlines: bool) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the sentences of all documents, and the number of sentences of each document."""
    sentences: list[str] = []
    counts = []
    for text in texts:
        found = split_sentences(text, keep_newlines=keep_newlines)
        sentences.extend(found)
        counts.append(len(found))
    return sentences, np.array(counts, dtype=np.int64)


def _frame(ids: _Ids, sizes: _Sizes, counts: _Sizes, framing: Framing) -> tuple[_Ids, _Sizes]:
    """Put the prefix before the first sequence of each document, the suffix after its last one."""
    ends = np.cumsum(counts)
    first, last = ends - counts, ends - 1
    framed = sizes.copy()
    framed[first] += len(framing.prefix)
    framed[last] += len(framing.suffix)
    stops = np.cumsum(framed)
    out = np.empty(int(stops[-1]), dtype=ids.dtype)
    is_text = np.ones(len(out), dtype=np.bool_)
    starts = (stops - framed)[first]
    for n, token in enumerate(framing.prefix):
        out[starts + n] = token
        is_text[starts + n] = False
    for n, token in enumerate(reversed(framing.suffix), 1):
        out[stops[last] - n] = token
        is_text[stops[last] - n] = False
    out[is_text] = ids
    return out, framed


# ---- sentences by rule ----


_ABBREVIATIONS = """
    mr mrs ms dr prof rev hon st sr jr messrs mme mlle capt col gen lt sgt maj cmdr gov sen rep pres
    vol vols ch chap fig figs p pp ed eds cf vs viz approx e.g i.e a.m p.m u.s u.k inc ltd co corp
    jan feb mar apr jun jul aug sep sept oct nov dec
"""
_KNOWN = frozenset(_ABBREVIATIONS.split())
_CLOSING = "\"'\u201d\u2019)\\]}»」』\uff09】》"
_BOUNDARY = re.compile(
    # The match begins where a run of signs begins, and does not backtrack. Otherwise a run of a
    # million signs would take hours.
    rf"(?P<latin>(?<![.!?…])[.!?…]++[{_CLOSING}]*+)(?=\s)"
    rf"|(?:[。\uff01\uff1f]+|……)[{_CLOSING}]*"
    r"|(?=\n[ \t]*\n)"
)
_LAST_WORD = re.compile(r"([^\s(\[\"'\u201c\u2018]+)\.$")


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """Return the sentences of ``text`` in order, without empty ones.

    Rules need no model to download (nltk's punkt does) and give the same result everywhere. A
    sentence ends
    * at . ! ? or an ellipsis, with its closing quotes and brackets, if white space follows,
      - but not after a known abbreviation ("Mr.", "e.g."), after a single capital letter ("J.
        Smith"), or before a small letter ("etc. and so on");
    * at a Chinese full stop, exclamation or question mark (not a semicolon), with its closing
      quotes, even without a space;
    * at a blank line.
    keep_newlines: False drops the white space between sentences, like Megatron's
    ``--split-sentences``. True leaves it at the end of the sentence before, so that the joined
    sentences equal the text.
    """
    ends = [match.end() for match in _BOUNDARY.finditer(text) if _is_end(text, match)]
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    if not keep_newlines:
        return [stripped for piece in pieces if (stripped := piece.strip())]
    sentences: list[str] = []
    leading = ""
    for piece in pieces:
        # White space leads the next piece. Move it to the sentence before; the first one keeps it.
        body = piece.lstrip()
        space = piece[: len(piece) - len(body)]
        if sentences:
            sentences[-1] += space
        else:
            leading += space
        if body:
            sentences.append(body if sentences else leading + body)
    return sentences


def _is_end(text: str, match: re.Match[str]) -> bool:
    if match["latin"] is None:
        return True
    after = text[match.end() : match.end() + 200].lstrip()
    if after[:1].islower():
        return False
    if match["latin"] != ".":
        return True
    word = _LAST_WORD.search(text, max(0, match.start() - 40), match.end())
    if word is None:
        return True
    name = word.group(1)
    return name.lower() not in _KNOWN and not (len(name) == 1 and name.isupper() and name != "I")
