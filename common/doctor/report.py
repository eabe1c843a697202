"""Report of the doctor (check, state, finding, remedy) as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

State = Literal["ok", "warning", "error"]
_COLOURS = {"ok": "", "warning": "\033[33m", "error": "\033[31m"}
"""Of each state, from the best to the worst."""


@dataclass(frozen=True)
class Check:
    """One line of the report. remedy: what to do about it; empty for nothing."""

    state: State
    name: str
    found: str
    remedy: str = ""


ok, warning, error = (partial(Check, state) for state in ("ok", "warning", "error"))


def exit_code(checks: Iterable[Check]) -> int:
    """Return 0 without errors, else 2."""
    return 2 if any(check.state == "error" for check in checks) else 0


def as_table(checks: Sequence[Check], *, colour: bool = False) -> str:
    """Return one line per check, its remedy below it, and the count of each state last.

    Texts of several lines stay aligned.
    """
    width = max((len(check.name) for check in checks), default=0)
    indent = " " * (width + 11)
    lines = []
    for check in checks:
        state = f"{check.state:7}"
        if colour and check.state != "ok":
            state = f"{_COLOURS[check.state]}{state}\033[0m"
        lines.append(f"{state}  {check.name:{width}}  " + check.found.replace("\n", "\n" + indent))
        if check.remedy:
            lines.append(indent + "-> " + check.remedy.replace("\n", "\n" + indent))
    number = Counter(check.state for check in checks)
    counts = [f"{number[state]} {state}{'s' * (number[state] != 1)}" for state in ("warning", "error")]
    return "\n".join([*lines, ", ".join([f"{number['ok']} ok", *counts])]) + "\n"


def as_json(checks: Sequence[Check]) -> str:
    """Return a JSON object: the worst state, and the checks in order."""
    worst = max((check.state for check in checks), key=list(_COLOURS).index, default="ok")
    tree = {"state": worst, "checks": [asdict(check) for check in checks]}
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
