"""Channel of JSON objects between two processes, one per line, over TCP.

Launchers and ranks use it. A caller first sends a hello that identifies it; otherwise the other side closes the
connection. Anyone who reaches the port of a launcher can call, so the port belongs in the network of the cluster.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from common.structured_files import MalformedError, parse_json

HELLO_SECONDS = 10.0
"""Seconds to wait for the first object of a caller."""
_SEND_SECONDS = 5
_LINE_BYTES = 1 << 20


class ChannelEndedError(ConnectionError):
    """The other end closed the connection, or sent something invalid."""


class Channel:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""
        connection.setblocking(True)  # settimeout limits sending by other threads too
        self._sending = threading.Lock()
        self.ended = threading.Event()
        """Set when nothing more can be received."""
        with suppress(OSError):  # a socket of another kind than TCP
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._limit(socket.SO_SNDTIMEO, _SEND_SECONDS)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send an object. Raises OSError."""
        with self._sending:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, limit: float | None) -> dict[str, Any]:
        """Return the next object.

        Raises TimeoutError after ``limit`` seconds, and ChannelEndedError at the end and for a line
        that is not an object. Other kinds of OSError come from the network.
        """
        try:
            self._limit(socket.SO_RCVTIMEO, limit or 0)
            message = parse_json(self._line())
        except MalformedError:
            message = None
        except BlockingIOError:
            raise TimeoutError("nothing has come in time") from None
        except OSError:
            self.ended.set()
            raise
        if not isinstance(message, dict):
            self.ended.set()
            raise ChannelEndedError("its line is not an object")
        return message

    def hello(self) -> dict[str, Any]:
        """Return the caller's first object; empty if none arrives in time."""
        with suppress(OSError):
            return self.receive(HELLO_SECONDS)
        return {}

    def finish(self) -> None:
        """Announce that nothing more will be sent.

        The rest that the peer sends must be read, otherwise the last objects sent would be lost.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _limit(self, option: int, seconds: float) -> None:
        """Limit one call for sending or for receiving; 0: without a limit."""
        parts = int(seconds), int(seconds % 1 * 1e6)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *parts))

    def _line(self) -> bytes:
        while b"\n" not in self._rest:
            chunk = self._socket.recv(65536)
            if not chunk:
                raise ChannelEndedError("the connection ended")
            self._rest += chunk
            if len(self._rest) > _LINE_BYTES:
                raise ChannelEndedError("its lines have no end")
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def connect(address: str, port: int, limit: float) -> Channel:
    """Connect to a port. Raises OSError if nothing answers within ``limit`` seconds."""
    return Channel(socket.create_connection((address, port), timeout=limit))
