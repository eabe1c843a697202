"""The files of a rank: mf_parallel{rank}/mindformer.log, what it writes, and env.log, what it was
started with. They only grow.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
import stat
import time
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from pydantic import BaseModel

from common.config.schema import RunConfig
from common.errors import ConfigError
from common.processes.ranks import ProcessSpec

_SECRET = re.compile(
    r"\w*KEYS?|\w*TOKENS?|\w*SECRETS?|\w*PASS\w*|PWD|CREDS?|CREDENTIALS?"
    r"|AUTH(?!ORS?$)\w*|O?AUTH2?|COOKIES?|JWT|BEARER|SIG(NATURE)?|AK|SK|PAT",
    re.IGNORECASE,
)
"""A word of a name whose value others must not read. Whole words: KEYBOARD, AUTHOR and data.path
are none.
"""
_COUNTED = re.compile(r"(^|_)(max|min|num|new|total|mega)(_\w+)?_tokens", re.IGNORECASE)
"""A name that counts tokens of text."""
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_IN_QUERY = re.compile(r"([?&;])([^=&;\s]*)=[^&;\s]*")
_USER_IN_URL = re.compile(r"(\w://)\S*@")
_USER_WITHOUT_SCHEME = re.compile(
    r"^[^\s:/@,;=]+:(?!//)\S+@(?=\S)|(?<![^\s,;=])[^\s:/@,;=]+:[^\s/@]+@(?=\S)"
)
"""``user:secret@host``, as the whole value with a slash in the secret too."""
_AFTER_SCHEME = re.compile(r"\b(Bearer|Basic)\s+\S+", re.IGNORECASE)
"""What follows the scheme of an HTTP header."""
_HIDDEN = "(hidden)"
_MOST_COPIED = 1 << 20
"""Bytes that are copied to the terminal at once; of more, the end."""
_TAIL_BYTES, _TAIL_LINES, _LINE_LENGTH = 16384, 20, 300


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """file: open for appending. start: its length before this run."""

    path: Path
    file: IO[bytes]
    start: int


def open_log(folder: Path, child: ProcessSpec) -> RankLog:
    """Make the child's folder and open its log. Raises ConfigError when the folder cannot be
    written.
    """
    path = folder / child.log_folder / "mindformer.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _open_private(path.with_name("env.log")).close()
        file = _append(path)
    except OSError as error:
        raise ConfigError(
            f"log folder {path.parent}: cannot be written: {error.strerror or error}; choose"
            " another one by --log_dir"
        ) from None
    if child.log_link:
        _link(folder / child.log_link, path)
    return RankLog(path=path, file=file, start=file.tell())


def write_headers(log: RankLog, child: ProcessSpec, environment: Mapping[str, str]) -> RankLog:
    """Open this run's part of both files, and return the log as it is then. A full disk is no
    reason not to start.
    """
    header = f"==== {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {child}\n"
    lines = [f"{name}={visible(name, value)}" for name, value in sorted(environment.items())]
    command = shlex.join(_visible_word(word) for word in child.command)
    with suppress(OSError):
        log.file.write(header.encode())
        text = header + "".join(
            line.replace("\n", "\\n") + "\n" for line in [f"# {command}", *lines]
        )
        with _open_private(log.path.with_name("env.log")) as file:
            file.write(text.encode(errors="replace"))
    return replace(log, start=log.file.tell())


def _link(name: Path, path: Path) -> None:
    """Let ``name`` lead to a log. A file of this name stays; a disk without links has none."""
    with suppress(OSError):
        if name.is_symlink():
            name.unlink()
        name.symlink_to(path.relative_to(name.parent))


def _append(path: Path, mode: int = 0o666) -> IO[bytes]:
    """Open a file to append to; a pipe that nobody reads is an error, not a wait. Raises
    OSError.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, mode)
    os.set_blocking(file, True)
    return os.fdopen(file, "ab", buffering=0)


def _open_private(path: Path) -> IO[bytes]:
    """Open a file to append to, which its owner alone can read, also one that an earlier version
    made. Raises OSError.
    """
    file = _append(path, 0o600)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        with suppress(OSError):  # another user's file, which can be written all the same
            os.fchmod(file.fileno(), 0o600)
    return file


def visible(name: str, value: str) -> str:
    """Return the value of a variable without what others must not read: secrets by their names, and
    those of URLs and HTTP headers.
    """
    if name != "PWD" and _is_secret(name):
        return _HIDDEN
    value = _USER_WITHOUT_SCHEME.sub(f"{_HIDDEN}@", _USER_IN_URL.sub(rf"\1{_HIDDEN}@", value))
    value = _AFTER_SCHEME.sub(rf"\1 {_HIDDEN}", value)
    return _IN_QUERY.sub(
        lambda found: f"{found[1]}{found[2]}={_HIDDEN}" if _is_secret(found[2]) else found[0], value
    )


def _is_secret(name: str) -> bool:
    return not _COUNTED.search(name) and any(
        _SECRET.fullmatch(word) for word in _WORD.findall(name)
    )


def _visible_word(word: str) -> str:
    """Of a command. The settings of a run hold no secret by their name."""
    name, equals, value = word.partition("=")
    return (
        f"{name}={visible('' if _is_setting(name) else name, value)}"
        if equals
        else visible("", word)
    )


def _is_setting(dotted: str) -> bool:
    """Whether the config has such a key."""
    sections: list[type[BaseModel]] = [RunConfig]
    for key in dotted.split("."):
        annotation = next(
            (
                section.model_fields[key].annotation
                for section in sections
                if key in section.model_fields
            ),
            None,
        )
        if annotation is None:
            return False
        sections = list(_models(annotation))
    return True


def _models(annotation: typing.Any) -> Iterator[type[BaseModel]]:
    """Those that an annotation holds, such as X | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def last_lines(log: RankLog) -> list[str]:
    """What this run wrote last, cut to a size that a terminal and a message can hold."""
    text = read_new(log, max(log.start, _size(log) - _TAIL_BYTES))[0]
    # of a progress bar its last state
    lines = [line.rpartition("\r")[2] or line for line in text.replace("\r\n", "\n").split("\n")]
    return [line.strip("\r")[:_LINE_LENGTH] for line in lines if line.strip()][-_TAIL_LINES:]


def read_new(log: RankLog, offset: int, limit: int = 1 << 20) -> tuple[str, int]:
    """Text from ``offset`` on, and the offset after it; nothing when the file cannot be read. A
    character that is half there waits.
    """
    with suppress(OSError), log.path.open("rb") as file:
        file.seek(offset)
        data = file.read(limit)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        return text, offset + len(data) - len(decoder.getstate()[0])
    return "", offset


def read_to_end(log: RankLog, offset: int) -> tuple[str, int]:
    """As read_new, up to the end of the file: of much text the last part alone, and how much is
    left out.
    """
    behind = _size(log) - offset
    if behind <= _MOST_COPIED:
        return read_new(log, offset, _MOST_COPIED)
    skipped = behind - _TAIL_BYTES
    text, end = read_new(log, offset + skipped, _MOST_COPIED)
    return (
        f"\n[{skipped} bytes are left out here; the whole is in"
        f" {log.path}]\n{text.partition(chr(10))[2] or text}",
        end,
    )


def _size(log: RankLog) -> int:
    with suppress(OSError):
        return log.path.stat().st_size
    return 0
