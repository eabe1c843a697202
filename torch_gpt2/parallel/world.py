"""Processes of a run: their groups, and communication for agreement."""

from __future__ import annotations

import datetime
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.cluster.environment import Process, in_pod, torch_variables
from common.cluster.rank_environment import hccl_seconds, network_of
from common.errors import ConfigError, RunError
from common.log import rank_names
from common.parallel.run import Run
from common.parallel.topology import GroupKind, Topology
from common.parallel.world import Arrival, WorldBase, exit_barrier
from common.processes.addresses import LOOPBACK, is_loopback, listen
from torch_gpt2.device import TorchDevice, wide_type
from torch_gpt2.private_api import limit_new_groups

T = TypeVar("T")

# torch 2.13 has a new name for it
gather_parts: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class World(WorldBase):
    device: TorchDevice | None = None
    """Device of this rank. An accelerator sends numbers over its own network."""

    def sum(self, *values: float) -> list[float]:
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
        """Return the sum of value ** power over all ranks, with the same bits on each.

        value: float32 scalar on the device; the sum is of its ``wide_type``. The host waits only if
        the device is a CPU.
        """
        dtype = wide_type(value.device)
        if self.size == 1 or not self._runs_ahead:
            wide = value.to(dtype) ** power
            if self.size > 1:
                dist.all_reduce(wide)
            return wide
        values = value.new_empty(self.size)  # float32, since Ascend's network sums no float64
        gather_parts(values, value.reshape(1), group=self._everyone)
        return (values.to(dtype) ** power).sum()

    def start_max(self, value: int) -> Callable[[], int]:
        if self.size == 1 or not self._runs_ahead:
            return super().start_max(value)
        assert self.device is not None
        largest = torch.full((1,), value, dtype=torch.int32, device=self.device.torch_device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._everyone)
        wait = self.device.to_host(largest)
        return lambda: int(wait()[0])

    @property
    def _runs_ahead(self) -> bool:
        return self.device is not None and self.device.runs_ahead

    @property
    def _everyone(self) -> dist.ProcessGroup | None:
        """Group of all ranks. One that exists is preferred, since each group has buffers on the device."""
        return next((group for group in self.groups.values() if group.size() == self.size), None)

    def gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


@contextmanager
def open_world(config: Run, process: Process, device: TorchDevice) -> Iterator[World]:
    """Connect to the other processes, if there are any. Raises RunError if they cannot be reached, also later."""
    if process.world_size == 1:
        yield World()
        return
    os.environ.update(torch_variables(process))
    for name, value in network_of(process).items():
        os.environ.setdefault(name, value)
    # a little longer than the launcher waits, which can better tell which rank has failed
    limit = datetime.timedelta(seconds=config.runtime.stall_limit + 30)
    backends = "gloo" if device.kind == "cpu" else f"cpu:gloo,{device.kind}:{device.communication_backend}"
    limit_new_groups(limit)
    os.environ.setdefault("HCCL_EXEC_TIMEOUT", hccl_seconds(limit.total_seconds()))
    try:
        store = _open_store(process, limit)
        dist.init_process_group(backends, timeout=limit, store=store, rank=process.rank, world_size=process.world_size)
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
        words = ("gloo", "connection closed by peer", "connection reset by peer", "timed out waiting")
        if not isinstance(error, dist.DistError) and not any(word in str(error).lower() for word in words):
            raise
        reason = str(error).strip().partition("\n")[0].partition(" This is typically")[0]
        raise RunError(
            f"rank {process.rank}: no contact with the other ranks ({reason}); see the log of the one that failed first"
        ) from error
    dist.destroy_process_group()


def _open_store(process: Process, limit: datetime.timedelta) -> Any:
    """Return the store by which the ranks meet, once all have come.

    It is that of rank 0, on one host closed to all others, or that of torchrun's agent. Raises
    ConfigError if the port is taken, or the address not that of rank 0; RunError after the limit.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    arrival = Arrival(process, "MASTER_ADDR", address, port, limit.total_seconds())
    listener = None
    if process.rank > 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        arrival.reach("rank 0")
    else:
        # PyTorchJob's first operators told the pod of rank 0 localhost, and the others its name
        is_open = in_pod(os.environ) and process.local_world_size < process.world_size
        here = "" if is_open else LOOPBACK if address == "localhost" else address
        try:
            listener = listen(here, port).detach()
        except OSError as error:
            raise ConfigError(
                f"port {port} of {address} is taken; end what uses it, or set MASTER_PORT ({error.strerror})"
            ) from error
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address if listener is None or is_loopback(address) else LOOPBACK,
        port,
        process.world_size,
        listener is not None,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    if listener is not None:
        arrival.require_here()
    return dist.PrefixStore(_meet(store, process, arrival), store)  # type: ignore[attr-defined]


_QUESTIONS = ("has come", "is still there")
"""Asked of all ranks before they connect, since one may have died while it waited."""


def _meet(store: Any, process: Process, arrival: Arrival) -> str:
    """Return a name of this attempt once all ranks have answered both questions.

    Under torchrun a store outlives the ranks, and holds what those of an earlier attempt wrote.
    Rank 0 therefore names the attempt, and takes the name away before the last answer is known.
    """
    attempt, rank = secrets.token_hex(8) if process.rank == 0 else "", process.rank
    answered = 0

    def keys() -> list[str]:
        question = _QUESTIONS[answered]
        return [f"{attempt} rank {other} {question}" for other in range(process.world_size)]

    def missing() -> str:
        found = [other for other, key in enumerate(keys()) if not store.check([key])]
        return rank_names(found if attempt else [0])

    if rank == 0:
        store.set("attempt", attempt)
    while True:
        if rank > 0 and store.check(["attempt"]):
            attempt = store.get("attempt").decode() or attempt
        answered = sum(store.check([f"{attempt} each {question}"]) for question in _QUESTIONS)
        if answered == len(_QUESTIONS):
            return attempt
        if attempt:
            store.set(keys()[rank], b"")
        if rank == 0 and store.check(keys()):  # the others do not look at all the answers
            if answered + 1 == len(_QUESTIONS):
                store.set("attempt", b"")
            store.set(f"{attempt} each {_QUESTIONS[answered]}", b"")
        else:
            arrival.pause(missing, aloud=process.local_rank == 0)


def _make_groups(topology: Topology, rank: int) -> dict[GroupKind, dist.ProcessGroup]:
    found = {}
    for kind in GroupKind:
        for ranks in topology.groups(kind):  # every process makes every group, in the same order
            if len(ranks) > 1:
                group = dist.new_group(ranks)
                if rank in ranks:
                    found[kind] = group
    return found
