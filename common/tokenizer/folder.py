"""Files that transformers keeps beside a vocabulary, read once.

Which of them holds what is huggingface/transformers 5.24's, tokenization_utils_base.py (``_from_pretrained``).

They go along where weights are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from common.errors import TokenizerError
from common.structured_files import (
    MAX_JSON_BYTES,
    MalformedError,
    kind_of,
    parse_json,
    read_bytes,
    read_json_mapping,
    read_text,
    require_mapping,
)

TOKENIZER_JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
BPE_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"), ("gpt2-vocab.json", "gpt2-merges.txt"))
"""Names of a GPT-2 vocabulary and its merges: Hugging Face's, OpenAI's and Megatron-LM's."""
VOCABULARIES = (*chain(*BPE_FILES), "vocab.txt", "tokenizer.model", "spiece.model", TOKENIZER_JSON)
"""Names of files that hold a vocabulary, or a part of one."""
GENERATION = "generation_config.json"
BESIDE = (CONFIG, MAP, ADDED, GENERATION, "chat_template.jinja")
"""Names of the files that say more about a vocabulary."""
MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Names of ids in config.json and generation_config.json."""
_MAX_ID = 1 << 24
"""Ids, beyond which a file is taken to be damaged."""
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("special", "lstrip", "rstrip", "single_word")


class Folder:
    """The files beside a vocabulary. Each is read when it is first asked for.

    Its members raise TokenizerError, which names the file, for content that is not transformers'.
    """

    def __init__(self, path: Path, json: str = TOKENIZER_JSON) -> None:
        """json: name of its tokenizer.json."""
        self.path, self._json = path, json

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Content of tokenizer_config.json, with special_tokens_map.json over it where it lists
        no added tokens.
        """
        settings = self._mapping(CONFIG)
        if "added_tokens_decoder" in settings:
            return settings
        return settings | self._mapping(MAP)

    @cached_property
    def json(self) -> dict[str, Any]:
        """Content of tokenizer.json; empty without one."""
        file = self.path / self._json
        return read_tokenizer_json(file) if file.is_file() else {}

    @property
    def is_gpt2(self) -> bool:
        """Whether transformers opens the folder as GPT2Tokenizer, which cuts text its own way."""
        name = self.settings.get("tokenizer_class") or ""
        by_model = not name and self._mapping("config.json").get("model_type") == "gpt2"
        return by_model or str(name).startswith("GPT2Tokenizer")

    @property
    def named(self) -> dict[str, str]:
        """Text of the tokens that are named: eos_token and the others of ``NAMES``."""
        found = {name: _text(self.settings.get(name)) for name in NAMES}
        return {name: text for name, text in found.items() if text}

    @property
    def listed(self) -> list[str]:
        """Text of further special tokens, whose ids may be given nowhere."""
        values = [self.settings.get(name) or [] for name in _LISTS]
        texts = [_text(each) for value in values if isinstance(value, list) for each in value]
        return [text for text in texts if text]

    @property
    def added(self) -> list[dict[str, Any]]:
        """The fields of ``Mark`` of each added token."""
        found: dict[str, dict[str, Any]] = {}
        named = self.settings.get("added_tokens_decoder") or {}
        decoder = require_mapping(named, str(self.path / CONFIG), error=TokenizerError)
        beside = {} if decoder else self._mapping(ADDED)
        for where, number, fields in (
            *((self._json, None, entry) for entry in added_in(self.json)),
            *((ADDED, number, {"content": text}) for text, number in beside.items()),
            *((CONFIG, number, fields) for number, fields in decoder.items()),
        ):
            fields = require_mapping(fields, str(self.path / where), error=TokenizerError)
            text, number = fields.get("content"), fields.get("id") if number is None else number
            if isinstance(number, str) and number.isascii() and number.isdigit():
                number = int(number[:19])
            is_id = type(number) is int and 0 <= number < _MAX_ID
            if not (text and isinstance(text, str) and is_id):
                raise TokenizerError(
                    f"{self.path / where}: an added token has the text {str(text)[:40]!r} and the"
                    f" id {str(number)[:40]}; expected text and a whole number from 0 to"
                    f" {_MAX_ID - 1}; fetch the file again"
                )
            known = found.get(text, {})
            flags = {name: bool(fields.get(name, known.get(name, False))) for name in _FLAGS}
            found[text] = {"text": text, "id": number, **flags}
        return sorted(found.values(), key=lambda fields: fields["id"])

    @cached_property
    def rows(self) -> int | None:
        """Rows of the table of the model in the folder, transformers' or ours."""
        for name in ("config.json", "export.json", "manifest.json"):
            with suppress(TokenizerError, AttributeError):  # another program's file of this name
                found = self._mapping(name)
                found = found.get("config", found)
                rows = found.get("model", found).get("vocab_size")
                if type(rows) is int:
                    return rows
        return None

    def ids(self, name: str, size: int) -> tuple[int, ...]:
        """Return the ids below ``size`` that the model's files have under a name such as
        eos_token_id. generation_config.json comes before config.json, as in ``generate``.
        """
        for file in (GENERATION, "config.json"):
            value = self._mapping(file).get(name)
            ids = value if isinstance(value, list) else [value]
            if found := [each for each in ids if type(each) is int and 0 <= each < size]:
                return tuple(dict.fromkeys(found))
        return ()

    @property
    def chat_template(self) -> str | None:
        """Jinja template of dialogues."""
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return read_text(file, limit=MAX_JSON_BYTES, error=TokenizerError)
        template = self.settings.get("chat_template")
        return template if isinstance(template, str) else None

    def _mapping(self, name: str) -> dict[str, Any]:
        file = self.path / name
        return read_json_mapping(file, error=TokenizerError) if file.is_file() else {}


