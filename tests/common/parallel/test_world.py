"""Agreement among ranks, with values gathered from a list, and the order in which they end."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from common.errors import ConfigError, DataError, GPT2Error, StopRequested, StorageError
from common.parallel.topology import Topology
from common.parallel.world import WorldBase, exit_barrier


@dataclass(frozen=True, kw_only=True)
class Told(WorldBase):
    """A rank that is told what all ranks have given."""

    answer: Callable[[Any], list[Any]] = lambda own: [own]

    def gather(self, value: Any) -> list[Any]:
        return self.answer(value)


def test_numbers_of_all_ranks() -> None:
    world = Told(size=3, answer=lambda own: [own, (1e16, 1.0), (-1e16, 1.0)])
    assert world.sum(1.0, 2.0) == [1.0, 4.0], "no digit is lost"
    assert Told(size=3, answer=lambda own: [own, 15, 0]).all_reduce_max(9) == 15
    assert Told().sum(0.5) == [0.5] and Told().all_reduce_max(3) == 3


def test_decisions_and_errors_of_rank_0_hold_everywhere() -> None:
    given: list[Any] = []

    def answer(own: Any) -> list[Any]:
        given.append(own)
        return [own, [None, None]]

    first = Told(rank=0, size=2, answer=answer)
    assert first.decide_on_rank_0(lambda: "resume") == "resume"

    def fails() -> str:
        raise DataError("no data")

    with pytest.raises(DataError, match="no data"):
        first.decide_on_rank_0(fails)
    for answer, expected in zip(given, ("resume", None), strict=True):
        other = Told(rank=1, size=2, answer=lambda own, answer=answer: [answer, own])
        with nullcontext() if expected else pytest.raises(DataError, match="no data"):
            assert other.decide_on_rank_0(lambda: pytest.fail("rank 1 decides nothing")) == expected


def test_the_first_fact_that_differs_is_named() -> None:
    facts = {"seed": 1, "rate": float("nan")}
    Told(size=2, answer=lambda own: [own, dict(own)]).require_equal(facts)
    world = Told(
        size=4,
        topology=Topology(data=2, tensor=2),
        answer=lambda own: [own, {**own, "seed": 2}, own, {**own, "seed": 2}],
    )
    with pytest.raises(ConfigError, match="rank 1 differs from rank 0 in seed: 2 and 1"):
        world.require_equal(facts)
    assert world.replicas == {0: 0, 1: 1, 2: 0, 3: 1}
    world.require_equal(facts, world.replicas)


@pytest.mark.parametrize("error", [None, StopRequested(15, "stopped")])
def test_nobody_leaves_before_the_others(error: GPT2Error | None) -> None:
    """Errors that all ranks meet at one step. A launcher would kill rank 0 in its save when
    another had left.
    """
    met: list[str] = []
    with pytest.raises(type(error)) if error else nullcontext(), exit_barrier(lambda: met.append("barrier")):
        if error:
            raise error
    assert met == ["barrier"]


def test_an_error_of_one_rank_waits_for_nobody() -> None:
    with pytest.raises(StorageError), exit_barrier(lambda: pytest.fail("waits")):
        raise StorageError("disk full")
