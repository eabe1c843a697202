"""Channel between the launchers of several hosts, through host 0.

Host 0 listens at the port after that of the ranks. A caller sends ``hello`` with its number and the
list of hosts, and gets ``welcome``, ``refused`` or ``later``. Once all hosts have
come, host 0 tells them to ``begin``. Then both sides send ``life`` every two seconds, and
``failed``, ``stop`` and ``end`` when these happen. Those who stay after it say ``ready`` for the
next attempt. A host that is silent for half a minute is lost.

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
from common.processes.channel import HELLO_SECONDS, Channel, ChannelEndedError, connect
from common.whole_numbers import rank_names, spans

LIFE_SECONDS = 2.0
LOST_SECONDS = 30.0
REMIND_SECONDS = 10.0
"""Seconds after which a missing host is reported."""
PATIENCE_SECONDS = 60.0
"""Seconds that the others wait longer than host 0 for all to come."""
_CLOSE_SECONDS = 3.0
_CONNECT_SECONDS = 3.0


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

    def listed(self) -> list[list[Any]]:
        """Return what is equal on all hosts of one run."""
        return [[host.address, list(host.ranks)] for host in self.all]


@dataclass(frozen=True, kw_only=True)
class Message:
    """Message of a host after all have begun: of kind life, failed, stop or end.

    Of this host's own: lost, with a text, and signal. attempt: the one that its sender was in.
    """

    host: int
    kind: str
    values: Mapping[str, Any]
    attempt: int | None = None


def host_name(address: str) -> str:
    """Return a host's name for messages. One without an address is called ``node 1``."""
    return address if address.startswith("node ") else f"host {address}"


