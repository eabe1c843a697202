"""Known errors of libraries and systems: search of logs, and explanation in English or Chinese."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Literal

from common.errors import DataError
from common.files import unreadable
from common.yaml_files import read_yaml_mapping

Language = Literal["en", "zh"]
MAX_LOG_BYTES = 16 << 20
"""Most bytes read of one log: half from its start, half from its end."""
MAX_LOGS = 1024
_LOGS = ("launcher.log", "mf_*/mindformer.log", "host_*/mindformer.log", "*.log")
"""Logs of a run folder."""
_LINE = 200
_AFTER = r"(?i:\b(?:error ?code|errcode|retcode|code|errno|result|ret|failed)\W{0,4}(?:is\W{1,3})?)"
"""Words before a code of digits, which without them may be any number."""
_WORDS: Mapping[Language, Mapping[str, str]] = {
    "en": {
        "at": "{path}, line {line}",
        "steps": "Next steps:",
        "source": "Source:",
        "also": "Also found, probably consequences:",
        "wait": "This rank waited for another: the cause may be in that rank's log.",
        "wrapper": "This code names only the place: the lines around it say more.",
        "nothing": "{path}: no known error; look at its last lines, and at the other logs",
    },
    "zh": {
        "at": "{path} 第 {line} 行",
        "steps": "下一步：",
        "source": "来源：",
        "also": "同时发现，多半是它的后果：",
        "wait": "本进程在等待其他进程，原因可能在那个进程的日志里。",
        "wrapper": "此码只说明出错的位置，附近几行才说明原因。",
        "nothing": "{path}：没有已知的错误；请查看最后几行和其他日志",
    },
}


class Kind(IntEnum):
    """Worth of an explanation, best first."""

    CAUSE = 0
    WAIT = 1
    """A rank waited for another, where the cause may be."""
    WRAPPER = 2
    """An outer message that names only the place."""


@dataclass(frozen=True, kw_only=True)
class KnownError:
    """An error with its meaning and steps, as the head of ``error_codes.yaml`` describes them."""

    name: str
    kind: Kind
    codes: tuple[str, ...]
    patterns: Sequence[tuple[str, re.Pattern[str]]]
    """Text that a match must contain (empty: any), and the expression, of each code and message."""
    meaning: Mapping[Language, str]
    steps: Mapping[Language, Sequence[str]]
    sources: tuple[str, ...]


@lru_cache(maxsize=1)
def known_errors() -> tuple[KnownError, ...]:
    """Return all known errors in the order of the file, which is read when it is first needed."""
    tree = read_yaml_mapping(Path(__file__).with_name("error_codes.yaml"))
    before = {True: _AFTER, False: r"\b"}
    errors = []
    for name, entry in tree["errors"].items():
        codes = tuple(entry.get("codes", ()))
        patterns = [(code, re.compile(f"{before[code.isdigit()]}{code}(?![A-Za-z0-9])")) for code in codes]
        patterns += [("", re.compile(message)) for message in entry.get("match", ())]
        error = KnownError(
            name=name,
            kind=Kind[entry["kind"].upper()],
            codes=codes,
            patterns=patterns,
            meaning={"en": entry["en"], "zh": entry["zh"]},
            steps=tree["guides"][entry["guide"]],
            sources=tuple(entry["source"]),
        )
        errors.append(error)
    return tuple(errors)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A known error in a log. code: as the log writes it, or the error's name. line: from 1."""

    error: KnownError
    code: str
    path: Path
    line: int
    text: str


def language_of(environ: Mapping[str, str]) -> Language:
    """Return the language of messages that the locale's variables choose."""
    names = ("LC_ALL", "LC_MESSAGES", "LANG")
    chosen = next((environ[name] for name in names if environ.get(name)), "")
    return "zh" if chosen.lower().startswith("zh") else "en"


