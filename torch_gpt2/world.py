"""The processes of a run: the groups they form, and what they agree on."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.cluster.environment import Process, torch_variables
from common.config.schema import RunConfig
from common.errors import ConfigError, DivergedError, GPT2Error, RunError, StopRequested
from common.parallel.topology import Coordinates, GroupKind, Topology
from torch_gpt2.device import TorchDevice

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """All processes of the run. Every rank must call a method for any of them to return."""

    rank: int = 0
    size: int = 1
    topology: Topology = field(default_factory=Topology)
    groups: Mapping[GroupKind, dist.ProcessGroup] = field(default_factory=dict)
    """Those of several ranks to which this one belongs."""

    @property
    def at(self) -> Coordinates:
        return self.topology.coordinates(self.rank)

    def sum(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64, the same bits on each."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def largest(self, value: int) -> int:
        if self.size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides. Where that raises one of our errors, it is raised on every rank."""
        if self.size == 1:
            return decide()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = decide()
            except GPT2Error as error:
                answer[1] = error
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]  # type: ignore[no-any-return]

    @property
    def replicas(self) -> dict[int, int]:
        """Each rank, and the first of those that hold the same part of the model."""
        return {rank: self.topology.group(GroupKind.DATA, rank)[0] for rank in range(self.size)}

    def require_equal(self, facts: dict[str, Any], models: Mapping[int, int] | None = None) -> None:
        """Raises ConfigError naming the first fact that differs between ranks, and the ranks. models: with which rank each is compared, 0
        when left out."""
        gathered = self.gather(facts)
        for name in facts:
            for rank, found in enumerate(gathered):
                model = models[rank] if models else 0
                theirs, ours = found[name], gathered[model][name]
                if repr(theirs) == repr(ours):  # nan is not nan
                    continue
                raise ConfigError(
                    f"rank {rank} differs from rank {model} in {name}: {theirs} and {ours}; every host must have the same config, the same"
                    " data, and one output_dir that all of them share"
                )


@contextmanager
def open_world(config: RunConfig, process: Process, device: TorchDevice) -> Iterator[World]:
    """Meet the other processes; nothing to do where there is one. Raises RunError when they cannot be reached, also later on."""
    if process.world_size == 1:
        yield World()
        return
    os.environ.update(torch_variables(process))
    # a little longer than the launcher waits, which knows better whom to blame
    limit = datetime.timedelta(seconds=config.runtime.stall_limit + 30)
    backends = "gloo" if device.kind == "cpu" else f"cpu:gloo,{device.kind}:{device.communication_backend}"
    try:
        dist.init_process_group(backends, timeout=limit)
        with _leaving_together():
            topology = Topology.from_config(config.parallel)
            yield World(rank=process.rank, size=process.world_size, topology=topology, groups=_make_groups(topology, process.rank))
    except (dist.DistError, RuntimeError) as error:
        if not _is_lost_contact(error):
            raise
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"port {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']} is taken; end what uses it, or set MASTER_PORT"
            ) from error
        reason = str(error).strip().partition("\n")[0].partition(" This is typically")[0]
        raise RunError(
            f"rank {process.rank}: no contact with the other ranks ({reason}); see the log of the one that failed first"
        ) from error
    dist.destroy_process_group()


def _make_groups(topology: Topology, rank: int) -> dict[GroupKind, dist.ProcessGroup]:
    found = {}
    for kind in GroupKind:
        for ranks in topology.groups(kind):  # every process makes every group, in the same order
            if len(ranks) > 1:
                group = dist.new_group(ranks)
                if rank in ranks:
                    found[kind] = group
    return found


@contextmanager
def _leaving_together() -> Iterator[None]:
    """Nobody leaves before rank 0 has saved, at the end of the run or after what every rank meets at the same step: rank 0 keeps the
    others' addresses, and launchers end a job as soon as one rank has left with a code other than 0."""
    try:
        yield
    except (StopRequested, DivergedError):
        dist.barrier()
        raise
    dist.barrier()


def _is_lost_contact(error: Exception) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("gloo", "connection closed by peer", "connection reset by peer", "timed out waiting"))
