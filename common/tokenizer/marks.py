"""Marks of a tokenizer: tokens that are whole texts, and those that begin, end and pad.

Ids equal those of transformers' AutoTokenizer. Source: huggingface/transformers 5.24,
tokenization_utils_base.py (``_from_pretrained``) and tokenization_utils_tokenizers.py; for a text
between two marks huggingface/tokenizers 0.23, added_vocabulary.rs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import TokenizerError
from common.tokenizer.base import Framing, PackedIds
from common.tokenizer.folder import NAMES, Folder

ENDS = ("<|endoftext|>", "</s>", "<eos>", "<eod>", "<|end_of_text|>", "<|im_end|>")
FRAME = ("[MASK]", "[CLS]", "[SEP]")
"""Marks of GPT2-Chinese's frame: before a document, behind it, between its lines."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A token that is a whole text, never cut into pieces.

    special: it marks something, such as an end; a mark that is not is a word that was added. lstrip, rstrip: it takes
    in the white space before it, after it. single_word: only where no letter touches it.
    """

    text: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    @property
    def pattern(self) -> str:
        """Return the regular expression of its places. The text is its only group."""
        word = rf"(?<!\w)({re.escape(self.text)})(?!\w)" if self.single_word else None
        left, right = r"\s*" * self.lstrip, r"\s*" * self.rstrip
        return f"{left}{word or f'({re.escape(self.text)})'}{right}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Marks:
    """Added and special tokens of a tokenizer.

    size: number of ids, up to the last mark. ends: ids at which a continuation stops.
    named: text by transformers' names, such as eos_token. implied: text of the marks that every
    vocabulary of the kind has.
    """

    marks: tuple[Mark, ...]
    size: int
    ends: tuple[int, ...]
    end: int | None
    """The id named as the end of a document."""
    bos_id: int | None
    pad_id: int | None
    named: Mapping[str, str]
    implied: frozenset[str]

    @property
    def special(self) -> dict[str, int]:
        return {mark.text: mark.id for mark in self.marks if mark.special}

    @property
    def added(self) -> dict[str, int]:
        return {mark.text: mark.id for mark in self.marks}

    def pattern(self, *, special: bool) -> re.Pattern[str] | None:
        """Return what finds the marks in a text, the longest first. special: all of them, else only
        the added words, which are never ordinary text.
        """
        found = [mark for mark in self.marks if special or not mark.special]
        found.sort(key=lambda mark: -len(mark.text))
        return re.compile("|".join(mark.pattern for mark in found)) if found else None

    def sha256(self, content: str, *settings: object) -> str:
        """Return the digest of a vocabulary's digest and of what changes ids of text.

        With only implied marks, and without settings that are true, it is the vocabulary's.
        """
        changes = [
            [mark.text, mark.id, mark.lstrip, mark.rstrip, mark.single_word]
            for mark in sorted(self.marks, key=lambda mark: mark.id)
            if mark.text not in self.implied or mark.lstrip or mark.rstrip or mark.single_word
        ]
        if not (changes or any(settings)):
            return content
        return hashlib.sha256(json.dumps([content, changes, settings]).encode()).hexdigest()


def read_marks(
    folder: Folder,
    ids: Mapping[str, int],
    implied: Iterable[str] = (),
    names: Mapping[str, str] | None = None,
    own: Iterable[str] = (),
) -> Marks:
    """Return the marks of a folder's files over a vocabulary.

    ids: of the vocabulary's tokens. implied: special tokens of every vocabulary of the
    kind. names: named tokens where no file names them. Those that the vocabulary lacks are left
    out. The end is then one of ``ENDS``. own: further special tokens of the vocabulary.
    Raises TokenizerError where two tokens have one id.
    """
    named = {name: text for name, text in (names or {}).items() if text in ids} | folder.named
    rows = 1 << 62 if folder.rows is None else folder.rows
    # a token beyond them was added to the tokenizer, and the model never saw it
    added = [fields for fields in folder.added if fields["id"] < rows]
    size = max([-1, *ids.values(), *(fields["id"] for fields in added)]) + 1
    texts = ids.keys() | {fields["text"] for fields in added}
    end = next((text for text in ENDS if text in texts), None)
    has_end = named.get("eos_token") in texts or ("eos_token" in named and size < rows)
    if end and not (has_end or texts >= {*FRAME}):
        named["eos_token"] = end
    implied = [text for text in implied if text in ids]
    listed = [*(named[name] for name in NAMES if name in named), *folder.listed, *implied, *own]
    taken = {number: text for text, number in ids.items()}
    marks: dict[str, Mark] = {}
    for fields in added:
        text, number = fields["text"], ids.get(fields["text"], fields["id"])
        if taken.setdefault(number, text) != text:
            raise TokenizerError(
                f"{folder.path}: the added token {text!r} has the id {number}, which is"
                f" {taken[number]!r} in the vocabulary; take all files of one tokenizer"
            )
        marks[text] = Mark(**{**fields, "id": number, "special": fields["special"] or text in listed})
    for text in dict.fromkeys(listed):
        if text in marks:
            continue
        if text in ids:
            marks[text] = Mark(text=text, id=ids[text])
        elif size < rows:
            marks[text] = Mark(text=text, id=size)  # transformers gives it the next id
            size += 1
    found = {**ids, **{mark.text: mark.id for mark in marks.values()}, "": None}  # an empty text is a token of BERT's

    def id_of(name: str) -> int | None:
        number = found.get(named.get(name, ""))
        return number if number is not None else next(iter(folder.ids(f"{name}_id", size)), None)

    return Marks(
        marks=tuple(marks.values()),
        size=size,
        ends=folder.ids("eos_token_id", size),
        end=found.get(named.get("eos_token", "")),
        bos_id=id_of("bos_token"),
        pad_id=id_of("pad_token"),
        named=named,
        implied=frozenset(implied),
    )


def framing_of(marks: Marks, file: Path, begin: str | None = None) -> Framing:
    """Return the frame of documents. begin: token before each document and prompt.

    Raises TokenizerError if no token ends a document.
    """
    ids = marks.added
    first = (ids[begin],) if begin in ids else ()
    if ids.keys() >= {*FRAME} and marks.end in (None, ids["[CLS]"], ids["[SEP]"]):
        mask, stop, line = (ids[token] for token in FRAME)  # GPT2-Chinese's frame
        return Framing(prefix=(mask,), suffix=(stop,), newline=line, begin=first)
    if marks.end is not None:
        return Framing(prefix=first, suffix=(marks.end,), begin=first)
    raise TokenizerError(
        f"{file}: has no token that ends a document; expected one of {', '.join(ENDS)}, or [MASK],"
        " [CLS] and [SEP]; if another token does, name it in a tokenizer_config.json beside the"
        ' file: {"eos_token": "TOKEN"}'
    )


def encode_around(
    pattern: re.Pattern[str],
    id_of: Callable[[re.Match[str]], int],
    encode: Callable[[list[str]], PackedIds],
    texts: Sequence[str],
) -> PackedIds:
    """Encode texts with an id in place of each match of ``pattern``, and ``encode`` for the text
    between two matches.
    """
    if not any(map(pattern.search, texts)):
        return encode(list(texts))
    parts: list[str] = []
    marks: list[int] = []  # the id of a match; -1 stands for the next part
    stops = []
    for text in texts:
        at = 0
        for match in pattern.finditer(text):
            if match.start() > at:
                parts.append(text[at : match.start()])
                marks.append(-1)
            marks.append(id_of(match))
            at = match.end()
        if at < len(text):
            parts.append(text[at:])
            marks.append(-1)
        stops.append(len(marks))
    packed = encode(parts)
    values = np.array(marks, dtype=np.int32)
    sizes = np.ones(len(values), dtype=np.int64)
    sizes[values < 0] = packed.lengths
    ends = np.concatenate([[0], np.cumsum(sizes)])
    ids = np.repeat(values, sizes)
    ids[ids < 0] = packed.ids
    return PackedIds(ids=ids, offsets=ends[np.concatenate([[0], stops]).astype(np.int64)])
