"""Hostile inputs of every kind: refused by one clear error, or read as an independent reader reads
them.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from common.errors import ConfigError
from tests.fuzz.dice import Dice
from tests.fuzz.engine import AREAS, Case, Differs, Result, inputs_of, judge, memory_limit, run_area
from tests.fuzz.listing import listing

SEED = int(os.environ.get("FUZZ_SEED", "1"))
COUNT = int(os.environ.get("FUZZ_COUNT", "3000"))


def require(result: Result, count: int) -> None:
    assert result.inputs == count
    assert not result.defects, "\n" + result.report(most=20)
    expected = {"caches": {"accepted"}, "manifest_bits": {"refused"}}.get(
        result.area, {"accepted", "refused"}
    )
    assert expected <= result.counts.keys(), f"a fuzzer that sees one outcome: {result.counts}"


@pytest.mark.parametrize("area", AREAS)
def test_two_hundred_inputs(area: str) -> None:
    require(run_area(area, seed=SEED, count=200), 200)


@pytest.mark.campaign
@pytest.mark.parametrize("area", AREAS)
def test_thousands_of_inputs(area: str) -> None:
    """Another seed than the suite's, so that these inputs differ from the suite's."""
    count = inputs_of(area) or COUNT
    result = run_area(area, seed=SEED + 1, count=count)
    print(
        f"\n{result.report()}\n  "
        + ", ".join(f"{kind}: {number}" for kind, number in sorted(result.kinds.items()))
    )
    require(result, count)


@pytest.mark.campaign
def test_generated_inputs() -> None:
    print(f"\n{listing()}")


def test_the_same_seed_gives_the_same_inputs() -> None:
    """On every version of Python: the numbers are written down."""
    dice = Dice("configs", 1, 46)
    assert [dice.below(1000) for _ in range(4)] == NUMBERS
    assert dice.data(4).hex() == DATA
    assert dice.some("abcdef", 3) == SOME


NUMBERS, DATA, SOME = [839, 320, 979, 643], "5dd83896", ["d", "a"]


def _hang() -> None:
    while True:
        pass


def _recurse() -> None:
    _recurse()


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (lambda: None, "accepted"),
        (lambda: _raise(ConfigError("x.yaml: no")), "refused"),
        (lambda: _raise(ConfigError("no")), "message"),
        (lambda: _raise(ConfigError("")), "message"),
        (lambda: _raise(ConfigError("x.yaml" * 1000 + " ")), "refused"),
        (lambda: _raise(ConfigError("x.yaml: no\n" * 1000)), "message"),
        (lambda: _raise(OSError("x.yaml")), "errno"),
        (lambda: _raise(SystemExit(2)), "traceback"),
        (lambda: _raise(Differs("other values")), "silent"),
        (_recurse, "traceback"),
        (_hang, "hang"),
        (lambda: bytearray(2**33), "memory"),
    ],
)
def test_outcomes_are_told_apart(run: object, outcome: str) -> None:
    with memory_limit():
        assert judge(Case(kind="", run=run, names=("x.yaml",)), 0.5)[0] == outcome
    assert judge(
        Case(kind="", run=lambda: 1, names=(), check=lambda one: f"{one} is not 2"), 0.5
    ) == ("silent", "1 is not 2")


def test_an_input_that_kills_its_worker_is_one_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUZZ_DIE_AT", "2")
    result = run_area("manifest_bits", seed=1, count=4)
    assert result.inputs == 4 and [
        (defect.number, defect.outcome) for defect in result.defects if defect.outcome == "died"
    ] == [(2, "died")]
    assert "python -m tests.fuzz manifest_bits --seed 1 --only 2" in result.report()
