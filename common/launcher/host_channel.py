"""Channel between the launchers of several hosts, through host 0, which decides for all.

Host 0 listens at the port after that of the ranks. Another host says ``hello`` with its number and the list of hosts,
and is told ``welcome``, ``later`` or ``refused``. When all have said that they are ``ready``, host 0 says ``begin``.
Then they say ``life`` every two seconds, ``failed`` and ``stop``, until host 0 says ``end``. Those who stay say
``ready`` again. A host that is silent for half a minute is lost.

A launcher takes all events, its own too, one by one from the channel. So what another host said before it was ready
belongs to the attempt before.

Hosts whose commands give no numbers meet once before: each gets the first free number.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError, RunError
from common.launcher.terminal import tell
from common.processes.addresses import is_own, listen
from common.processes.channel import Channel, connect
from common.whole_numbers import rank_names, spans

LIFE_SECONDS = 2.0
LOST_SECONDS = 30.0
REMIND_SECONDS = 10.0
"""Seconds after which a missing host is reported."""
PATIENCE_SECONDS = 60.0
"""Seconds that the others wait longer than host 0 for all to come."""
LOOK_SECONDS = 0.2
"""Seconds between two looks for hosts that are missing."""
_CLOSE_SECONDS = 3.0
_CONNECT_SECONDS = 3.0
_PROTOCOL = 2
"""Version of the messages, which is equal on all hosts."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host. address: a name or an IP address that all hosts reach. ranks: those it runs."""

    address: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{host_name(self.address)} ({rank_names(self.ranks)})"


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts of a run. all: first host 0, which listens on its address and ``port``. own: index of
    this host; -1 if host 0 gives it. devices: of this host, if host 0 numbers the others.
    """

    all: tuple[Host, ...]
    own: int
    port: int
    devices: tuple[int, ...] = ()

    def listed(self) -> list[Any]:
        """Return what is equal on all hosts of one run."""
        hosts = [[host.address, list(host.ranks)] for host in self.all]
        return [_PROTOCOL, bool(self.devices), *hosts]


@dataclass(frozen=True, kw_only=True)
class Message:
    """Event: a message of a host, that it is lost (with a text), or one of this launcher's own."""

    kind: str
    host: int = -1
    values: Mapping[str, Any]


def host_name(address: str) -> str:
    """Return a host's name for messages. One without an address is called ``node 1``."""
    return address if address.startswith("node ") else f"host {address}"


