"""Processes of a run: their groups, and communication for agreement."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mindspore.communication import get_group_size, get_rank, init

from common.cluster.environment import Process
from common.cluster.rank_environment import hccl_seconds
from common.errors import ConfigError, RunError
from common.log import LOG
from common.parallel.run import Run
from common.parallel.topology import GroupKind
from common.parallel.world import Arrival, BarrierServer, TcpBarrier, WorldBase, connect, exit_barrier
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.parallel.collectives import Group, exchange, exchange_numbers, make_group, prepare_messages

T = TypeVar("T")
_KINDS = (GroupKind.TENSOR, GroupKind.DATA, GroupKind.EMBEDDING)
_LOST = re.compile(
    r"launch kernel failed, name:\S*(all_?reduce|all_?gather|reduce_?scatter)|(recv|send)"
    r" failed|heartbeat|scheduler|hccl",
    re.IGNORECASE,
)
"""Messages of MindSpore 2.10 when another rank has gone, or did not answer within half a minute."""
_RANK_TABLE = re.compile("rank_table_file", re.IGNORECASE)
"""Its message about a file of this host, which names HCCL too."""


@dataclass(frozen=True, kw_only=True)
class World(WorldBase):
    everyone: Group | None = None
    barrier: TcpBarrier | None = None
    """Barrier of all ranks, for devices whose messages time out."""

    def meet(self) -> None:
        """Wait for all ranks if needed, so that no rank exceeds the time limit of another's message."""
        if self.barrier is not None:
            self.barrier.wait()

    def gather(self, value: T) -> list[T]:
        if self.everyone is None:
            return [value]
        self.meet()
        given = exchange(self.everyone, pickle.dumps(value))
        return [pickle.loads(data) for data in given]  # noqa: S301  (of this run's own ranks)

    def all_reduce_max(self, value: int) -> int:
        if self.everyone is None:
            return value
        self.meet()
        return max(exchange_numbers(self.everyone, value))


@contextmanager
def open_world(config: Run, process: Process, device: MindSporeDevice) -> Iterator[World]:
    """Connect to the other processes, if there are any. Raises RunError if they cannot be reached, also later."""
    if process.world_size == 1:
        yield World()
        return
    if device.kind == "cpu" and not os.environ.get("MS_SCHED_HOST"):
        raise ConfigError(
            f"rank {process.rank}: MindSpore's processes meet through its scheduler, and {process.launcher} has not"
            " named one (MS_SCHED_HOST); start them with scripts/run_distribute.sh or msrun"
        )
    # a little longer than the launcher waits, which can better tell which rank has failed
    limit = config.runtime.stall_limit + 30
    _wait_for_scheduler(process, limit)
    try:
        init()
        if (get_rank(), get_group_size()) != (process.rank, process.world_size):
            raise ConfigError(
                f"rank {process.rank} of {process.world_size} is rank {get_rank()} of {get_group_size()} for"
                " MindSpore; the variables of two launchers contradict each other: start it in a clean shell"
            )
        topology = config.topology
        everyone = make_group(
            range(process.world_size), process.rank, process.world_size, native=device.native_collectives
        )
        if topology.pipeline > 1:
            prepare_messages(process.world_size)
        world = World(
            rank=process.rank,
            size=process.world_size,
            topology=topology,
            groups={  # MindSpore lets only members create a group
                kind: make_group(ranks, process.rank, process.world_size, native=device.native_collectives)
                for kind in _KINDS
                if len(ranks := topology.group(kind, process.rank)) > 1
            },
            everyone=everyone,
            barrier=None if device.native_collectives else _barrier(everyone, limit),
        )
        # no collective on a CPU, where one fails if a peer has already exited
        with exit_barrier(partial(world.gather, None) if world.barrier is None else world.barrier.wait):
            yield world
    except RuntimeError as error:
        if "wheel was not installed" in str(error):
            raise ConfigError(
                f"rank {process.rank}: CANN's Python package hccl, which MindSpore meets the others"
                " with, cannot be imported; source CANN's set_env.sh in the shell that starts the"
                " ranks, or pip install the hccl wheel below CANN's folder"
            ) from error
        if not _LOST.search(str(error)) or _RANK_TABLE.search(str(error)):
            raise
        reason = next(line for line in str(error).splitlines() if line.strip(" -"))
        raise RunError(
            f"rank {process.rank}: no contact with the other ranks ({reason}); see the log of the one that failed first"
        ) from error


def _wait_for_scheduler(process: Process, limit: float) -> None:
    """Wait until the scheduler answers, if there is one, and give MindSpore's own waits the limit.

    MindSpore's wait for the other ranks holds Python back: it is told before it begins, and Ctrl-C acts after it.
    """
    os.environ.setdefault("MS_TOPO_TIMEOUT", str(int(limit)))
    os.environ.setdefault("HCCL_EXEC_TIMEOUT", hccl_seconds(limit))
    address, port = os.environ.get("MS_SCHED_HOST"), os.environ.get("MS_SCHED_PORT")
    if address and port and port.isdecimal():
        arrival = Arrival(process, "MS_SCHED_HOST", address, int(port), limit)
        arrival.reach("MindSpore's scheduler")
        LOG.info(f"{arrival} meets the others at {address}:{port}")


_barriers: dict[str, TcpBarrier] = {}
"""Barriers by group, kept because a process connects to the others only once for all its runs."""


def _barrier(everyone: Group, seconds: float) -> TcpBarrier:
    if everyone.name not in _barriers:
        host = BarrierServer(os.environ["MS_SCHED_HOST"]) if everyone.rank == 0 else None
        given = exchange(everyone, pickle.dumps(host and (host.port, host.token)))
        port, token = pickle.loads(given[0])  # noqa: S301
        _barriers[everyone.name] = (
            host.receive(everyone.size)
            if host is not None
            else connect(everyone.rank, os.environ["MS_SCHED_HOST"], port, token)
        )
    _barriers[everyone.name].limit = seconds
    return _barriers[everyone.name]


def serve_as_scheduler() -> None:
    """Serve as the scheduler by which ranks connect, with MS_ROLE=MS_SCHED. Returns when all ranks have ended."""
    init()