def find_errors(text: str, path: Path) -> list[Found]:
    """Return the known errors in a log: causes first, then waits, then wrappers.

    Within a kind the earliest comes first, since later ones are often its consequences.
    """
    found: list[tuple[Kind, int, Found]] = []
    for error in known_errors():
        matches = [
            (match.start(), needle or error.name)
            for needle, pattern in error.patterns
            if needle in text and (match := pattern.search(text))
        ]
        if not matches:
            continue
        offset, code = min(matches)
        start = text.rfind("\n", 0, offset) + 1
        line = text[start : text.find("\n", offset) % (len(text) + 1)].strip()
        shown = line if len(line) <= _LINE else text[offset : offset + _LINE].partition("\n")[0]
        number = text.count("\n", 0, offset) + 1
        hit = Found(error=error, code=code, path=path, line=number, text=shown)
        found.append((error.kind, offset, hit))
    return [hit for *_, hit in sorted(found, key=lambda each: each[:2])]


def find_in_logs(place: Path) -> list[Found]:
    """Return the known errors of a log, or of all logs of a run folder, best first.

    Raises DataError if it cannot be read, or is a folder without logs.
    """
    logs = [place]
    if place.is_dir():
        found = (path for each in _LOGS for path in sorted(place.glob(each)) if path.is_file())
        logs = list(dict.fromkeys(found))[:MAX_LOGS]
    if not logs:
        raise DataError(f"{place}: a folder without logs; expected {', '.join(_LOGS)}")
    texts = ((_read_ends(path, MAX_LOG_BYTES).replace("\r", "\n"), path) for path in logs)
    return merged(find_errors(text, path) for text, path in texts)


def merged(searched: Iterable[list[Found]]) -> list[Found]:
    """Join the findings of several logs, each error once."""
    best: dict[str, Found] = {}
    for found in searched:
        for hit in found:
            best.setdefault(hit.error.name, hit)
    return sorted(best.values(), key=lambda hit: hit.error.kind)


def _read_ends(path: Path, most: int) -> str:
    """Return the text of a file; of more than ``most`` bytes, whole lines or states of a progress bar stay.

    Raises DataError.
    """
    try:
        with path.open("rb") as file:
            too_long = os.fstat(file.fileno()).st_size > most
            data = file.read(most // 2 if too_long else most)
            if too_long:
                file.seek(-(most // 2), os.SEEK_END)
                end = re.sub(rb"\A[^\r\n]*", b"", file.read(most // 2))
                data = data[: max(data.rfind(b"\r"), data.rfind(b"\n")) + 1] + b"[...]" + end
    except OSError as error:
        raise DataError(f"{path}: {unreadable(error)}") from None
    return data.decode("utf-8", "replace")


def error_of(code: str) -> KnownError:
    """Return the error of a code, a name or a message. Raises DataError for an unknown one."""
    wanted = code.strip().casefold()
    for error in known_errors():
        if wanted in (name.casefold() for name in (error.name, *error.codes)):
            return error
    if found := find_errors(code, Path()):
        return found[0].error
    codes = ", ".join(code for error in known_errors() for code in error.codes if len(code) <= 8)
    raise DataError(f"--explain {code}: no such log, and no known code or message; known codes: {codes}")


def explanation(error: KnownError, language: Language) -> str:
    """Return meaning, next steps and sources of an error."""
    words = _WORDS[language]
    lines = [error.meaning[language], words["steps"]]
    if error.kind is not Kind.CAUSE:
        lines.insert(1, words[error.kind.name.lower()])
    lines += [f"  {number}. {step}" for number, step in enumerate(error.steps[language], 1)]
    lines += [f"{words['source']} {source}" for source in error.sources]
    return "\n".join(lines) + "\n"


def explain_code(code: str, language: Language) -> str:
    """Return the explanation of a code, a name or a message. Raises DataError."""
    error = error_of(code)
    return f"{', '.join(dict.fromkeys((error.name, *error.codes)))}\n{explanation(error, language)}"


def explain_log(place: Path, language: Language) -> tuple[str, bool]:
    """Return the explanation of a log or run folder, and whether a known error is in it.

    Raises DataError if it cannot be read.
    """
    found, words = find_in_logs(place), _WORDS[language]
    if not found:
        return words["nothing"].format(path=place) + "\n", False
    first, *others = found
    where = words["at"].format(path=first.path, line=first.line)
    text = f"{first.code}: {where}\n    {first.text}\n{explanation(first.error, language)}"
    if others:
        text += words["also"] + "\n"
        for hit in others:
            place_of = words["at"].format(path=hit.path, line=hit.line)
            text += f"  {hit.code}: {hit.error.meaning[language]} ({place_of})\n"
    return text, True
