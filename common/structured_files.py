"""Readers of files and JSON from outside, within limits; ``yaml_files`` reads YAML.

Every fault of a text is one exception, ``MalformedError``. The ``read_`` functions add the path and raise the caller's
own error. Results are plain data: dict with str keys, list, str, int, float, bool, None.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from common.errors import ConfigError, UserError
from common.file_kinds import foreign_kind
from common.files import open_input, reading

MAX_JSON_BYTES = 32 * 2**20
MAX_DEPTH = 64


class MalformedError(ValueError):
    """Text that violates its format or the limits.

    ``line`` and ``column`` count from 1; 0 if unknown.
    """

    def __init__(self, problem: str, line: int = 0, column: int = 0) -> None:
        super().__init__(f"{problem} (line {line}, column {column})" if line else problem)
        self.problem, self.line, self.column = problem, line, column

    def at(self, path: Path | str) -> str:
        """Return ``path:line:column``, or only the path if the line is unknown."""
        return f"{path}:{self.line}:{self.column}" if self.line else str(path)


# ---- files ----


def read_bytes(path: Path, *, limit: int, error: type[UserError] = ConfigError) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises ``error`` with the path, the reason and a remedy, also for an archive.
    """
    with open_input(path, error) as file, reading(path, error):
        if (foreign := foreign_kind(file.peek())) is not None:
            raise error(f"{path}: {foreign}")
        size = os.fstat(file.fileno()).st_size
        if size <= limit:
            content: bytes = file.read(size)
            return content
    raise error(f"{path}: is larger than {limit / 2**20:g} MiB, the limit for a file of this kind; give the right file")


def read_text(path: Path, *, limit: int, error: type[UserError] = ConfigError) -> str:
    """Return the UTF-8 text of a regular file without its byte order mark. Raises ``error``."""
    content = read_bytes(path, limit=limit, error=error)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        raise error(f"{path}: byte {reason.start} is not UTF-8; convert the file to UTF-8") from None


def read_json_mapping(path: Path, *, error: type[UserError] = ConfigError) -> dict[str, Any]:
    """Return the content of a JSON file with an object at its top. Raises ``error`` with path, line and reason."""
    text = read_text(path, limit=MAX_JSON_BYTES, error=error)
    try:
        return require_mapping(parse_json(text), str(path), error=error)
    except MalformedError as reason:
        raise error(f"{path}: not valid JSON: {reason}; the file is damaged or of another kind") from None


def require_mapping(value: Any, where: str, *, error: type[UserError] = ConfigError) -> dict[str, Any]:
    """Return ``value`` if it is a dict. Raises ``error``."""
    if not isinstance(value, dict):
        raise error(f"{where}: expected keys and values, found {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """Return the word for the type of a parsed value."""
    names = {dict: "keys and values", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


# ---- JSON ----


def parse_json(text: str | bytes, *, strict: bool = True) -> Any:
    """Return the value of a JSON text; NaN and Infinity are read as Python writes them.

    strict: reject repeated keys and half of a surrogate pair, which an escape can produce. Raises MalformedError.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        value = (_STRICT if strict else _DECODER).decode(text)
        if strict and "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _malformed(error) from None
    return value


def parse_json_item(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the value that begins at ``start``, and where it ends; any text may follow. Raises MalformedError."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise _malformed(error) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise MalformedError(f"the key {shown(key)} is given twice in one object")
        found[key] = value
    return found


_DECODER, _STRICT = json.JSONDecoder(), json.JSONDecoder(object_pairs_hook=_unique_keys)


def _malformed(error: Exception) -> MalformedError:
    if isinstance(error, json.JSONDecodeError):
        return MalformedError(error.msg, error.lineno, error.colno)
    if isinstance(error, UnicodeDecodeError):
        return MalformedError(f"byte {error.start} is not UTF-8")
    if isinstance(error, UnicodeEncodeError):
        return MalformedError(f"the escape \\u{ord(error.object[error.start]):04x} is half of a pair of surrogates")
    if isinstance(error, MalformedError):
        return error
    is_deep = isinstance(error, RecursionError)
    return MalformedError("nested too deep" if is_deep else "a number of more digits than Python converts")


def shown(value: Any) -> str:
    """Return a value as quoted in a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
