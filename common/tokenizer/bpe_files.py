"""Read and check the two files of a GPT-2 vocabulary.

These are the ids (vocab.json or encoder.json) and the merges (merges.txt or vocab.bpe). Every
defect of a file is reported here with its place. Source of both formats: openai/gpt-2,
src/encoder.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import TokenizerError
from common.structured_files import (
    DuplicateKeyError,
    MalformedError,
    parse_json,
    shown,
)
from common.tokenizer.base import Framing
from common.tokenizer.byte_level_json import parts_of
from common.tokenizer.folder import Folder, read_tokenizer_json
from common.tokenizer.marks import Marks, framing_of, read_marks
from common.tokenizer.text_files import read_vocabulary_text

END_OF_TEXT = "<|endoftext|>"
# Tokens added by hand, which no merge makes: "<pad>", "<|im_start|>", "[MASK]".
_SPECIAL = re.compile(r"<.+>|\[.+\]", re.DOTALL)


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each of the 256 printable characters that stand for bytes in GPT-2's
    files.

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
    merges: tuple[tuple[str, str], ...]
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
    """Digest of ``ids`` and ``merges``. It does not depend on file name, spacing, key order or
    header.
    """

    @property
    def eod_id(self) -> int:
        return self.framing.suffix[-1]

    @property
    def sha256(self) -> str:
        """Digest of all that ids depend on: ``content_sha256`` where nothing was added."""
        return self.marks.sha256(self.content_sha256, self.prefix_space)


def read_vocabulary(vocab_file: Path, merge_file: Path | None) -> BPEVocabulary:
    """Read both files, or a tokenizer.json that holds both, and what transformers keeps beside
    them. Raises TokenizerError that names the file, the line and the fix.
    """
    folder = Folder(vocab_file.parent)
    if merge_file is None:
        ids, merges, begin, prefix_space = parts_of(read_tokenizer_json(vocab_file))
    else:
        ids, merges = _read_ids(vocab_file), ()
        asked = folder.settings.get("add_bos_token") is True
        begin = folder.named.get("bos_token", END_OF_TEXT) if asked else None
    if merge_file is not None or folder.is_gpt2:
        prefix_space = folder.settings.get("add_prefix_space") is True
    tokens = _in_id_order(vocab_file, ids)
    _require_bytes(vocab_file, ids)
    if merge_file is not None:
        merges = _read_merges(merge_file, vocab_file, ids)
    made = {left + right for left, right in merges}
    unmade = [token for token in ids if len(token) > 1 and token not in made]
    # a vocabulary to which marks were added by hand, and transformers' files are not beside it
    by_hand = [] if folder.is_saved else list(filter(_SPECIAL.fullmatch, unmade))
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    marks = read_marks(folder, ids, (END_OF_TEXT,), names, by_hand)
    token_bytes = _spell(vocab_file, tokens, marks.added)
    framing = framing_of(marks, vocab_file, begin)
    lost = [token for token in unmade if not _SPECIAL.fullmatch(token) and token not in marks.added]
    _check_same_model(merge_file or vocab_file, vocab_file, ids, made, lost)
    spelled = {mark.id: mark.text.encode() for mark in marks.marks}
    return BPEVocabulary(
        ids=ids,
        merges=merges,
        marks=marks,
        token_bytes=(
            *token_bytes,
            *(spelled.get(number, b"") for number in range(len(ids), marks.size)),
        ),
        framing=framing,
        prefix_space=prefix_space,
        content_sha256=_content_hash(tokens, merges),
    )


def _content_hash(tokens: list[str], merges: tuple[tuple[str, str], ...]) -> str:
    # Neither a token nor a merge can hold "\n": the alphabet has no control characters and no
    # space.
    digest = hashlib.sha256(b"GPT2BPETokenizer/1\n")
    digest.update("\n".join(tokens).encode())
    digest.update(b"\n\n")
    digest.update("\n".join(f"{left} {right}" for left, right in merges).encode())
    return digest.hexdigest()


def _read_text(path: Path, what: str) -> str:
    return read_vocabulary_text(path, f"{what} of a GPT-2 tokenizer")


def _place(text: str, token: str) -> str:
    """Return the place of ``token`` as a JSON string, for an error message.

    Empty if the token is spelled with unusual escapes.
    """
    at = max(text.find(json.dumps(token)), text.find(json.dumps(token, ensure_ascii=False)))
    return (
        ""
        if at < 0
        else f" line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)}:"
    )


def _read_ids(path: Path) -> dict[str, int]:
    text = _read_text(path, "vocabulary (JSON, token -> id)")
    try:
        table = parse_json(text)
    except DuplicateKeyError as error:
        raise TokenizerError(
            f"{path}:{_place(text, error.key)} the token {error.key!r} is listed twice; expected"
            " each token once; remove one"
        ) from None
    except MalformedError as error:
        place = f" line {error.line}, column {error.column}:" if error.line else ""
        raise TokenizerError(
            f"{path}:{place} not JSON ({error.problem}); expected one object of token -> id, "
            'such as {"!": 0, ...}; fetch the file again, or check that the vocabulary and merge'
            " files are not swapped"
        ) from None
    if not isinstance(table, dict):
        raise TokenizerError(
            f"{path}: holds a JSON {type(table).__name__}; expected one object of token -> id; give"
            " vocab.json here"
        )
    if isinstance(table.get("model"), dict):
        raise TokenizerError(
            f"{path}: looks like a tokenizer.json; expected vocab.json, that is its part"
            " model.vocab"
        )
    for token, token_id in table.items():
        if type(token_id) is not int:  # bool is an int to isinstance
            raise TokenizerError(
                f"{path}:{_place(text, token)} the token {token!r} has the value {shown(token_id)}"
                f" of type {type(token_id).__name__}; expected an integer id"
            )
    if not table:
        raise TokenizerError(
            f"{path}: holds no tokens; expected at least the 256 bytes and {END_OF_TEXT!r}; fetch"
            " the file again"
        )
    return table


def _in_id_order(path: Path, ids: dict[str, int]) -> list[str]:
    """Return the tokens by id. Raises TokenizerError unless the ids are exactly 0 .. n-1.

    An embedding row belongs to each id.
    """
    tokens: list[str | None] = [None] * len(ids)
    outside: tuple[str, int] | None = None
    for token, token_id in ids.items():
        if not 0 <= token_id < len(tokens):
            outside = outside or (token, token_id)
            continue
        other = tokens[token_id]
        if other is not None:
            raise TokenizerError(
                f"{path}: id {token_id} belongs to both {other!r} and {token!r}; expected one token"
                " per id"
            )
        tokens[token_id] = token
    if outside is not None:
        gap = tokens.index(None)
        raise TokenizerError(
            f"{path}: no token has id {gap}, while {outside[0]!r} has id {outside[1]}; expected the"
            f" {len(ids)} tokens to have the ids 0 to {len(ids) - 1}; renumber them, or restore the"
            " missing tokens"
        )
    return [token for token in tokens if token is not None]


def _spell(path: Path, tokens: list[str], marks: Mapping[str, int]) -> tuple[bytes, ...]:
    """Return the bytes of each token. Those of a mark are its text's."""
    alphabet = byte_alphabet()
    try:
        spelled = tuple(
            token.encode() if token in marks else bytes([alphabet[char] for char in token])
            for token in tokens
        )
    except KeyError:
        token, char = next(
            (token, char)
            for token in tokens
            for char in token
            if char not in alphabet and token not in marks
        )
        raise TokenizerError(
            f"{path}: the token {token!r} holds {char!r} (U+{ord(char):04X}), which is not in the"
            " byte alphabet of GPT-2 (a space is written Ġ); expected a byte-level BPE vocabulary"
        ) from None
    if b"" in spelled:
        raise TokenizerError(
            f"{path}: id {spelled.index(b'')} is the empty token; expected at least one byte;"
            " remove it"
        )
    return spelled