class HostChannel:
    """This host's end, and the events of its launcher. A single host has one without a port.

    restarts: a host that comes although the run has begun, since its launcher was started again, is
    told to come later, for the next attempt. Otherwise it is refused.
    """

    def __init__(self, hosts: Hosts, *, restarts: bool, say: Callable[..., None] = tell) -> None:
        """Listen on host 0. Raises ConfigError if its port is not available."""
        self._hosts, self._restarts, self._say = hosts, restarts, say
        self.own = hosts.own
        """Index of this host."""
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._links: dict[int, Channel] = {}
        self._callers = {0: (hosts.all[0].address, list(hosts.devices))}
        """Address of the hosts that have come, and devices of those without a number."""
        self._ready: set[int] = set()
        self._begun: int | None = None
        """Number of the attempt that has begun."""
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._life: dict[str, Any] = {}
        self._server: socket.socket | None = None
        if len(hosts.all) == 1:
            return
        if hosts.own == 0:
            first = hosts.all[0].address
            try:
                self._server = listen(first, hosts.port)
            except OSError as error:
                raise ConfigError(
                    f"host {first}, port {hosts.port}: cannot listen there for the launchers of the other hosts:"
                    f" {error.strerror or error}; it must be a free port of this machine: end what uses it, or set"
                    " MASTER_PORT to another (this one is the port after it)"
                ) from error
            self._in_thread(self._accept, self._server)
        self._in_thread(self._send_life)

    def put(self, kind: str, **values: Any) -> None:
        """Add an event of this launcher; also from a handler of signals."""
        self._events.put(Message(kind=kind, values=values))

    def next(self, limit: float) -> Message | None:
        """Return the next event; None if none comes within ``limit`` seconds."""
        try:
            event = self._events.get(timeout=limit)
        except queue.Empty:
            return None
        if event.kind == "ready":
            self._ready.add(event.host)
        elif event.kind == "begin":
            self._begun = int(event.values["number"])
        elif event.kind == "lost":
            self._ready.discard(event.host)
            if self._begun is None:
                self._say(f"{self._hosts.all[event.host]} has left again", error=True)
        return event

    def gather(self, number: int, limit: float, goes_on: Callable[[Message | None], bool]) -> int | None:
        """Wait at most ``limit`` seconds until all hosts have come for an attempt.

        goes_on: takes each event; None is returned when it returns False. Else returns the number of the attempt as
        host 0 counts. Raises RunError if a host does not come, and ConfigError if host 0 refuses this one.
        """
        with self._lock:  # no life of the attempt before follows
            self._life, self._begun = {}, None
        if self.own != 0:
            self.tell("ready")
            limit += PATIENCE_SECONDS
        said = ""
        began = heard = time.monotonic()
        while True:
            missing, has_word = self._call() if self.own else self._begin(number)
            if self._begun is not None:
                return self._begun
            now = time.monotonic()
            heard = now if has_word else heard
            if now - began > REMIND_SECONDS and said != missing:
                said = missing
                self._say(f"waiting for {missing}", error=True)
            if now - heard > limit:
                raise RunError(
                    f"waited {limit:g} s for {missing}; look whether the run was started there, and"
                    " at firewalls between the hosts"
                )
            if not goes_on(self.next(LOOK_SECONDS)):
                return None

    def _begin(self, number: int) -> tuple[str, bool]:
        """Begin on host 0 if all have come. Returns the hosts that have not."""
        with self._lock:
            come = self._ready & self._links.keys()
            missing = [str(host) for n, host in enumerate(self._hosts.all) if n and n not in come]
            self._begun = None if missing else number
        if not missing:
            self._ready.clear()
            self.tell("begin", number=number)
        port = f"port {self._hosts.port}, which must be open"
        return f"{', '.join(missing)}: its launcher has not come to {port}", False

    def _call(self) -> tuple[str, bool]:
        """Call host 0, if necessary. Returns what is missing, and whether host 0 has answered."""
        first, port = self._hosts.all[0], self._hosts.port
        if self.has_first or self._begun is not None:  # host 0 may have left since it began
            return "the others; this host has come", True
        try:
            link = connect(first.address, port, _CONNECT_SECONDS)
        except OSError as error:
            why = f"cannot be reached ({error.strerror or error})"
            return f"{first}: its port {port}, which must be open, {why}", False
        words = {"hosts": self._hosts.listed(), "devices": self._hosts.devices}
        with suppress(OSError):
            link.send({"kind": "hello", "host": self._hosts.own, **words})
        answer = link.hello()
        kind = answer.get("kind")
        if kind == "welcome":
            self.own = int(answer.get("host", self.own))
            self._links[0] = link
            self._in_thread(self._serve, 0, link)
            return self._call()
        link.close()
        if kind == "refused":
            raise ConfigError(f"{first} at port {port} {answer.get('text')}")
        if kind == "later":
            return f"{first}: it is not ready for this host yet, or has one in its place", True
        return f"{first}: something else answers at its port {port}", False

    def tell(self, kind: str, **values: Any) -> None:
        """Send to host 0, or from host 0 to all others."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            with suppress(OSError):  # the listening thread notices a lost peer
                link.send({"kind": kind, **values})

    @property
    def has_first(self) -> bool:
        """Tell whether host 0 has taken this host in."""
        return self.own != 0 and 0 in self._links

    def set_life(self, **values: Any) -> None:
        """Set what ``life`` says of this host, whose end is told at once."""
        is_end = values["done"] and not self._life.get("done")
        self._life = values
        if is_end:
            self.tell("life", **values)

    def close(self) -> None:
        """Let sent messages arrive, for at most a few seconds."""
        self._closed.set()
        if self._server is not None:
            with suppress(OSError):
                # closing by itself would leave accept waiting and the port taken
                self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.finish()
        for link in links:
            link.ended.wait(max(0.0, deadline - time.monotonic()))
            link.close()

    # ---- threads ----

    def _in_thread(self, target: Any, *arguments: Any) -> None:
        name = f"hosts {target.__name__}"
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()

    def _send_life(self) -> None:
        while not self._closed.wait(LIFE_SECONDS):
            with self._lock:
                self.tell("life", **self._life)

    def _accept(self, server: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, (address, *_) = server.accept()
                link = Channel(connection)
            except OSError:
                self._closed.wait(1.0)  # out of file descriptors for a while
                continue
            self._in_thread(self._admit, link, str(address).removeprefix("::ffff:"))

    def _admit(self, link: Channel, address: str) -> None:
        """Answer a caller, and serve the one that is taken in."""
        hello, hosts = link.hello(), self._hosts.all
        host, devices = hello.get("host"), hello.get("devices")
        if type(host) is not int or type(devices) is not list:
            link.close()
            return
        with self._lock, suppress(OSError):
            if host < 0:
                host = next((n for n in range(1, len(hosts)) if n not in self._links), 0)
            if why := self._refusal(hello, host, address):
                self._say(f"{host_name(address)} was refused: this one {why}", error=True)
                link.send({"kind": "refused", "text": why})
            elif self._begun is not None or host in (0, *self._links):
                link.send({"kind": "later"})
            else:
                link.send({"kind": "welcome", "host": host})  # before other threads send to it
                self._links[host], self._callers[host] = link, (address, devices)
                self._events.put(Message(kind="ready", host=host, values={}))
                named = f", devices {spans(devices)}" if devices else ""
                self._say(f"{hosts[host]} has come from {address}{named}", error=True)
        if self._links.get(host) is link:
            self._serve(host, link)
        else:
            link.close()

    def _refusal(self, hello: Mapping[str, Any], host: int, address: str) -> str:
        """Return why this run has no place for a caller; empty if it has, now or later."""
        if hello.get("hosts") != self._hosts.listed():
            return (
                "runs with another list of hosts and ranks: give both the same rank table or host list, or the same"
                " --nnodes and as many devices, and --node_rank on all hosts or on none; or two runs two ports"
            )
        for number, (other, held) in self._callers.items():
            is_there = other == address or (number == 0 and is_own(address))
            if is_there and not {*held}.isdisjoint(hello["devices"]):
                return (
                    "has this host already: the run was started twice there; end one of the two, or"
                    " give several nodes on one machine devices of their own"
                )
        if self._begun is not None:
            return "" if self._restarts else "has all its hosts already: the run was started twice"
        other = self._callers.get(host, (address, []))[0]
        if host and other != address:
            return (
                f"has {self._hosts.all[host]} already: {other} and {address} have come with the"
                " same number; give each host its own --node_rank"
            )
        return ""

    def _serve(self, host: int, link: Channel) -> None:
        """Pass on a host's messages until it closes or is lost."""
        why = "closed its connection without saying how it ended; look into its output"
        try:
            while True:
                message = link.receive(LOST_SECONDS)
                kind = str(message.pop("kind", ""))
                self._events.put(Message(kind=kind, host=host, values=message))
        except TimeoutError:
            why = (
                f"has not been heard from for {LOST_SECONDS:g} s; it has crashed, or the network"
                " between the hosts is cut"
            )
        except ConnectionError:  # closed with unread data of ours
            pass
        except OSError as error:
            why = f"cannot be reached any more ({error.strerror or error})"
        link.close()
        with self._lock:
            text = {"text": f"{self._hosts.all[host]} {why}"}
            self._events.put(Message(kind="lost", host=host, values=text))
            del self._links[host]
            self._callers.pop(host, None)
