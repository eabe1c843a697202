"""Numbers of the hosts of a run whose command gives none.

The host with the master's address is node 0. It waits at the port above the master's for all
others, and numbers them as they have come. The launchers then use the same port for their channel.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError, RunError
from common.launcher.host_channel import (
    ASKS_FOR_NUMBER,
    CLOSE_SECONDS,
    PEER,
    REMIND_SECONDS,
    host_name,
    say_and_close,
)
from common.launcher.terminal import tell
from common.processes.addresses import is_here, is_own, listen
from common.processes.channel import HELLO_SECONDS, Channel, ChannelEndedError, connect
from common.whole_numbers import spans

_LOOK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Numbering:
    """Parameters. master: address or name of node 0. port: where it listens.

    nodes: number of hosts. devices: numbers of those that this host uses. limit: seconds within
    which all hosts must arrive.
    """

    master: str
    port: int
    nodes: int
    devices: tuple[int, ...]
    limit: float

    def find_node(self) -> int:
        """Return the number of this host, 0 for the master, once all hosts have arrived.

        Several nodes on one machine need different devices. Raises ConfigError if the master
        rejects this host, and RunError if not all arrive in time.
        """
        if not is_here(self.master):
            return self._ask()
        try:
            server = listen(self.master, self.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # another node of this machine has the port
                return self._ask()
            raise ConfigError(
                f"--master {self.master}, port {self.port}: cannot listen there for the other"
                f" hosts: {error.strerror or error}"
            ) from None
        with server:
            self._number_the_others(server)
        return 0

    def _number_the_others(self, server: socket.socket) -> None:
        deadline, remind = (time.monotonic() + limit for limit in (self.limit, REMIND_SECONDS))
        callers: dict[Channel, tuple[str, list[int]]] = {}
        server.settimeout(_LOOK_SECONDS)
        tell(
            f"node 0 of {self.nodes}: the others are numbered when all have come to port"
            f" {self.port}"
        )
        while len(callers) < self.nodes - 1:
            came = ", ".join(map(_name, callers.values())) or "none"
            if time.monotonic() > deadline:
                raise RunError(
                    f"{len(callers)} of {self.nodes - 1} other hosts have come to port {self.port}"
                    f" within {self.limit:g} s: {came}; start the same command on each, look"
                    " whether this port is open, or give each its --node_rank"
                )
            if time.monotonic() > remind:
                remind = deadline
                tell(f"waiting for {self.nodes - 1 - len(callers)} hosts more; here: {came}")
            with suppress(TimeoutError):
                connection, (address, *_) = server.accept()
                self._admit(
                    Channel(connection, PEER), str(address).removeprefix("::ffff:"), callers
                )
            for link in [link for link in callers if link.is_closed]:
                link.close()
                tell(f"host {_name(callers.pop(link))} has left again", error=True)
        for number, (link, caller) in enumerate(callers.items(), 1):
            say_and_close(link, {"kind": "number", "number": number}, CLOSE_SECONDS)
            tell(f"node {number} is {_name(caller)}")

    def _admit(
        self, link: Channel, address: str, callers: dict[Channel, tuple[str, list[int]]]
    ) -> None:
        """Accept or reject a caller."""
        hello = link.hello()
        given = hello.get("devices")
        devices: list[int] = given if isinstance(given, list) else []
        is_ours = hello.get("kind") == ASKS_FOR_NUMBER
        if not is_ours or not devices or any(type(number) is not int for number in devices):
            link.close()
            return
        here = [own for other, own in callers.values() if other == address]
        here += [list(self.devices)] if is_own(address) else []
        if hello.get("nodes") != self.nodes:
            why = (
                f"its --nnodes is {hello.get('nodes')}, and that of the master {self.nodes}; give"
                " the same on every host"
            )
        elif len(devices) != len(self.devices):
            why = (
                f"it has {len(devices)} devices, and the master {len(self.devices)}; without a"
                " rank table every host runs equally many ranks"
            )
        elif any(device in own for own in here for device in devices):
            why = (
                "this host has come already: the run was started twice there; end one of the two,"
                " or give several nodes on one machine devices of their own"
            )
        else:
            callers[link] = address, devices
            return
        tell(f"host {_name((address, devices))} was refused: {why}", error=True)
        say_and_close(link, {"kind": "refused", "text": why}, CLOSE_SECONDS)

    def _ask(self) -> int:
        """Ask the master for the number of this host, and wait until all have arrived."""
        deadline = time.monotonic() + self.limit
        master, why = f"{host_name(self.master)} at port {self.port}", ""
        tell(f"asking {master} for the number of this host among {self.nodes}")
        reminds = [REMIND_SECONDS]
        while (left := deadline - time.monotonic()) > 0:
            answer, why = self._call(left)
            if answer.get("kind") == "refused":
                raise ConfigError(f"{master} refused this host: {answer.get('text')}")
            number = answer.get("number")
            if type(number) is int and 0 < number < self.nodes:
                tell(f"node {number} of {self.nodes}, as {master} says")
                return number
            if reminds and self.limit - left > reminds[0]:
                reminds.clear()
                tell(f"waiting for {master} to number this host ({why})", error=True)
            time.sleep(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
        raise RunError(
            f"{master} has not numbered this host within {self.limit:g} s ({why}); look whether the"
            " run was started there and on all other hosts, and at firewalls, or give --node_rank"
        )

    def _call(self, left: float) -> tuple[Mapping[str, Any], str]:
        """Return the master's answer, or an empty answer and the reason."""
        try:
            link = connect(self.master, self.port, PEER, min(left, HELLO_SECONDS))
            try:
                hello = {"kind": ASKS_FOR_NUMBER, "nodes": self.nodes}
                link.send({**hello, "devices": list(self.devices)})
                return link.receive(left), "it gave no number"
            finally:
                link.close()
        except TimeoutError:
            return {}, "not all hosts have come"
        except ChannelEndedError:
            return {}, "it closed the connection"
        except OSError as error:
            return {}, str(error.strerror or error)


def _name(caller: tuple[str, list[int]]) -> str:
    return f"{caller[0]} (devices {spans(caller[1])})"
