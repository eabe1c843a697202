"""The processes of a run: the groups they form, and what they agree on."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.cluster.environment import Process, torch_variables
from common.config.schema import RunConfig
from common.errors import ConfigError, RunError
from common.parallel.topology import GroupKind, Topology
from common.parallel.world import CommonWorld, leaving_together
from torch_gpt2.device import TorchDevice

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World(CommonWorld):
    groups: Mapping[GroupKind, dist.ProcessGroup] = field(default_factory=dict)
    """Those of several ranks to which this one belongs."""

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
        with leaving_together(dist.barrier):
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


def _is_lost_contact(error: Exception) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("gloo", "connection closed by peer", "connection reset by peer", "timed out waiting"))
