"""Channel between the launchers of several hosts, through host 0.

Host 0 listens at the port after that of the ranks. A caller sends ``hello`` with its number and a
digest of the list of hosts, and gets ``welcome``, ``refused`` or ``later``. Once all hosts have
come, host 0 tells them to ``begin``. Then both sides send ``life`` every two seconds, and
``failed``, ``stop`` and ``end`` when these happen. A host that is silent for half a minute is lost.
"""

from __future__ import annotations

import hashlib
import json
import queue
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError, RunError
from common.launcher.terminal import tell
from common.processes.addresses import listen
from common.processes.channel import HELLO_SECONDS, Channel, ChannelEndedError, connect
from common.whole_numbers import rank_names

LIFE_SECONDS = 2.0
LOST_SECONDS = 30.0
REMIND_SECONDS = 10.0
"""Seconds after which a missing host is reported."""
PATIENCE_SECONDS = 60.0
"""Seconds that the others wait longer than host 0 for all to come."""
CLOSE_SECONDS = 3.0
PEER = "a launcher"
ASKS_FOR_NUMBER = "number"
"""First word of a host that asks for its number; see ``host_numbering.py``."""
_LOOK_SECONDS = 0.2
_RETRY_SECONDS = 0.5


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
    this host.
    """

    all: tuple[Host, ...]
    own: int
    port: int

    def digest(self) -> str:
        """Digest that is equal on all hosts of one run."""
        return hashlib.sha256(
            json.dumps([[host.address, host.ranks] for host in self.all]).encode()
        ).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Message:
    """Message of a host after all have begun: of kind life, failed, stop or end.

    Of this host's own: lost, with a text, and note, with a text.
    """

    host: int
    kind: str
    values: Mapping[str, Any]


def host_name(address: str) -> str:
    """Return a host's name for messages. ``find_places`` calls one without an address ``node
    1``.
    """
    return address if address.startswith("node ") else f"host {address}"


class HostChannel:
    """This host's end. events: gets Messages.

    restarts: a host that comes although the run has begun, since its launcher was started again, is
    told to come later, for the next attempt. Otherwise it is refused.
    """

    def __init__(self, hosts: Hosts, events: queue.SimpleQueue[Any], *, restarts: bool) -> None:
        """Listen on host 0. Raises ConfigError if its port is not available."""
        self._hosts, self._events, self._restarts = hosts, events, restarts
        self._links: dict[int, Channel] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._life: dict[str, Any] = {}
        self._attempt: int | None = None
        """Number of the attempt that has begun."""
        self._refusal = ""
        self._why = "it has not answered yet"
        self._heard = time.monotonic()
        """Time of the last word of host 0."""
        self._server = listen_for_launchers(hosts) if hosts.own == 0 else None
        for target in (self._send_life, self._accept if self._server else self._connect):
            threading.Thread(target=target, name=f"hosts {target.__name__}", daemon=True).start()

    def gather(self, attempt: int, limit: float) -> int:
        """Wait at most ``limit`` seconds until all hosts have come.

        Returns the number of the attempt as host 0 counts. Raises RunError if a host does not come,
        and ConfigError if host 0 refuses this one.
        """
        port, is_first = self._hosts.port, self._server is not None
        began, limit, reminded = time.monotonic(), limit + PATIENCE_SECONDS * (not is_first), False
        while self._attempt is None:
            if self._refusal:
                raise ConfigError(self._refusal)
            with self._lock:
                missing = self._missing()
                begins = is_first and not missing
                if begins:
                    self._attempt = attempt
            if begins:
                self.tell("begin", attempt=attempt)
                return attempt
            names, waited = ", ".join(map(str, missing)), time.monotonic() - began
            look = "look whether the run was started there, and"
            if waited > REMIND_SECONDS and missing and not reminded:
                reminded = True
                why = (
                    f"its launcher has not come to port {port}"
                    if is_first
                    else f"its port {port} cannot be reached ({self._why})"
                )
                tell(f"waiting for {names}: {why}; this port must be open too", error=True)
            if is_first and waited > limit:
                raise RunError(
                    f"{names} has not come within {limit:g} s to port {port}; {look} whether this"
                    " port is open"
                )
            if time.monotonic() - self._heard > limit and not is_first:
                raise RunError(
                    f"{self._hosts.all[0]} could not be reached at port {port} within {limit:g} s"
                    f" ({self._why}); {look} at firewalls between the hosts"
                )
            self._closed.wait(_LOOK_SECONDS)
        return self._attempt

    def tell(self, kind: str, **values: Any) -> None:
        """Send to host 0, or from host 0 to all others."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            with suppress(OSError):  # the listening thread notices a lost peer
                link.send({"kind": kind, **values})

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
        deadline = time.monotonic() + CLOSE_SECONDS
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.finish()
        for link in links:
            link.ended.wait(max(0.0, deadline - time.monotonic()))
            link.close()

    def _missing(self) -> list[Host]:
        """Return the hosts that are not here: for host 0 any other, for the others host 0."""
        others = range(1, len(self._hosts.all)) if self._server else [0]
        return [self._hosts.all[host] for host in others if host not in self._links]

    def _say(self, text: str) -> None:
        if self._attempt is None:
            tell(text, error=True)
        else:
            self._events.put(Message(host=self._hosts.own, kind="note", values={"text": text}))

    # ---- threads ----

    def _send_life(self) -> None:
        while not self._closed.wait(LIFE_SECONDS):
            self.tell("life", **self._life)

    def _accept(self) -> None:
        assert self._server is not None
        while not self._closed.is_set():
            try:
                link = Channel(self._server.accept()[0], PEER)
            except OSError:
                if self._closed.wait(1.0):  # closed, or out of file descriptors for a while
                    return
                continue
            threading.Thread(target=self._admit, args=(link,), name="caller", daemon=True).start()

    def _admit(self, link: Channel) -> None:
        hello = link.hello()
        host, hosts = hello.get("host"), self._hosts.all
        name, why = host_name(str(hello.get("address"))[:100]), ""
        if hello.get("kind") == ASKS_FOR_NUMBER:
            name, why = "a host that came late", f"has all its {len(hosts)} hosts already"
        elif hello.get("kind") != "hello" or type(host) is not int:
            link.close()
            return
        elif hello.get("hosts") != self._hosts.digest():
            why = (
                "runs with another list of hosts and ranks: give both the same rank table or"
                " host list, or two runs two ports"
            )
        elif not 0 < host < len(hosts):
            why = f"has no host {host} in its list"
        else:
            with self._lock:
                is_new = host not in self._links and self._attempt is None
                if is_new:
                    with suppress(OSError):
                        link.send({"kind": "welcome"})  # before other threads send to it
                    self._links[host] = link
            if is_new:
                self._say(f"{hosts[host]} has come")
                self._serve(host, link)
                return
            if not self._restarts and self._attempt is not None:
                why = f"has {hosts[host]} already: the run was started twice there"
        if why:
            self._say(f"{name} was refused: this one {why}")
        answer = {"kind": "refused", "text": why} if why else {"kind": "later"}
        say_and_close(link, answer, HELLO_SECONDS)

    def _connect(self) -> None:
        """Call host 0 until it takes this host into an attempt, or refuses it."""
        while not self._closed.is_set() and not self._refusal and self._attempt is None:
            self._call(self._hosts.all[0].address, self._hosts.port)
            self._closed.wait(_RETRY_SECONDS)

    def _call(self, address: str, port: int) -> None:
        link: Channel | None = None
        answer: Mapping[str, Any] = {}
        own = self._hosts.own
        try:
            link = connect(address, port, PEER, HELLO_SECONDS)
            hello = {"kind": "hello", "host": own, "hosts": self._hosts.digest()}
            link.send({**hello, "address": self._hosts.all[own].address})
            answer = link.receive(HELLO_SECONDS)
        except ChannelEndedError:
            self._why = "something else answers there"
        except OSError as error:
            self._why = str(error.strerror or error)
        if answer.get("kind") == "welcome" and link is not None:
            with self._lock:
                self._links[0] = link
            self._serve(0, link)
            return
        if link is not None:
            link.close()
        if answer.get("kind") == "later":
            self._heard, self._why = time.monotonic(), "it is not ready for this host yet"
        elif answer.get("kind") == "refused":
            self._refusal = f"{self._hosts.all[0]} at port {port} {answer.get('text')}"

    def _serve(self, host: int, link: Channel) -> None:
        """Pass on a host's messages until it closes or is lost."""
        may_close, name = False, self._hosts.all[host]
        why = "closed its connection without saying how it ended; look into its output"
        try:
            while True:
                message = link.receive(LOST_SECONDS)
                self._heard = time.monotonic()
                kind = str(message.pop("kind", ""))
                may_close = may_close or kind in ("failed", "end") or bool(message.get("done"))
                if kind == "begin" and type(message.get("attempt")) is int:
                    self._attempt = message["attempt"]
                elif message or kind != "life":
                    self._events.put(Message(host=host, kind=kind, values=message))
        except TimeoutError:
            why = (
                f"has not been heard from for {LOST_SECONDS:g} s; it has crashed, or the network"
                " between the hosts is cut"
            )
        except ConnectionError:  # closed with unread data of ours
            pass
        except OSError as error:
            why = f"cannot be reached any more ({error.strerror or error})"
        link.finish()
        with self._lock:
            may_return = self._attempt is None
            if may_return:
                self._links.pop(host, None)
        if may_return:
            link.close()
            self._say(f"{name} has left again")
        elif not may_close and not self._closed.is_set():
            values = {"text": f"{name} {why}"}
            self._events.put(Message(host=host, kind="lost", values=values))


def say_and_close(link: Channel, answer: Mapping[str, Any], limit: float) -> None:
    """Send a last message, and close the connection once the other end has read it."""
    with suppress(OSError):
        link.send(answer)
    link.finish()
    with suppress(OSError):
        while True:
            link.receive(limit)
    link.close()


def listen_for_launchers(hosts: Hosts) -> socket.socket:
    """Listen for the launchers of the other hosts. Raises ConfigError if the port is not
    available.
    """
    address, port = hosts.all[0].address, hosts.port
    try:
        return listen(address, port)
    except OSError as error:
        raise ConfigError(
            f"host {address}, port {port}: cannot listen there for the launchers of the other"
            f" hosts: {error.strerror or error}; it must be a free port of this machine: end what"
            " uses it, or set MASTER_PORT to another (this one is the port after it)"
        ) from None
