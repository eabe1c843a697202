"""Agreement of all processes of a run, without regard to the backend that carries their messages."""

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
    groups: Mapping[GroupKind, Any] = field(default_factory=dict)
    """The framework's groups of several ranks that this rank belongs to, by kind."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""

    def sum(self, *values: float) -> list[float]:
        """Return sums over all ranks, in float64, with the same bits on each."""
        return [math.fsum(column) for column in zip(*self.gather(values), strict=True)]

    def all_reduce_max(self, value: int) -> int:
        return max(self.gather(value))

    def start_max(self, value: int) -> Callable[[], int]:
        """Start to find the largest value of all ranks; the function that is returned waits for
        it. A device that carries messages itself does so in the order of its work.
        """
        largest = self.all_reduce_max(value)
        return lambda: largest

    def decide_on_rank_0(self, decide: Callable[[], T]) -> T:
        """Return the decision of rank 0 on every rank. Raises its error, if one of ours, on every rank."""
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
    def has_loss(self) -> bool:
        """Whether this rank's loss counts: the last stage has it, and all tensor-parallel ranks have the same."""
        return self.at.tensor == 0 and self.topology.holds_head(self.rank)

    @property
    def replicas(self) -> dict[int, int]:
        """Map each rank to the first of those that hold the same part of the model."""
        return {rank: self.topology.group(GroupKind.DATA, rank)[0] for rank in range(self.size)}

    def require_equal(self, facts: dict[str, Any], models: Mapping[int, int] | None = None) -> None:
        """Check that all ranks have the same facts. Raises ConfigError naming the first difference and ranks.

        models: the rank with which each is compared; 0 when left out.
        """
        gathered = self.gather(facts)
        for name in facts:
            for rank, found in enumerate(gathered):
                model = models[rank] if models else 0
                theirs, ours = found[name], gathered[model][name]
                if repr(theirs) == repr(ours):  # nan differs from itself
                    continue
                raise ConfigError(
                    f"rank {rank} differs from rank {model} in {name}: {theirs} and {ours}; every"
                    " host must have the same config, the same data, and one shared output_dir"
                )


@contextmanager
def exit_barrier(barrier: Callable[[], Any]) -> Iterator[None]:
    """Barrier at the end of the run, or after an error that every rank meets at the same step.

    No rank leaves before rank 0 has saved. Rank 0 keeps the others' addresses, and launchers end a
    job as soon as one rank exits with a code other than 0.
    """
    try:
        yield
    except (StopRequested, DivergedError):
        barrier()
        raise
    barrier()
