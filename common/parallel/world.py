"""What the processes of a run agree on, whatever carries their messages; a backend says how values
are gathered.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common.errors import ConfigError, DivergedError, GPT2Error, StopRequested
from common.parallel.topology import Coordinates, GroupKind, Topology

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WorldBase(ABC):
    """All processes of the run. Every rank must call a method for any of them to return."""

    rank: int = 0
    size: int = 1
    topology: Topology = field(default_factory=Topology)

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""

    def sum(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64, the same bits on each."""
        return [math.fsum(column) for column in zip(*self.gather(values), strict=True)]

    def all_reduce_max(self, value: int) -> int:
        return max(self.gather(value))

    def decide_on_rank_0(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides. Where that raises one of our errors, it is raised on every rank."""
        if self.size == 1:
            return decide()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = decide()
            except GPT2Error as error:
                answer[1] = error
        decided, failure = self.gather(answer)[0]
        if failure is not None:
            raise failure
        return decided  # type: ignore[no-any-return]

    @property
    def at(self) -> Coordinates:
        return self.topology.coordinates(self.rank)

    @property
    def replicas(self) -> dict[int, int]:
        """Each rank, and the first of those that hold the same part of the model."""
        return {rank: self.topology.group(GroupKind.DATA, rank)[0] for rank in range(self.size)}

    def require_equal(self, facts: dict[str, Any], models: Mapping[int, int] | None = None) -> None:
        """Raises ConfigError naming the first fact that differs between ranks, and the ranks.
        models: with which rank each is compared, 0 when left out.
        """
        gathered = self.gather(facts)
        for name in facts:
            for rank, found in enumerate(gathered):
                model = models[rank] if models else 0
                theirs, ours = found[name], gathered[model][name]
                if repr(theirs) == repr(ours):  # nan is not nan
                    continue
                raise ConfigError(
                    f"rank {rank} differs from rank {model} in {name}: {theirs} and {ours}; every"
                    " host must have the same config, the same data, and one output_dir that all"
                    " of them share"
                )


@contextmanager
def exit_barrier(barrier: Callable[[], Any]) -> Iterator[None]:
    """Nobody leaves before rank 0 has saved, at the end of the run or after what every rank meets
    at the same step: rank 0 keeps the others' addresses, and launchers end a job as soon as one
    rank has left with a code other than 0.
    """
    try:
        yield
    except (StopRequested, DivergedError):
        barrier()
        raise
    barrier()
