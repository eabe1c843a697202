"""Read and check the two files of a GPT-2 vocabulary.

These are the ids (vocab.json or encoder.json) and the merges (merges.txt or vocab.bpe). Every defect of a file is
reported here with its place. Source of both formats: openai/gpt-2, src/encoder.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from common.errors import TokenizerError
from common.structured_files import MalformedError, parse_json
from common.tokenizer.base import Framing
from common.tokenizer.folder import (
    ADDED,
    CONFIG,
    MAP,
    TOKENIZER_JSON,
    Folder,
    added_in,
    begin_of,
    read_tokenizer_json,
    read_vocabulary_text,
    version_of,
)  # fmt: skip
from common.tokenizer.marks import Marks, framing_of, read_marks

END_OF_TEXT = "<|endoftext|>"
Pairs = tuple[tuple[str, str], ...]
# Tokens added by hand, which no merge makes: "<pad>", "<|im_start|>", "[MASK]".
_SPECIAL = re.compile(r"<.+>|\[.+\]", re.DOTALL)


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each of the 256 printable characters that stand for bytes in GPT-2's files.

    Source: ``bytes_to_unicode``.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(hidden)})
    return alphabet


@dataclass(frozen=True, kw_only=True, eq=False)
class BPEVocabulary:
    """Checked vocabulary. Tokens are spelled in the byte alphabet; ``token_bytes`` has their
    bytes.
    """

    ids: dict[str, int]
    """Ids by token, 0 .. n-1, without those that were added later."""
    merges: Pairs
    """Merges, the first to be applied first."""
    marks: Marks
    token_bytes: tuple[bytes, ...]
    """Bytes of each token, indexed by id up to the last added one; empty where no token has an
    id.
    """
    framing: Framing
    prefix_space: bool
    """Whether a text, and what follows a mark, begins with a space that is put there."""
    content_sha256: str
    """Digest of ``ids`` and ``merges``. It does not depend on file name, spacing, key order or header."""


def read_vocabulary(vocab_file: Path, merge_file: Path | None) -> BPEVocabulary:
    """Read both files, or a tokenizer.json that holds both, and what transformers keeps beside
    them. Raises TokenizerError that names the file, the line and the fix.
    """
    folder = Folder(vocab_file.parent)
    if merge_file is None:
        parts = byte_level_parts(vocab_file)
        assert parts is not None
        ids, merges, begin, prefix_space = parts
    else:
        ids = _read_ids(vocab_file)
        merges = _read_merges(merge_file, vocab_file, ids)
        asked = folder.settings.get("add_bos_token") is True
        begin = folder.named.get("bos_token", END_OF_TEXT) if asked else None
    if merge_file is not None or folder.is_gpt2:
        prefix_space = folder.settings.get("add_prefix_space") is True
    tokens = sorted(ids, key=ids.__getitem__)
    made = {left + right for left, right in merges}
    unmade = [token for token in ids if len(token) > 1 and token not in made]
    # a vocabulary to which marks were added by hand, and transformers' files are not beside it
    is_saved = any((folder.path / name).is_file() for name in (CONFIG, MAP, ADDED, TOKENIZER_JSON))
    by_hand = [] if is_saved else list(filter(_SPECIAL.fullmatch, unmade))
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    marks = read_marks(folder, ids, (END_OF_TEXT,), names, by_hand)
    token_bytes = _spell(vocab_file, tokens, marks.added)
    framing = framing_of(marks, vocab_file, begin)
    lost = [token for token in unmade if not _SPECIAL.fullmatch(token) and token not in marks.added]
    if lost:
        raise TokenizerError(
            f"{merge_file or vocab_file}: its {len(made)} merges make none of {len(lost)} tokens of"
            f" {vocab_file}, the first being {lost[0]!r} (id {ids[lost[0]]}); the file is cut short"
            " or belongs to another model; take both files from the same place"
        )
    spelled = {mark.id: mark.text.encode() for mark in marks.marks}
    # neither a token nor a merge can hold a line end: the alphabet has no control characters and no space
    content = "\n".join(("GPT2BPETokenizer/1", *tokens)) + "\n\n" + "\n".join(map(" ".join, merges))
    return BPEVocabulary(
        ids=ids,
        merges=merges,
        marks=marks,
        token_bytes=(*token_bytes, *(spelled.get(number, b"") for number in range(len(ids), marks.size))),
        framing=framing,
        prefix_space=prefix_space,
        content_sha256=hashlib.sha256(content.encode()).hexdigest(),
    )


_OTHER_BPE = (
    "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges",
)  # fmt: skip
"""Settings of a tokenizer.json's BPE that GPT-2's has not."""


def byte_level_parts(file: Path) -> tuple[dict[str, int], Pairs, str | None, bool] | None:
    """Return the ids by token and the merges of a tokenizer.json, the token that begins a text, and
    whether a space does too. None unless it holds a whole byte-level BPE that cuts text as GPT-2's.

    Raises TokenizerError for a file that is not JSON.
    """
    return _byte_level_parts(file, version) if (version := version_of(file)) else None


@lru_cache(maxsize=1)
def _byte_level_parts(file: Path, version: object) -> tuple[dict[str, int], Pairs, str | None, bool] | None:
    content = read_tokenizer_json(file)
    model, cut = content.get("model"), content.get("pre_tokenizer")
    if not (isinstance(model, dict) and isinstance(cut, dict)):
        return None
    ids, listed = model.get("vocab"), model.get("merges")
    begin = begin_of(content.get("post_processor"))
    if not (
        (model.get("type"), cut.get("type"), begin is None) == ("BPE", "ByteLevel", False)
        and isinstance(ids, dict)
        and isinstance(listed, list)
        and not any(model.get(name) for name in _OTHER_BPE)
        and cut.get("use_regex", True) is True
        and content.get("normalizer") is None
    ):
        return None
    # a pair is one text in files before tokenizers 0.20
    pairs = [each.split(" ") if isinstance(each, str) else each for each in listed]
    if not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in pairs
    ):
        return None
    made = {left + right for left, right in pairs}
    added = {str(entry.get("content")) for entry in added_in(content)}
    alphabet = byte_alphabet().keys()
    whole = (
        ids.keys() >= alphabet
        and all(map(_SPECIAL.fullmatch, ids.keys() - made - added - alphabet))
        and ids.keys() >= made.union(*pairs)
        and {*ids.values()} == {*range(len(ids))}
    )
    prefix_space = cut.get("add_prefix_space", True) is True
    return (ids, tuple(map(tuple, pairs)), begin, prefix_space) if whole else None


def _read_ids(path: Path) -> dict[str, int]:
    """Return the ids by token. Raises TokenizerError unless they are exactly 0 .. n-1, since an
    embedding row belongs to each, and every byte has one.
    """
    text = read_vocabulary_text(path, "vocabulary (JSON, token -> id) of a GPT-2 tokenizer")
    try:
        table = parse_json(text)
    except MalformedError as error:
        place = f" line {error.line}, column {error.column}:" if error.line else ""
        raise TokenizerError(
            f"{path}:{place} not JSON ({error.problem}); expected one object of token -> id, "
            'such as {"!": 0, ...}; fetch the file again, or check that the vocabulary and merge'
            " files are not swapped"
        ) from None
    if isinstance(table, dict) and isinstance(table.get("model"), dict):
        raise TokenizerError(f"{path}: looks like a tokenizer.json; expected vocab.json, that is its part model.vocab")
    if not (table and isinstance(table, dict) and set(map(type, table.values())) == {int}):
        raise TokenizerError(
            f"{path}: expected one object of token -> id with at least the 256 bytes and"
            f" {END_OF_TEXT!r}; give vocab.json here, or fetch the file again"
        )
    wrong = next((token for at, token in enumerate(sorted(table, key=table.__getitem__)) if table[token] != at), None)
    if wrong is not None:
        raise TokenizerError(
            f"{path}: the {len(table)} tokens must have the ids 0 to {len(table) - 1}, one each, but"
            f" {wrong!r} has {table[wrong]}, which is taken or leaves a gap; fetch the file again"
        )
    alphabet = byte_alphabet()
    if missing := [char for char in alphabet if char not in table]:
        raise TokenizerError(
            f"{path}: {len(missing)} of the 256 single-byte tokens are missing, the first being {missing[0]!r} (byte"
            f" 0x{alphabet[missing[0]]:02x}); without them some text has no ids; expected a byte-level BPE vocabulary"
        )
    return table


def _spell(path: Path, tokens: list[str], marks: Mapping[str, int]) -> tuple[bytes, ...]:
    """Return the bytes of each token. Those of a mark are its text's."""
    alphabet = byte_alphabet()
    try:
        return tuple(
            token.encode() if token in marks else bytes([alphabet[char] for char in token]) for token in tokens
        )
    except KeyError:
        token, char = next(
            (token, char) for token in tokens for char in token if char not in alphabet and token not in marks
        )
        raise TokenizerError(
            f"{path}: the token {token!r} holds {char!r} (U+{ord(char):04X}), which is not in the"
            " byte alphabet of GPT-2 (a space is written Ġ); expected a byte-level BPE vocabulary"
        ) from None


def _read_merges(path: Path, vocab_file: Path, ids: dict[str, int]) -> Pairs:
    text = read_vocabulary_text(path, "merges (two tokens a line) of a GPT-2 tokenizer")
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    first = 1 if lines[0].startswith("#version") else 0
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(lines[first:], first + 1):
        left, _, right = line.partition(" ")
        if not (left and right) or " " in right:
            raise TokenizerError(
                f"{path}: line {number}: {line[:60]!r}: expected two tokens with one space between them; fetch the"
                " file again, or check that the vocabulary and merge files are not swapped"
            )
        if not (left in ids and right in ids and left + right in ids):
            missing = next(token for token in (left, right, left + right) if token not in ids)
            raise TokenizerError(
                f"{path}: line {number}: the merge {line!r}: {missing!r} is not a token of {vocab_file}; expected the"
                " merges and the vocabulary of one model; take both files from the same place"
            )
        pairs.append((left, right))
    return tuple(pairs)
