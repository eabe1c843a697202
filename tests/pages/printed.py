"""Compare what a command printed with the lines that a page shows of it."""

from __future__ import annotations

import difflib
import re

RELATIVE = 0.02
"""Bound of numbers with a point or an exponent: another CPU adds up in another order, which a loss
after a few steps shows in its third digit at most.
"""
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_UNIT = r"[ ]?(?:ms|s|min|h|seconds?|minutes?|hours?|[KMGT]i?B|kB|T?FLOPS?|%|[MG]Hz|\w+/s)(?!\w)"
_NAME = re.compile(r"\b(?:eta|speed|mfu|time|port|pid|took|memory|load)\W{0,3}$", flags=re.I)
_PARTS = re.compile(
    rf"""(?P<anything>\.\.\.|…)
    | (?P<hash>\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{{8,}}\b)
    | (?P<path>(?<![\w.)\]/-])(?:/[\w.-]+){{2,}}/?)
    | (?P<loose>\d{{4}}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?  # a date
        | \d+(?:\.\d+){{3}}(?::\d+)?                           # an address
        | \d+:\d\d(?::\d\d)?(?:\.\d+)?                         # a time of day, or how long
        | v?\d+\.\d+\.\d+[\w.+]*                               # a version
        | (?:{_NUMBER})(?={_UNIT}))
    | (?P<number>(?<![\w.])(?:{_NUMBER})(?!\w))
    | (?P<space>[ \t]+)""",
    flags=re.X,
)
_LOOSE = {"hash": "[0-9a-f]{8,}", "loose": r"[-+]?[\w.:,+-]*(?:[ T]\d\d:\d\d(?::\d\d)?)?"}


def missing(shown: str, printed: str, *, any_number: bool = False, free: str = "") -> str | None:
    """The first line of a page that is not in the output, in the page's order; None when all are.

    ``...`` stands for anything. Times, dates, speeds, sizes, versions, hashes and the folders of absolute paths may
    differ. any_number: so may every number. free: a pattern of lines in which they may.
    """
    lines = clean(printed).splitlines()
    at = 0
    for number, line in enumerate(clean(shown).splitlines(), 1):
        if not line or line in ("...", "…"):
            continue
        pattern, values = _pattern(line, any_number=any_number or bool(free and re.search(free, line)))
        while at < len(lines) and not _agrees(pattern, values, lines[at]):
            at += 1
        if at == len(lines):
            near = difflib.get_close_matches(line, clean(printed).splitlines(), n=1, cutoff=0.3)
            return f"line {number}: {line!r}; nearest in the output: {near[0] if near else None!r}"
        at += 1
    return None


def clean(text: str) -> str:
    """Without colours, overwritten lines of progress bars, the time of day at the head of a line of
    the log, and blanks at its ends.
    """
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    lines = (re.sub(r"[ \t]+", " ", line).strip() for line in text.splitlines())
    return "\n".join(re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines)


def _pattern(line: str, *, any_number: bool) -> tuple[re.Pattern[str], list[str]]:
    """A pattern of the whole line, a group for each number to compare, and these numbers."""
    parts, values, end = [], [], 0
    for match in _PARTS.finditer(line):
        parts.append(re.escape(line[end : match.start()]))
        end, kind = match.end(), match.lastgroup
        if kind == "anything":
            parts.append(".*")
        elif kind == "path":
            last = match[0].rstrip("/").rpartition("/")[2]
            parts.append(rf"/\S*{re.escape(last)}/?")
        elif kind == "space":
            parts.append(" ")
        elif kind in _LOOSE or _NAME.search(line[: match.start()]):
            parts.append(_LOOSE.get(str(kind), _NUMBER))
        elif any_number:
            parts.append(_NUMBER)
        else:
            parts.append(f"({_NUMBER})")
            values.append(match[0])
    parts.append(re.escape(line[end:]))
    return re.compile("".join(parts)), values


def _agrees(pattern: re.Pattern[str], values: list[str], line: str) -> bool:
    match = pattern.fullmatch(line)
    return match is not None and all(map(_equal, values, match.groups()))


def _equal(shown: str, printed: str) -> bool:
    shown, printed = shown.replace(",", ""), printed.replace(",", "")
    if re.fullmatch(r"[-+]?\d+", shown):
        return shown == printed
    mantissa, _, exponent = shown.lower().partition("e")
    last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    expected = float(shown)
    return abs(float(printed) - expected) <= max(RELATIVE * abs(expected), 1.01 * last_digit)
