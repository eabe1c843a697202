"""Whole numbers in text from outside: arguments, environment variables, words of other programs.

Only the ASCII digits 0 to 9 count. Python's ``int`` also takes signs, blanks, underscores and the digits of every other script, and
raises an error of its own above 4,300 digits.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

MOST_DIGITS = 18
"""So that every number fits into 64 bits."""
MOST_RANKS = 65536
"""Processes of one run, more than any has. Lists with an entry a rank stay small."""


def whole_number(text: str, *, most_digits: int = MOST_DIGITS) -> int | None:
    """Return the number that ``text`` is, or None where it is not a whole number of at most so many digits."""
    return int(text) if len(text) <= most_digits and re.fullmatch("[0-9]+", text) else None


def argument(least: int = 0, most: int = 10**MOST_DIGITS - 1) -> Callable[[str], int]:
    """Return a ``type`` for argparse: a whole number from ``least`` to ``most``."""
    expected = f"a whole number of {least} or more" if most == 10**MOST_DIGITS - 1 else f"a whole number from {least} to {most}"

    def parse(text: str) -> int:
        number = whole_number(text)
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{shortened(text)!r}: expected {expected}")
        return number

    return parse


def shortened(text: str) -> str:
    """Return ``text``, cut to a length that a message can hold."""
    return text if len(text) <= 40 else f"{text[:37]}... ({len(text)} characters)"
