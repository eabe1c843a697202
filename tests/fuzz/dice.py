"""Random choices that are the same on every version of Python: of ``random.Random`` only ``random``
and ``getrandbits`` are used.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Dice:
    """The choices of one input, which follow from its area, its seed and its number."""

    def __init__(self, area: str, seed: int, number: int) -> None:
        self.number = number
        self._random = random.Random(f"{area}/{seed}/{number}")

    def below(self, end: int) -> int:
        """Return a number from 0 to ``end`` - 1."""
        return int(self._random.random() * end)

    def between(self, first: int, last: int) -> int:
        """Return a number from ``first`` to ``last``, both included."""
        return first + self.below(last - first + 1)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def some(self, items: Sequence[Item], most: int) -> list[Item]:
        """Return up to ``most`` different items in random order, at least one."""
        rest, found = list(items), []
        for _ in range(min(self.between(1, most), len(rest))):
            found.append(rest.pop(self.below(len(rest))))
        return found

    def data(self, length: int) -> bytes:
        return bytes(self._random.getrandbits(8) for _ in range(length))
