"""Wait of a rank until the others have come: what it says meanwhile, and what ends the wait.

Torch's store and MindSpore's scheduler wait in silence, and in a call that Ctrl-C does not reach.
A rank therefore first looks by itself whether anything answers at the place where they meet.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from common.cluster.environment import Process, in_pod
from common.errors import ConfigError, RunError
from common.log import LOG
from common.processes.addresses import is_here

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
                f"{self} has waited {self._limit:g} s (runtime.stall_limit) at"
                f" {self._address}:{self._port} for {awaited()}; see whether it was started, its"
                " log, and whether the ports between the hosts are open"
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
