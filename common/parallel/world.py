"""Agreement of all processes of a run, without regard to the backend that carries their messages; and the wait of a
rank until the others have come: what it says meanwhile, and what ends the wait.

Torch's store and MindSpore's scheduler wait in silence, and in a call that Ctrl-C does not reach. So a rank first looks
by itself whether anything answers at the place where they meet. A barrier over TCP serves frameworks whose own messages
time out after half a minute.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common.cluster.environment import Process, in_pod
from common.errors import ConfigError, DivergedError, GPT2Error, RunError, StopRequested
from common.log import LOG
from common.parallel.topology import Coordinates, GroupKind, Topology
from common.processes.addresses import is_here, listen

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
                if repr(theirs) != repr(ours):  # nan differs from itself
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


_FIRST_SECONDS = 5.0
"""Seconds of a usual start, in which nothing is said."""
_AGAIN_SECONDS = 60.0
_ANSWER_SECONDS = 5.0


class Arrival:
    """Wait of one rank. address and port: where the ranks meet. limit: seconds.

    name: the variable that holds the address.
    """

    def __init__(self, process: Process, name: str, address: str, port: int, limit: float) -> None:
        self._process, self._limit = process, limit
        self._name, self._address, self._port = name, address, port
        self._began, self._next = time.monotonic(), _FIRST_SECONDS

    def __str__(self) -> str:
        process = self._process
        return f"rank {process.rank} of {process.world_size}"

    def pause(self, awaited: Callable[[], str], *, aloud: bool = True) -> None:
        """Sleep a moment, and after five seconds and then each minute say what is awaited.

        aloud: whether this rank speaks for its host. Raises RunError after the limit.
        """
        waited = time.monotonic() - self._began
        if waited >= self._limit:
            raise RunError(
                f"{self} has waited {self._limit:g} s (runtime.stall_limit) at {self._address}:{self._port} for"
                f" {awaited()}; see whether it was started, its log, and whether the ports between the hosts are open"
            )
        if waited >= self._next:
            self._next = waited + _AGAIN_SECONDS
            if aloud:
                LOG.warning(f"{self} waits at {self._address}:{self._port} for {awaited()}; {waited:.0f} s")
        time.sleep(min(0.5, 0.01 + waited / 10))

    def reach(self, host: str) -> None:
        """Return when something answers at the place. host: who should listen there.

        Raises ConfigError at once for a name that does not resolve.
        """
        while why := self._refusal():
            self.pause(lambda: f"{host}, which does not answer ({why})")

    def require_here(self) -> None:
        """Return if the place is on this host, where this rank listens already.

        Behind the forwarded port of a container the address is not this host's, and something
        answers there. Raises ConfigError if not. A pod's own name may resolve after some seconds.
        """
        while not is_here(self._address) and (why := self._refusal()):
            if not in_pod(os.environ):
                raise ConfigError(
                    f"{self}: {self._name}={self._address} is not an address of this host, and port"
                    f" {self._port} there does not answer ({why}); the others would look for rank 0"
                    f" there: set {self._name} to an address of this host"
                )
            self.pause(lambda: f"its own address, which does not lead here ({why})")

    def _refusal(self) -> str:
        """Return why nothing answers at the place; empty if something does. Raises ConfigError."""
        try:
            socket.create_connection((self._address, self._port), _ANSWER_SECONDS).close()
        except (socket.gaierror, UnicodeError) as error:  # the second: no name at all, such as a..b
            why = getattr(error, "strerror", None) or str(error)
            if not in_pod(os.environ):  # names of pods appear as these start
                raise ConfigError(
                    f"{self}: {self._name}={self._address} is not an address, and as a name it"
                    f" cannot be resolved here ({why}); set {self._name} to the address or the name"
                    " of the host where the ranks meet, without a port"
                ) from None
            return why
        except OSError as error:
            return error.strerror or str(error)
        return ""


_JOIN_SECONDS = 60.0
_LATER = 30.0
_HELLO_SECONDS, _HELLO_BYTES = 10.0, 64


@dataclass
class TcpBarrier:
    """Star of connections around rank 0, kept until the process that opened it ends.

    An empty line says that a rank has arrived, or from rank 0 that all have.
    """

    rank: int
    peers: dict[int, socket.socket]
    """Connections by rank: rank 0 has one to every other rank, each other rank has one to rank 0."""
    limit: float | None = None
    """Seconds that rank 0 waits at most. It gives up first, since it knows which rank is missing."""

    def wait(self) -> None:
        """Return when every rank has arrived. Raises RunError if one has left the run."""
        if self.rank == 0:
            self._hear()
        for peer in self.peers.values():
            with suppress(OSError):  # the next wait reports a rank that has left
                peer.sendall(b"\n")
        if self.rank > 0:
            self._hear()

    def _hear(self) -> None:
        limit = None if self.limit is None else self.limit + (_LATER if self.rank else 0.0)
        for rank, peer in self.peers.items():
            peer.settimeout(limit)
            try:
                if peer.recv(1) != b"\n":
                    raise ConnectionError
            except OSError as error:
                if isinstance(error, TimeoutError) and limit is not None:  # without one it is the kernel's
                    why = f"no word from rank {rank} for {limit:.0f} s; see its log, or raise runtime.stall_limit"
                else:
                    why = f"rank {rank} has left the run; see the log of the rank that failed first"
                raise RunError(f"rank {self.rank}: {why}") from None


class BarrierServer:
    """Rank 0 before the others have connected. address: the one by which they reach it.

    On one host it is a loopback address, which no other host can reach.
    """

    def __init__(self, address: str) -> None:
        self._listener = listen(address, 0)
        self.port = int(self._listener.getsockname()[1])
        self.token = secrets.token_hex(16)
        """Secret that only the ranks of this run know."""

    def receive(self, size: int) -> TcpBarrier:
        """Wait for the other ranks, which know the port and the token.

        Raises RunError if one does not connect.
        """
        peers: dict[int, socket.socket] = {}
        with self._listener:
            self._listener.settimeout(2 * _JOIN_SECONDS)
            while len(peers) < size - 1:
                try:
                    peer, _ = self._listener.accept()
                except TimeoutError:
                    missing = ", ".join(str(rank) for rank in range(1, size) if rank not in peers)
                    raise RunError(
                        f"rank 0: no connection from rank {missing} to port {self.port} for"
                        f" {2 * _JOIN_SECONDS:.0f} s; see their logs, and open the ports between the hosts"
                    ) from None
                peer.settimeout(_HELLO_SECONDS)
                rank = token = b""
                with suppress(OSError), peer.makefile("rb", buffering=0) as hello:
                    rank, _, token = hello.readline(_HELLO_BYTES).rstrip().partition(b" ")
                if rank.isdigit() and secrets.compare_digest(token, self.token.encode()):
                    peers[int(rank)] = peer
                else:
                    peer.close()
        return TcpBarrier(0, dict(sorted(peers.items())))


def connect(rank: int, address: str, port: int, token: str) -> TcpBarrier:
    """Connect to rank 0. Raises RunError if its host cannot be reached."""
    try:
        peer = socket.create_connection((address, port), _JOIN_SECONDS)
        peer.sendall(f"{rank} {token}\n".encode())
    except OSError as error:
        raise RunError(
            f"rank {rank}: port {port} of {address}, the host of rank 0, cannot be reached"
            f" ({error}); open the ports between the hosts"
        ) from None
    return TcpBarrier(rank, {0: peer})
