"""Where ranks wait for each other, however long one of them takes; for frameworks whose own messages give up after half a minute."""

from __future__ import annotations

import secrets
import socket
import struct
from contextlib import suppress

from common.cluster.listening import listen
from common.errors import RunError

_RANK = struct.Struct("!I")
_TOKEN_BYTES = 16
_HELLO_SECONDS = 10.0
_JOIN_SECONDS = 60.0
_LATER = 30.0


class TcpBarrier:
    """A star of connections with rank 0 in its middle. The process that opened one keeps it to its end."""

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        """peers: connections by rank; those of all others on rank 0, that of rank 0 on the others."""
        self._rank = rank
        self._peers = peers

    def wait(self) -> None:
        """Return when every rank has come. Raises RunError when one has gone instead."""
        if self._rank == 0:
            self._hear()
        self._tell()
        if self._rank > 0:
            self._hear()

    def limit(self, seconds: float) -> None:
        """How long a wait may take. Rank 0 gives up first, since it knows who has not come."""
        for peer in self._peers.values():
            peer.settimeout(seconds if self._rank == 0 else seconds + _LATER)

    def _hear(self) -> None:
        for rank, peer in self._peers.items():
            word = b""
            try:
                word = peer.recv(1)
            except TimeoutError:
                raise RunError(
                    f"rank {self._rank}: no word from rank {rank} for {peer.gettimeout():.0f} s; see its log, or raise runtime.stall_limit"
                ) from None
            except OSError:
                pass
            if not word:
                raise RunError(f"rank {self._rank}: rank {rank} has left the run; see the log of the one that failed first")

    def _tell(self) -> None:
        for peer in self._peers.values():
            with suppress(OSError):  # of one that has gone the next wait tells
                peer.sendall(b"+")


class BarrierServer:
    """Rank 0 before the others know of it. address: by which they reach it. Of a run on one host it is a loopback address, and nobody
    else can call."""

    def __init__(self, address: str) -> None:
        self._listener = listen(address, 0)
        self.port = int(self._listener.getsockname()[1])
        self.token = secrets.token_bytes(_TOKEN_BYTES)

    def receive(self, size: int) -> TcpBarrier:
        """Once all others have been told the port and the token, which keeps strangers out. Raises RunError where one does not come."""
        peers: dict[int, socket.socket] = {}
        with self._listener:
            self._listener.settimeout(2 * _JOIN_SECONDS)
            while len(peers) < size - 1:
                try:
                    peer, _ = self._listener.accept()
                except TimeoutError:
                    missing = ", ".join(str(rank) for rank in range(1, size) if rank not in peers)
                    raise RunError(
                        f"rank 0: no connection from rank {missing} to port {self.port} for {2 * _JOIN_SECONDS:.0f} s;"
                        " see their logs, and open the ports between the hosts"
                    ) from None
                hello = b""
                peer.settimeout(_HELLO_SECONDS)
                with suppress(OSError):
                    hello = peer.recv(_TOKEN_BYTES + _RANK.size, socket.MSG_WAITALL)
                if len(hello) == _TOKEN_BYTES + _RANK.size and secrets.compare_digest(hello[:_TOKEN_BYTES], self.token):
                    peer.settimeout(None)
                    peers[_RANK.unpack(hello[_TOKEN_BYTES:])[0]] = _without_delay(peer)
                else:
                    peer.close()
        return TcpBarrier(0, dict(sorted(peers.items())))


def connect(rank: int, address: str, port: int, token: bytes) -> TcpBarrier:
    """Raises RunError where the host of rank 0 cannot be reached."""
    try:
        peer = socket.create_connection((address, port), timeout=_JOIN_SECONDS)
        peer.settimeout(None)
        peer.sendall(token + _RANK.pack(rank))
    except OSError as error:
        raise RunError(
            f"rank {rank}: port {port} of {address}, the host of rank 0, cannot be reached ({error}); open the ports between the hosts"
        ) from None
    return TcpBarrier(rank, {0: _without_delay(peer)})


def _without_delay(peer: socket.socket) -> socket.socket:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return peer