class HostChannel:
    """This host's end. events: gets Messages.

    restarts: a host that comes although the run has begun, since its launcher was started again, is
    told to come later, for the next attempt. Otherwise it is refused.
    """

    def __init__(
        self,
        hosts: Hosts,
        events: queue.SimpleQueue[Any],
        *,
        restarts: bool,
        say: Callable[..., None] = tell,
    ) -> None:
        """Listen on host 0. Raises ConfigError if its port is not available."""
        self._hosts, self._events, self._restarts = hosts, events, restarts
        self._say = say
        self.own = hosts.own
        """Index of this host."""
        self._links: dict[int, Channel] = {}
        self._devices = {0: (hosts.all[0].address, list(hosts.devices))}
        """Address of the hosts that have come, and devices of those without a number."""
        self._ready: set[int] = set()
        """Hosts that have come for the next attempt."""
        self._doubles: dict[int, bool] = {}
        """Numbers that came again, and whether the host that has one has spoken since."""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._life: dict[str, Any] = {}
        self._attempt: int | None = None
        """Number of the attempt that has begun."""
        self._server: socket.socket | None = None
        if hosts.own == 0:
            first = hosts.all[0].address
            try:
                self._server = listen(first, hosts.port)
            except OSError as error:
                raise ConfigError(
                    f"host {first}, port {hosts.port}: cannot listen there for the launchers of the"
                    f" other hosts: {error.strerror or error}; it must be a free port of this"
                    " machine: end what uses it, or set MASTER_PORT to another (this one is the"
                    " port after it)"
                ) from error
            self._in_thread(self._accept, self._server)
        self._in_thread(self._send_life)

    def gather(self, attempt: int, limit: float, goes_on: Callable[[], bool]) -> int | None:
        """Wait at most ``limit`` seconds until all hosts have come.

        goes_on: waits a little; None is returned when it returns False. Else returns the number of
        the attempt as host 0 counts. Raises RunError if a host does not come, and ConfigError if
        host 0 refuses this one.
        """
        self._life, self._attempt = {}, None
        if self._server is None:
            self.tell("ready")
        said = ""
        limit += 0.0 if self._server else PATIENCE_SECONDS
        began = heard = time.monotonic()
        while self._attempt is None:
            missing, why, has_word = self._begin(attempt) if self._server else self._join()
            names, now = ", ".join(map(str, missing)), time.monotonic()
            heard = now if has_word else heard
            text = f"waiting for {names}: {why}"
            text = text if missing else "this host has come; waiting for the others"
            if self._attempt is None and now - began > REMIND_SECONDS and said != text:
                said = text
                self._say(text if has_word else f"{text}; this port must be open too", error=True)
            if now - heard > limit:
                raise RunError(
                    f"{names} has not come within {limit:g} s: {why}; look whether the run was"
                    " started there, and at firewalls between the hosts"
                )
            if self._attempt is None and not goes_on():
                break
        return self._attempt

    def _begin(self, attempt: int) -> tuple[list[Host], str, bool]:
        """Begin on host 0 if all have come. Returns the hosts that have not."""
        with self._lock:
            missing = [
                host for number, host in enumerate(self._hosts.all) if number not in self._ready
            ][1:]
            if not missing:
                self._attempt = attempt
                self._ready.clear()
        if not missing:
            self.tell("begin")
        return missing, f"its launcher has not come to port {self._hosts.port}", not missing

    def _join(self) -> tuple[list[Host], str, bool]:
        """Call host 0. Returns it unless it takes this host in, why, and whether it had a word."""
        if 0 in self._links:
            return [], "", True
        first, own = self._hosts.all[0], self._hosts.own
        hello = {
            "kind": "hello",
            "host": own,
            "hosts": self._hosts.listed(),
            "address": self._hosts.all[own].address,
            "devices": self._hosts.devices,
        }
        link, why = None, f"something else answers at its port {self._hosts.port}"
        answer: Mapping[str, Any] = {}
        try:
            link = connect(first.address, self._hosts.port, _CONNECT_SECONDS)
            link.send(hello)
            answer = link.receive(HELLO_SECONDS)
        except ChannelEndedError:
            pass
        except OSError as error:
            reason = error.strerror or error
            why = f"its port {self._hosts.port} cannot be reached ({reason})"
        if answer.get("kind") == "welcome" and link is not None:
            self.own = int(answer.get("host", own))
            with self._lock:
                self._links[0] = link
            self._in_thread(self._serve, 0, link)
            return [], "", True
        if link is not None:
            link.close()
        if answer.get("kind") == "refused":
            raise ConfigError(f"{first} at port {self._hosts.port} {answer.get('text')}")
        if answer.get("kind") == "later":
            return [first], "it is not ready for this host yet", True
        return [first], why, False

    def tell(self, kind: str, **values: Any) -> None:
        """Send to host 0, or from host 0 to all others, with the number of the attempt."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            with suppress(OSError):  # the listening thread notices a lost peer
                link.send({"kind": kind, "attempt": self._attempt, **values})

    @property
    def has_first(self) -> bool:
        """Tell whether host 0 has taken this host in."""
        return 0 in self._links

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
        hello, hosts = link.hello(), self._hosts.all
        host, devices = hello.get("host"), hello.get("devices")
        if type(host) is not int or type(devices) is not list:
            link.close()
            return
        asks = host < 0
        with self._lock:
            why = self._refusal(hello, address)
            if asks and not why:
                free = (number for number in range(1, len(hosts)) if number not in self._links)
                host = next(free, 0)
            is_new = not why and host > 0 and host not in self._links and self._attempt is None
            if is_new:
                with suppress(OSError):
                    link.send({"kind": "welcome", "host": host})  # before other threads send to it
                self._links[host] = link
                self._ready.add(host)
                self._devices[host] = (address, devices if asks else [])
        if is_new:
            said = f"is {address} (devices {spans(devices)})" if asks else "has come"
            self._say(f"{hosts[host]} {said}", error=True)
            self._serve(host, link)
            return
        if why:
            name = address if asks else str(hello.get("address"))[:100]
            self._say(f"{host_name(name)} was refused: this one {why}", error=True)
        with suppress(OSError):
            link.send({"kind": "refused", "text": why} if why else {"kind": "later"})
        link.close()

    def _refusal(self, hello: Mapping[str, Any], address: str) -> str:
        """Return why this run has no place for a caller; empty if it has, now or later."""
        number, hosts, numbers = hello["host"], self._hosts.all, bool(self._hosts.devices)
        asks = number < 0
        if hello.get("hosts") != self._hosts.listed():
            return (
                "runs with another list of hosts and ranks: give both the same rank table or host"
                " list, or the same --nnodes and as many devices, or two runs two ports"
            )
        if number >= len(hosts):
            return f"has no host {number} in its list"
        if asks and not numbers:
            return f"has all its {len(hosts)} hosts already"
        if numbers and not asks and self._attempt is None:
            return "numbers its hosts as they come: give --node_rank on all hosts or on none"
        here = [
            device
            for come, (other, held) in self._devices.items()
            if other == address or (come == 0 and is_own(address))
            for device in held
        ]
        if asks and not {*here}.isdisjoint(hello["devices"]):
            return (
                "has this host already: the run was started twice there; end one of the two, or"
                " give several nodes on one machine devices of their own"
            )
        if self._attempt is None and number in self._links:
            # one that has died and comes back speaks no more over its old connection
            if not self._doubles.setdefault(number, False):
                return ""
            del self._doubles[number]
            return (
                f"has {hosts[number]} already: {self._devices[number][0]} and {address} have come"
                " with the same number; give each host its own --node_rank"
            )
        if self._attempt is not None and not self._restarts:
            return f"has {hosts[number]} already: the run was started twice there"
        return ""

    def _serve(self, host: int, link: Channel) -> None:
        """Pass on a host's messages until it closes or is lost."""
        may_close, name = False, self._hosts.all[host]
        why = "closed its connection without saying how it ended; look into its output"
        try:
            while True:
                message = link.receive(LOST_SECONDS)
                if host in self._doubles:
                    self._doubles[host] = True
                kind, attempt = str(message.pop("kind", "")), message.pop("attempt", None)
                may_close = may_close or kind in ("failed", "end") or bool(message.get("done"))
                if kind in ("begin", "ready"):
                    may_close = False
                    self._ready.add(host)
                    self._attempt = attempt if kind == "begin" else self._attempt
                elif message:
                    values = {"values": message, "attempt": attempt}
                    self._events.put(Message(host=host, kind=kind, **values))
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
            attempt = self._attempt
            if attempt is not None and not may_close and not self._closed.is_set():
                values = {"text": f"{name} {why}"}
                self._events.put(Message(host=host, kind="lost", values=values, attempt=attempt))
            self._links.pop(host, None)
            self._devices.pop(host, None)
            self._doubles.pop(host, None)
            self._ready.discard(host)
        if attempt is None and not self._closed.is_set():
            self._say(f"{name} has left again", error=True)
