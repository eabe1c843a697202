"""Catalogue of known errors, read from error_codes.yaml when it is first needed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from common.errors import DataError
from common.yaml_files import read_yaml_mapping

Language = Literal["en", "zh"]
FILE = Path(__file__).with_name("error_codes.yaml")

_Words = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
_Source = Annotated[str, StringConstraints(pattern=r"^(https://\S+|docs/\S+)$")]
_AFTER = r"(?i:\b(?:error ?code|errcode|retcode|code|errno|result|ret|failed)\W{0,4}(?:is\W{1,3})?)"
"""Words before a code of digits, which without them may be any number."""


class Kind(IntEnum):
    """Worth of an explanation, best first."""

    CAUSE = 0
    WAIT = 1
    """A rank waited for another, where the cause may be."""
    WRAPPER = 2
    """An outer message that names only the place."""


class Guide(BaseModel):
    """The next three steps in both languages."""

    model_config = ConfigDict(extra="forbid", strict=True)

    en: Annotated[list[_Words], Field(min_length=3, max_length=3)]
    zh: Annotated[list[_Words], Field(min_length=3, max_length=3)]


class _Entry(BaseModel):
    """One error as the file writes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["cause", "wait", "wrapper"]
    codes: list[_Words] = []
    match: list[_Words] = []
    en: _Words
    zh: _Words
    guide: str
    source: Annotated[list[_Source], Field(min_length=1)]


class _Contents(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    guides: dict[str, Guide]
    errors: dict[str, _Entry]


@dataclass(frozen=True, kw_only=True)
class KnownError:
    """An error with its meaning and steps, as ``error_codes.yaml`` describes the fields."""

    name: str
    kind: Kind
    codes: tuple[str, ...]
    messages: tuple[str, ...]
    meaning: Mapping[Language, str]
    guide: Guide
    sources: tuple[str, ...]

    def steps(self, language: Language) -> list[str]:
        return self.guide.zh if language == "zh" else self.guide.en

    @cached_property
    def _patterns(self) -> list[tuple[str, re.Pattern[str]]]:
        """Text that a match must contain (empty: any), and the expression."""
        before = {True: _AFTER, False: r"\b"}
        codes = [
            (code, re.compile(rf"{before[code.isdigit()]}{code}(?![A-Za-z0-9])"))
            for code in self.codes
        ]
        return [*codes, *(("", re.compile(message)) for message in self.messages)]

    def find(self, text: str) -> tuple[int, str] | None:
        """Return the offset of the first match and its code or the error's name, else None."""
        found = [
            (match.start(), needle or self.name)
            for needle, pattern in self._patterns
            if needle in text and (match := pattern.search(text))
        ]
        return min(found, default=None)


@lru_cache(maxsize=1)
def known_errors(path: Path = FILE) -> tuple[KnownError, ...]:
    """Return all known errors in the order of the file. Raises DataError for a broken file."""
    try:
        contents = _Contents.model_validate(read_yaml_mapping(path, error=DataError))
        return tuple(
            KnownError(
                name=name,
                kind=Kind[entry.kind.upper()],
                codes=tuple(entry.codes),
                messages=tuple(entry.match),
                meaning={"en": entry.en, "zh": entry.zh},
                guide=contents.guides[entry.guide],
                sources=tuple(entry.source),
            )
            for name, entry in contents.errors.items()
        )
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise DataError(f"{path}: {place}: {problem['msg']}") from None
    except KeyError as error:
        raise DataError(f"{path}: guide {error} is not among the guides") from None
