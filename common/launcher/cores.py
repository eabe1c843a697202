"""Pinning of ranks to processor cores of this host."""

from __future__ import annotations

import os
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/cpu")


def cores_of_ranks(ranks: int) -> list[tuple[int, ...]]:
    """Divide the cores of this process among ``ranks``; shares are empty if there are fewer cores.

    Neighbours share caches and memory, so cores are ordered by package, core and thread. They are
    then split into runs of equal length, the first ones longer by a core if the number does not
    divide.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return share(in_order(allowed), ranks)


def in_order(cores: Collection[int], system: Path = _SYSTEM) -> list[int]:
    """Sort by (package, core, thread) if ``system`` has them for every core, else by number."""
    numbers = sorted(cores)
    try:
        places = {
            number: [
                int((system / f"cpu{number}" / "topology" / name).read_text())
                for name in ("physical_package_id", "core_id")
            ]
            for number in numbers
        }
    except (OSError, ValueError):
        return numbers
    return sorted(numbers, key=lambda number: (places[number], number))


def share(cores: list[int], ranks: int) -> list[tuple[int, ...]]:
    """Split into ``ranks`` runs whose lengths differ by at most one."""
    if len(cores) < ranks:
        return [()] * ranks
    length, longer = divmod(len(cores), ranks)
    starts = [rank * length + min(rank, longer) for rank in range(ranks + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(starts)]
