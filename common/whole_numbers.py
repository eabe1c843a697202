"""Whole numbers in text from outside: arguments, environment variables, output of other programs."""

from __future__ import annotations

import re

MAX_DIGITS = 18
"""Most digits, so that every number fits into 64 bits."""
MAX_RANKS = 65536
"""Most processes of a run, more than any has. Lists with an entry per rank stay small."""


def whole_number(text: str) -> int | None:
    """Return the number in ``text``, or None unless it is 1 to 18 of the digits 0 to 9.

    Python's ``int`` also takes signs, blanks, underscores and the digits of every other script.
    """
    return int(text) if re.fullmatch(f"[0-9]{{1,{MAX_DIGITS}}}", text) else None
