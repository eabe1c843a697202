"""Shares of cores, from an invented /sys tree."""

import os
from pathlib import Path

import pytest

from common.processes.process_tree import cores_of_ranks, in_order, share


def write_tree(system: Path, places: dict[int, tuple[int, int]]) -> None:
    for number, (package, core) in places.items():
        folder = system / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")


def test_threads_of_a_core_and_cores_of_a_package_are_neighbours(tmp_path: Path) -> None:
    """Two packages of two cores of two threads, numbered as Linux does: first all first threads,
    packages in turn.
    """
    write_tree(tmp_path, {number: (number % 2, number // 2 % 2) for number in range(8)})
    assert in_order(range(8), tmp_path) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert in_order({5, 1, 0, 7}, tmp_path) == [0, 1, 5, 7]
    assert in_order({9, 0, 2}, tmp_path) == [0, 2, 9], "one without a place"


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        (8, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (8, 3, [(0, 1, 2), (3, 4, 5), (6, 7)]),
        (5, 4, [(0, 1), (2,), (3,), (4,)]),
        (2, 2, [(0,), (1,)]),
        (2, 3, [(), (), ()]),
        (0, 1, [()]),
    ],
)
def test_shares(cores: int, ranks: int, expected: list[tuple[int, ...]]) -> None:
    assert share(list(range(cores)), ranks) == expected


def test_only_cores_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert cores_of_ranks(1)[0] != ()
    assert set(cores_of_ranks(1)[0]) == allowed
    assert cores_of_ranks(len(allowed) + 1) == [()] * (len(allowed) + 1)