def read_tokenizer_json(file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json, which must not be changed. Raises TokenizerError."""
    return _read_tokenizer_json(file, version_of(file))


def version_of(file: Path) -> object:
    """Return what changes with a file's content; None without a file."""
    found = file.stat() if file.is_file() else None
    return found and (found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(maxsize=1)
def _read_tokenizer_json(file: Path, version: object) -> dict[str, Any]:
    raw = read_bytes(file, limit=MAX_JSON_BYTES, error=TokenizerError)
    try:
        found = parse_json(raw, strict=b"\\ud" in raw.lower())  # which rejects half a character
    except MalformedError as error:
        raise TokenizerError(f"{file}: not JSON:  {error}; fetch the file again") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"{file}: expected keys and values, found {kind_of(found)}")
    return found


def added_in(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of added tokens of a tokenizer.json. Its library reports other ones."""
    found = content.get("added_tokens")
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def begin_of(processor: Any) -> str | None:
    """Return the token that the post-processor of a tokenizer.json puts before a text; empty if it
    puts none. None: it does more, such as closing a sentence.
    """
    if processor is None:
        return ""
    if not isinstance(processor, Mapping):
        return None
    if processor.get("type") == "ByteLevel":
        return ""
    if isinstance(steps := processor.get("processors"), list):
        found = list(map(begin_of, steps))
        return None if None in found else "".join(filter(None, found))
    match processor.get("single"):
        case [{"SpecialToken": {"id": str(token)}}, {"Sequence": _}]:
            return token
        case [{"Sequence": _}]:
            return ""
    return None


def _text(value: object) -> str | None:
    """Return the text of a token that a file has as text, or as an object with its flags."""
    found = value.get("content") if isinstance(value, Mapping) else value
    return found if isinstance(found, str) else None


def read_vocabulary_text(path: Path, what: str) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    what: its content, for messages. Raises TokenizerError.
    """
    try:
        raw = read_bytes(path, limit=MAX_JSON_BYTES, error=TokenizerError)
    except TokenizerError as error:
        raise TokenizerError(f"{error}; expected the {what}") from None
    if not raw.strip():
        raise TokenizerError(f"{path}: is empty ({len(raw)} bytes); expected the {what}; fetch the file again")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        remedy = "fetch the file again"
        with suppress(UnicodeDecodeError):
            raw.decode("gb18030")  # which includes GBK
            remedy = "it may be GBK, convert it: iconv -f GB18030 -t UTF-8"
        raise TokenizerError(
            f"{path}: line {line}, byte {column} of the line: 0x{raw[error.start]:02x} is not UTF-8"
            f" ({error.reason}); expected the {what} as UTF-8 text; {remedy}"
        ) from None


def vocabulary_in(folder: Path) -> dict[str, bytes]:
    """Return the content of the vocabulary's files in a folder, by Hugging Face's names. Raises TokenizerError."""
    theirs = dict(zip(chain(*BPE_FILES), BPE_FILES[0] * len(BPE_FILES), strict=True))
    return {theirs.get(name, name): _read(folder / name) for name in VOCABULARIES if (folder / name).is_file()}


def companions_in(folder: Path) -> dict[str, bytes]:
    """Return the content of what transformers keeps beside a vocabulary, by name. A generation_config.json is made of
    the ids in config.json where there is none. Raises TokenizerError.
    """
    names = [name for name in BESIDE if (folder / name).is_file()]
    found = {name: _read(folder / name) for name in names}
    if GENERATION not in found and (ids := ids_in(folder)):
        found[GENERATION] = (json.dumps(ids, indent=2) + "\n").encode()
    return found


def ids_in(folder: Path) -> dict[str, Any]:
    """Return the ids of the begin, the ends and the padding that generation_config.json names, else
    config.json; None stands for none.
    """
    found: dict[str, Any] = {}
    for file in (folder / "config.json", folder / GENERATION):
        with suppress(TokenizerError):  # not there, or no file of transformers
            fields = read_json_mapping(file, error=TokenizerError)
            given = {name: fields[name] for name in MODEL_IDS if name in fields}
            found = given | {name: each for name, each in found.items() if given.get(name) is None}
    return found


def _read(file: Path) -> bytes:
    return read_bytes(file, limit=MAX_JSON_BYTES, error=TokenizerError)
