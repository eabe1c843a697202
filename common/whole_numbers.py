"""Whole numbers in text from outside: arguments, environment variables, output of other programs.

Only the ASCII digits 0 to 9 count. Python's ``int`` also takes signs, blanks, underscores and the
digits of every other script. Above 4,300 digits it raises an error of its own.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterable
from itertools import groupby

MAX_DIGITS = 18
"""Most digits, so that every number fits into 64 bits."""
MAX_RANKS = 65536
"""Most processes of a run, more than any has. Lists with an entry per rank stay small."""


def whole_number(text: str, *, most_digits: int = MAX_DIGITS) -> int | None:
    """Return the number in ``text``, or None unless it is a whole number within the digits."""
    return int(text) if len(text) <= most_digits and re.fullmatch("[0-9]+", text) else None


def argument(least: int = 0, most: int = 10**MAX_DIGITS - 1) -> Callable[[str], int]:
    """Return a ``type`` for argparse: a whole number from ``least`` to ``most``."""
    expected = (
        f"a whole number of {least} or more" if most == 10**MAX_DIGITS - 1 else f"a whole number from {least} to {most}"
    )

    def parse(text: str) -> int:
        number = whole_number(text)
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{shortened(text)!r}: expected {expected}")
        return number

    return parse


def shortened(text: str) -> str:
    """Return ``text``, cut to a length that fits a message."""
    return text if len(text) <= 40 else f"{text[:37]}... ({len(text)} characters)"


def spans(numbers: Iterable[int], *, least: int = 2) -> str:
    """Return numbers as text: ``0-2, 8``. least: number of neighbours that form a span."""
    # neighbours differ from their places by as much
    groups = groupby(enumerate(sorted(numbers)), key=lambda at: at[1] - at[0])
    runs = [[number for _, number in group] for _, group in groups]
    words = [[f"{run[0]}-{run[-1]}"] if len(run) >= least else map(str, run) for run in runs]
    return ", ".join(word for run in words for word in run)


def rank_names(ranks: Collection[int]) -> str:
    """Return names such as ``rank 3`` or ``ranks 0-3, 8``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {spans(ranks) or 'none'}"
