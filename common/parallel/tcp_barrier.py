"""Barrier over TCP that waits as long as the slowest rank needs.

It serves frameworks whose own messages time out after half a minute.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from common.errors import RunError
from common.processes.addresses import listen
from common.processes.channel import Channel, connect as connect_channel

_JOIN_SECONDS = 60.0
_LATER = 30.0


class TcpBarrier:
    """Star of connections around rank 0, kept until the process that opened it ends.

    peers: connections by rank; rank 0 has one to every other rank, each other rank has one to rank
    0.
    """

    def __init__(self, rank: int, peers: dict[int, Channel]) -> None:
        self._rank = rank
        self._peers = peers
        self._limit: float | None = None

    def wait(self) -> None:
        """Return when every rank has arrived. Raises RunError if one has left the run."""
        if self._rank == 0:
            self._hear()
        for peer in self._peers.values():
            with suppress(OSError):  # the next wait reports a rank that has left
                peer.send({})
        if self._rank > 0:
            self._hear()

    def limit(self, seconds: float) -> None:
        """Limit a wait. Rank 0 gives up first, since it knows which rank is missing."""
        self._limit = seconds if self._rank == 0 else seconds + _LATER

    def _hear(self) -> None:
        for rank, peer in self._peers.items():
            try:
                peer.receive(self._limit)
            except TimeoutError:
                raise RunError(
                    f"rank {self._rank}: no word from rank {rank} for {self._limit:.0f} s; see its"
                    " log, or raise runtime.stall_limit"
                ) from None
            except OSError:
                raise RunError(
                    f"rank {self._rank}: rank {rank} has left the run; see the log of the rank that failed first"
                ) from None


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
        peers: dict[int, Channel] = {}
        with self._listener:
            self._listener.settimeout(2 * _JOIN_SECONDS)
            while len(peers) < size - 1:
                try:
                    peer = Channel(self._listener.accept()[0])
                except TimeoutError:
                    missing = ", ".join(str(rank) for rank in range(1, size) if rank not in peers)
                    raise RunError(
                        f"rank 0: no connection from rank {missing} to port {self.port} for"
                        f" {2 * _JOIN_SECONDS:.0f} s; see their logs, and open the ports between"
                        " the hosts"
                    ) from None
                hello = peer.hello()
                rank, token = hello.get("rank"), str(hello.get("token"))
                if isinstance(rank, int) and secrets.compare_digest(token.encode(), self.token.encode()):
                    peers[rank] = peer
                else:
                    peer.close()
        return TcpBarrier(0, dict(sorted(peers.items())))


def connect(rank: int, address: str, port: int, token: str) -> TcpBarrier:
    """Connect to rank 0. Raises RunError if its host cannot be reached."""
    try:
        peer = connect_channel(address, port, _JOIN_SECONDS)
        peer.send({"rank": rank, "token": token})
    except OSError as error:
        raise RunError(
            f"rank {rank}: port {port} of {address}, the host of rank 0, cannot be reached"
            f" ({error}); open the ports between the hosts"
        ) from None
    return TcpBarrier(rank, {0: peer})