def _require_bytes(path: Path, ids: Mapping[str, int]) -> None:
    alphabet = byte_alphabet()
    missing = [char for char in alphabet if char not in ids]
    if missing:
        raise TokenizerError(
            f"{path}: {len(missing)} of the 256 single-byte tokens are missing, the first being"
            f" {missing[0]!r} (byte 0x{alphabet[missing[0]]:02x}); without them some text has no"
            " ids; expected a byte-level BPE vocabulary"
        )


def _read_merges(path: Path, vocab_file: Path, ids: dict[str, int]) -> tuple[tuple[str, str], ...]:
    lines = (
        _read_text(path, "merges (two tokens a line)")
        .replace("\r\n", "\n")
        .rstrip("\n")
        .split("\n")
    )
    first = 1 if lines[0].startswith("#version") else 0
    pairs = [tuple(line.split(" ")) for line in lines[first:]]
    whole = set(map(len, pairs)) == {2} and len(set(pairs)) == len(pairs)
    if whole and ids.keys() >= {"".join(pair) for pair in pairs}.union(*zip(*pairs, strict=True)):
        return tuple(pairs)  # type: ignore[arg-type]
    # Something is wrong: find the first line that is.
    line_of: dict[tuple[str, str], int] = {}
    for number, line in enumerate(lines[first:], start=first + 1):
        fields = line.split(" ")
        if len(fields) != 2 or not all(fields):
            raise TokenizerError(
                f"{path}: line {number}: {_shorten(line)} has {len([f for f in fields if f])}"
                " fields; expected two tokens with one space between them; fetch the file again,"
                " or check that the vocabulary and merge files are not swapped"
            )
        pair = (fields[0], fields[1])
        for token, role in (
            (pair[0], "its left part"),
            (pair[1], "its right part"),
            (pair[0] + pair[1], "what it makes"),
        ):
            if token not in ids:
                raise TokenizerError(
                    f"{path}: line {number}: the merge {line!r}: {role}, {token!r}, is not a token"
                    f" of {vocab_file}; expected the merges and the vocabulary of one model; take"
                    " both files from the same place"
                )
        if pair in line_of:
            raise TokenizerError(
                f"{path}: line {number}: the merge {line!r} stands on line {line_of[pair]} already;"
                " remove one of them"
            )
        line_of[pair] = number
    return tuple(line_of)


def _shorten(line: str) -> str:
    return repr(line) if len(line) <= 60 else repr(line[:60]) + "..."


def _check_same_model(
    merge_file: Path,
    vocab_file: Path,
    ids: Mapping[str, int],
    made: Collection[str],
    lost: list[str],
) -> None:
    """Reject a file with tokens that no merge makes (``lost``).

    They can never be produced, which shows a cut merge file or that of another model.
    """
    if lost:
        raise TokenizerError(
            f"{merge_file}: its {len(made)} merges make none of {len(lost)} tokens of"
            f" {vocab_file}, the first being {lost[0]!r} (id {ids[lost[0]]}); the file is cut short"
            " or belongs to another model; take both files from the same place"
        )
    if END_OF_TEXT in made:
        raise TokenizerError(
            f"{merge_file}: a merge makes {END_OF_TEXT!r}; then ordinary text could end a document;"
            " remove that merge"
        )
