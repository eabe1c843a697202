"""Processes of a run: their groups, and communication for agreement."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.cluster.environment import Process, torch_variables
from common.cluster.rank_environment import network_of_one_host
from common.errors import ConfigError, RunError
from common.parallel.resolved_run import ResolvedRun
from common.parallel.topology import GroupKind, Topology
from common.parallel.world import WorldBase, exit_barrier
from common.processes.addresses import LOOPBACK, is_loopback, listen
from torch_gpt2.device import TorchDevice

T = TypeVar("T")

# torch 2.13 has a new name for it
gather_parts: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class World(WorldBase):
    groups: Mapping[GroupKind, dist.ProcessGroup] = field(default_factory=dict)
    """Groups of several ranks that this rank belongs to, by kind."""
    device: TorchDevice | None = None
    """Device of this rank. An accelerator sends numbers over its own network."""

    def sum(self, *values: float) -> list[float]:
        """Return sums over all ranks in float64, with the same bits on each."""
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

    def total(self, value: Tensor, power: int = 1) -> Tensor:
        """Return the sum of value ** power over all ranks, float64, with the same bits on each.

        value: float32 scalar on the device. The host waits only if the device is a CPU.
        """
        if self.size == 1 or not self._runs_ahead:
            wide = value.double() ** power
            if self.size > 1:
                dist.all_reduce(wide)
            return wide
        values = value.new_empty(self.size)  # float32, since Ascend's network sums no float64
        gather_parts(values, value.reshape(1), group=self._everyone)
        return (values.double() ** power).sum()

    def start_max(self, value: int) -> Callable[[], int]:
        if self.size == 1 or not self._runs_ahead:
            return super().start_max(value)
        assert self.device is not None
        largest = torch.full((1,), value, dtype=torch.int32, device=self.device.torch_device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._everyone)
        wait = self.device.fetch(largest)
        return lambda: int(wait()[0])

    @property
    def _runs_ahead(self) -> bool:
        return self.device is not None and self.device.runs_ahead

    @property
    def _everyone(self) -> dist.ProcessGroup | None:
        """Group of all ranks. One that exists is preferred, since each group has buffers on the
        device.
        """
        return next((group for group in self.groups.values() if group.size() == self.size), None)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


@contextmanager
def open_world(config: ResolvedRun, process: Process, device: TorchDevice) -> Iterator[World]:
    """Connect to the other processes, if there are any. Raises RunError if they cannot be reached,
    also later.
    """
    if process.world_size == 1:
        yield World()
        return
    os.environ.update(torch_variables(process))
    for name, value in network_of_one_host(process).items():
        os.environ.setdefault(name, value)
    # a little longer than the launcher waits, which can better tell which rank has failed
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
                device=device,
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
    """Return a store for the processes of one host, closed to all others.

    torch's own store listens at all addresses. Returns None if torch makes the store: for several
    hosts, and under torchrun. Raises ConfigError if the port is taken.
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
