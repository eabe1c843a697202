"""Messages between the launchers of several hosts: life, failure, stop and end, through host 0.

Every client begins with ``hello`` (the index of its host and a digest of the list of hosts). The
answer is ``welcome``, ``refused`` or ``later``. Then both sides send ``life`` every two seconds,
and ``failed``, ``stop``, ``finished``, ``again`` and ``end`` when these happen.
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

from common.errors import ConfigError
from common.processes.addresses import listen
from common.processes.channel import HELLO_SECONDS, Channel, ChannelEndedError, connect
from common.whole_numbers import rank_names

LIFE_SECONDS = 2.0
LOST_SECONDS = 30.0
REMIND_SECONDS = 10.0
"""Seconds after which a missing host is reported."""
_CLOSE_SECONDS = 3.0
_RETRY_SECONDS = 0.5
_PEER = "a launcher"
ROLL_CALL = "roll call"
"""First word of a host that asks for its number; see ``roll_call.py``."""
MEETING = "meeting"
"""Phase in which hosts meet before an attempt; see ``meeting.py``."""
LATER = "later"
_LAST_WORDS = ("failed", "finished", "end")
"""Messages after which a connection may close."""


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
    """Message of host ``host``; kind "arrived" when it has been welcomed."""

    host: int
    kind: str
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class HostEvent:
    text: str
    code: int = 1


class HostFailed(HostEvent):
    """Event: a host was lost, or rejected this one."""


class HostMissing(HostEvent):
    """Event: a host's launcher did not arrive within the connect limit, though its ranks may
    have.
    """


class HostNote(HostEvent):
    """Event that does not end the run, such as waiting for a host."""


def host_name(address: str) -> str:
    """Return a host's name for messages. ``find_places`` calls one without an address ``node
    1``.
    """
    return address if address.startswith("node ") else f"host {address}"


class Control:
    """This host's end of the channel. events: gets Message, HostFailed, HostMissing, HostNote.

    connect_limit: seconds within which every host should arrive; later ones are still accepted.
    """

    def __init__(
        self,
        hosts: Hosts,
        events: queue.SimpleQueue[Any],
        connect_limit: float,
        *,
        phase: str = "",
    ) -> None:
        """Listen on host 0.

        phase: two ends connect only in the same phase; a caller in another one tries again.
        """
        self._hosts = hosts
        self._phase = phase
        self._events = events
        self._limit = connect_limit
        self._links: dict[int, Channel] = {}
        self._kept: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._all_here = threading.Event()
        self._closed = threading.Event()
        self.heard = time.monotonic()
        """Time of the last word of another host."""
        self._server: socket.socket | None = None
        if hosts.own == 0:
            self._server = _listen(hosts.all[0].address, hosts.port)

    def start(self) -> None:
        work = (
            [self._send_life, self._accept, self._wait_for_all]
            if self._server
            else [self._send_life, self._connect]
        )
        for target in work:
            threading.Thread(target=target, name=f"control {target.__name__}", daemon=True).start()

    def missing(self) -> list[Host]:
        """Return the hosts that never arrived: for host 0 any other, for the others host 0."""
        others = range(1, len(self._hosts.all)) if self._server else [0]
        with self._lock:
            return [self._hosts.all[host] for host in others if host not in self._links]

    def present(self) -> list[int]:
        """Return the indexes of the hosts that are connected, this one included."""
        with self._lock:
            return sorted({self._hosts.own, *self._links})

    def should_give_up(self, since: float) -> bool:
        """Tell whether missing hosts have been waited for long enough. since: time.monotonic()."""
        return time.monotonic() - since > LOST_SECONDS

    def tell(self, kind: str, *, keep: bool = True, **values: Any) -> None:
        """Send to host 0, or from host 0 to all others. keep: also to those who arrive later."""
        message = {"kind": kind, **values}
        with self._lock:
            if keep:
                self._kept.append(message)
            links = list(self._links.values())
        for link in links:
            _send(link, message)

    def close(self) -> None:
        """Let sent messages arrive, also at hosts that are connecting now, for at most a few
        seconds.
        """
        if self._kept:
            self._all_here.wait(_CLOSE_SECONDS)
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

    def _send_life(self) -> None:
        while not self._closed.wait(LIFE_SECONDS):
            self.tell("life", keep=False)

    def _wait_for_all(self) -> None:
        remind = min(REMIND_SECONDS, self._limit)
        if self._closed.wait(remind):
            return
        for host in self.missing():
            text = (
                f"waiting for {host}: its launcher has not come to port {self._hosts.port};"
                " this port must be open too"
            )
            self._events.put(HostNote(text=text))
        if self._closed.wait(self._limit - remind):
            return
        for host in self.missing():
            text = f"{host} has not come within {self._limit:g} s to port {self._hosts.port}"
            self._events.put(
                HostMissing(
                    text=f"{text}; look whether the run was started there, and whether this port is"
                    " open"
                )
            )

    def _accept(self) -> None:
        assert self._server is not None
        while not self._closed.is_set():
            try:
                link = Channel(self._server.accept()[0], _PEER)
            except OSError:
                if self._closed.wait(1.0):  # closed, or out of file descriptors for a while
                    return
                continue
            threading.Thread(
                target=self._admit, args=(link,), name="control caller", daemon=True
            ).start()

    def _admit(self, link: Channel) -> None:
        hello = link.hello()
        host = hello.get("host")
        if hello.get("kind") == ROLL_CALL:
            count = len(self._hosts.all)
            self._refuse(link, "a host that came late", f"has all its {count} hosts already")
            return
        if hello.get("kind") != "hello" or type(host) is not int:
            link.close()
            return
        if hello.get("phase", "") != self._phase:
            self._send_back(link)
            return
        why = ""
        with self._lock:
            if hello.get("hosts") != self._hosts.digest():
                why = (
                    "runs with another list of hosts and ranks: give both the same rank table or"
                    " host list, or two runs two ports"
                )
            elif not 0 < host < len(self._hosts.all):
                why = f"has no host {host} in its list"
            elif host in self._links and self._phase == MEETING:
                why = LATER  # its launcher may have died without a word
            elif host in self._links:
                why = f"has {self._hosts.all[host]} already: the run was started twice there"
            else:
                _send(link, {"kind": "welcome"})  # first, before other threads send to it
                self._links[host] = link
        if not why:
            self._serve(host, link)
            return
        if why == LATER:
            self._send_back(link)
            return
        self._refuse(link, host_name(str(hello.get("address"))[:100]), why)

    def _send_back(self, link: Channel) -> None:
        """Let a launcher of another phase of this run try again."""
        _send(link, {"kind": LATER})
        link.finish()
        with suppress(OSError):
            link.receive(HELLO_SECONDS)
        link.close()

    def _refuse(self, link: Channel, name: str, why: str) -> None:
        self._events.put(HostNote(text=f"{name} was refused: this one {why}"))
        _send(link, {"kind": "refused", "text": why})
        link.finish()
        with suppress(OSError):
            while True:
                link.receive(HELLO_SECONDS)
        link.close()

    def _connect(self) -> None:
        first, port = self._hosts.all[0], self._hosts.port
        began = time.monotonic()
        late = [seconds for seconds in (REMIND_SECONDS, self._limit) if seconds <= self._limit]
        try:
            while (why := self._call((first.address, port))) and not self._closed.is_set():
                if late and time.monotonic() - began > late[0]:
                    late.pop(0)
                    if late:
                        text = (
                            f"waiting for {first}: its port {port} cannot be reached ({why});"
                            " this port must be open too"
                        )
                        self._events.put(HostNote(text=text))
                    else:
                        text = (
                            f"{first} could not be reached at port {port} within"
                            f" {self._limit:g} s ({why})"
                        )
                        text += (
                            "; look whether the run was started there, and at firewalls"
                            " between the hosts"
                        )
                        self._events.put(HostMissing(text=text))
                self._closed.wait(_RETRY_SECONDS)
        finally:
            self._all_here.set()

    def _call(self, address: tuple[str, int]) -> str:
        """Try to reach host 0, and do everything that follows. Returns the reason for a retry."""
        link: Channel | None = None
        answer: Mapping[str, Any] = {}
        why = "something else answers there"
        try:
            link = connect(*address, _PEER, HELLO_SECONDS)
            own = self._hosts.all[self._hosts.own].address
            link.send(
                {
                    "kind": "hello",
                    "host": self._hosts.own,
                    "hosts": self._hosts.digest(),
                    "phase": self._phase,
                    "address": own,
                }
            )
            answer = link.receive(HELLO_SECONDS)
        except ChannelEndedError:
            pass
        except OSError as error:
            why = str(error.strerror or error)
        if link is not None and answer.get("kind") == "welcome":
            with self._lock:
                self._links[0] = link
            self._serve(0, link)
            return "it has left again" if self._phase == MEETING else ""
        if link is not None:
            link.close()
        if answer.get("kind") == LATER:
            self.heard = time.monotonic()
            return "it is not ready for this host yet"
        if answer.get("kind") == "refused":
            self._events.put(
                HostFailed(
                    text=f"{self._hosts.all[0]} at port {address[1]} {answer.get('text')}", code=2
                )
            )
            return ""
        return why

    def _serve(self, host: int, link: Channel) -> None:
        """Pass on a host's messages until it closes or is lost."""
        with self._lock:
            told = list(self._kept)
        for message in told:
            _send(link, message)
        if not self.missing():
            self._all_here.set()
        self._events.put(Message(host=host, kind="arrived", values={}))
        name, ended, why = (
            self._hosts.all[host],
            False,
            "closed its connection without saying how it ended; look into its output",
        )
        try:
            while True:
                message = link.receive(LOST_SECONDS)
                self.heard = time.monotonic()
                kind = str(message.get("kind"))
                ended = ended or kind in _LAST_WORDS
                if kind != "life":
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
        if self._phase == MEETING:  # it may come again
            with self._lock:
                del self._links[host]
            link.close()
            self._events.put(Message(host=host, kind="left", values={}))
        elif not ended and not self._closed.is_set():
            self._events.put(HostFailed(text=f"{name} {why}"))


def _send(link: Channel, message: Mapping[str, Any]) -> None:
    """Send a message. The listening thread notices a lost peer, so an error is ignored here."""
    with suppress(OSError):
        link.send(message)


def _listen(address: str, port: int) -> socket.socket:
    """Listen for the launchers of the other hosts. Raises ConfigError if the port is not
    available.
    """
    try:
        return listen(address, port)
    except OSError as error:
        raise ConfigError(
            f"host {address}, port {port}: cannot listen there for the launchers of the other"
            f" hosts: {error.strerror or error}; it must be a free port of this machine: end what"
            " uses it, or set MASTER_PORT to another (this one is the port after it)"
        ) from None
