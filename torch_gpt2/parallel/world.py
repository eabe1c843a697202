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
from common.cluster.rank_environment import network_of_one_host
from common.errors import ConfigError, RunError
from common.parallel.resolved_run import ResolvedRun
from common.parallel.topology import GroupKind, Topology
from common.parallel.world import WorldBase, exit_barrier
from common.processes.addresses import LOOPBACK, is_loopback, listen
from torch_gpt2.device import TorchDevice

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World(WorldBase):
    groups: Mapping[GroupKind, dist.ProcessGroup] = field(default_factory=dict)
    """Those of several ranks to which this one belongs."""

    def sum(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64, the same bits on each."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def all_reduce_max(self, value: int) -> int:
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
def open_world(config: ResolvedRun, process: Process, device: TorchDevice) -> Iterator[World]:
    """Meet the other processes; nothing to do where there is one. Raises RunError when they cannot
    be reached, also later on.
    """
    if process.world_size == 1:
        yield World()
        return
    os.environ.update(torch_variables(process))
    for name, value in network_of_one_host(process).items():
        os.environ.setdefault(name, value)
    # a little longer than the launcher waits, which knows better whom to blame
    limit = datetime.timedelta(seconds=config.runtime.stall_limit + 30)
    backends = (
        "gloo" if device.kind == "cpu" else f"cpu:gloo,{device.kind}:{device.communication_backend}"
    )
    try:
        store = _local_store(process, limit)
        where = (
            {}
            if store is None
            else {"store": store, "rank": process.rank, "world_size": process.world_size}
        )
        dist.init_process_group(backends, timeout=limit, **where)
        with exit_barrier(dist.barrier):
            topology = config.topology
            yield World(
                rank=process.rank,
                size=process.world_size,
                topology=topology,
                groups=_make_groups(topology, process.rank),
            )
    except (dist.DistError, RuntimeError) as error:
        if not _is_lost_contact(error):
            raise
        if "EADDRINUSE" in str(error):
            raise _taken() from error
        reason = str(error).strip().partition("\n")[0].partition(" This is typically")[0]
        raise RunError(
            f"rank {process.rank}: no contact with the other ranks ({reason}); see the log of the"
            " one that failed first"
        ) from error
    dist.destroy_process_group()


def _local_store(
    process: Process,
    limit: datetime.timedelta,
) -> dist.TCPStore | None:  # type: ignore[name-defined]
    """Where the processes of one host meet, closed to all others: torch's own store listens at all
    addresses. None where torch makes it: for several hosts, and under torchrun, whose store serves.
    Raises ConfigError where the port is taken.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not is_loopback(address) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    listener = None
    if process.rank == 0:
        try:
            listener = listen(LOOPBACK if address == "localhost" else address, port).detach()
        except OSError as error:
            raise _taken() from error
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        process.world_size,
        process.rank == 0,
        timeout=limit,
        master_listen_fd=listener,
    )


def _taken() -> ConfigError:
    return ConfigError(
        f"port {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']} is taken; end what uses"
        " it, or set MASTER_PORT"
    )


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
    return any(
        word in text
        for word in (
            "gloo",
            "connection closed by peer",
            "connection reset by peer",
            "timed out waiting",
        )
    )
