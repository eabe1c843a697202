"""Launchers of several hosts tell each other of life, failure, stop and end: JSON lines over TCP, host 0 in the middle.

Every client opens with ``hello`` (its host's index and a digest of the list of hosts) and is answered by ``welcome`` or ``refused``.
Then both sides send ``life`` every two seconds, and ``failed``, ``stop``, ``finished`` and ``end`` as these happen. As with the rendezvous
of the frameworks, whoever reaches the port can speak: it belongs into the cluster's own network.
"""

from __future__ import annotations

import hashlib
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.cluster.listening import listen
from common.errors import ConfigError
from common.structured_files import MalformedError, parse_json

LIFE_SECONDS = 2.0
LOST_SECONDS = 30.0
REMIND_SECONDS = 10.0
"""A host that has not come by then is spoken of."""
_HELLO_SECONDS = 10.0
_CLOSE_SECONDS = 3.0
_RETRY_SECONDS = 0.5
_LINE_BYTES = 1 << 20
_LAST_WORDS = ("failed", "finished", "end")
"""After one of these a connection may close."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """address: a name or an IP address that all hosts reach. ranks: those it runs."""

    address: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{host_name(self.address)} ({rank_names(self.ranks)})"


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """all: host 0, which listens on its address and ``port``, first. own: index of this host."""

    all: tuple[Host, ...]
    own: int
    port: int

    def digest(self) -> str:
        """The same on all hosts of one run."""
        return hashlib.sha256(json.dumps([[host.address, host.ranks] for host in self.all]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message of host ``host``; kind "arrived" when it has been welcomed."""

    host: int
    kind: str
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class HostFailed:
    """A host was lost or refused this one."""

    text: str
    code: int = 1


@dataclass(frozen=True, kw_only=True)
class HostMissing:
    """The launcher of a host has not come within the connect limit; its ranks may have met the others all the same."""

    text: str


@dataclass(frozen=True, kw_only=True)
class HostRemark:
    """What the user should know, and what ends nothing: a host is still waited for, or someone else called at this host's port."""

    text: str


def host_name(address: str) -> str:
    """A host in a sentence. One whose address is not known is ``node 1``, as ``find_places`` names it."""
    return address if address.startswith("node ") else f"host {address}"


def rank_names(ranks: Sequence[int]) -> str:
    """Such as "rank 3" or "ranks 0-3, 8"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {names or 'none'}"


class Control:
    """This host's end. What is heard goes into ``events`` as Heard, HostFailed, HostMissing or HostRemark.

    connect_limit: seconds within which every host should have come; those that come later are taken too.
    """

    def __init__(self, hosts: Hosts, events: queue.SimpleQueue[Any], connect_limit: float) -> None:
        self._hosts = hosts
        self._events = events
        self._limit = connect_limit
        self._links: dict[int, _PeerLink] = {}
        self._told: list[bytes] = []
        self._lock = threading.Lock()
        self._all_here = threading.Event()
        self._closed = threading.Event()
        self._server: socket.socket | None = None
        if hosts.own == 0:
            self._server = _listen(hosts.all[0].address, hosts.port)

    def start(self) -> None:
        work = [self._send_life, self._accept, self._wait_for_all] if self._server else [self._send_life, self._connect]
        for target in work:
            threading.Thread(target=target, name=f"control {target.__name__}", daemon=True).start()

    def missing(self) -> list[Host]:
        """Those that have never come: of host 0 the others, of another host host 0."""
        others = range(1, len(self._hosts.all)) if self._server else [0]
        with self._lock:
            return [self._hosts.all[host] for host in others if host not in self._links]

    def should_give_up(self, since: float) -> bool:
        """Whether hosts that have never come have been waited for long enough since a point of time.monotonic()."""
        return time.monotonic() - since > LOST_SECONDS

    def tell(self, kind: str, *, keep: bool = True, **values: Any) -> None:
        """Send to host 0, from host 0 to all others. keep: also to those who come later."""
        line = _line(kind, **values)
        with self._lock:
            if keep:
                self._told.append(line)
            links = list(self._links.values())
        for link in links:
            link.send(line)

    def close(self) -> None:
        """Let what was told arrive, for a few seconds at most, also with hosts that are just coming."""
        if self._told:
            self._all_here.wait(_CLOSE_SECONDS)
        self._closed.set()
        if self._server is not None:
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # a close alone leaves accept waiting, and the port taken
            self._server.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.finish()
        for link in links:
            link.gone.wait(max(0.0, deadline - time.monotonic()))
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
            text = f"waiting for {host}: its launcher has not come to port {self._hosts.port}; this port must be open too"
            self._events.put(HostRemark(text=text))
        if self._closed.wait(self._limit - remind):
            return
        for host in self.missing():
            text = f"{host} has not come within {self._limit:g} s to port {self._hosts.port}"
            self._events.put(HostMissing(text=f"{text}; look whether the run was started there, and whether this port is open"))

    def _accept(self) -> None:
        assert self._server is not None
        while not self._closed.is_set():
            try:
                link = _PeerLink(self._server.accept()[0])
            except OSError:
                if self._closed.wait(1.0):  # closed; or out of file descriptors for a while
                    return
                continue
            threading.Thread(target=self._admit, args=(link,), name="control caller", daemon=True).start()

    def _admit(self, link: _PeerLink) -> None:
        hello: Mapping[str, Any] = {}
        with suppress(OSError):
            hello = next(link.messages, {})
        host = hello.get("host")
        if hello.get("kind") != "hello" or type(host) is not int:
            link.close()
            return
        why = ""
        with self._lock:
            if hello.get("hosts") != self._hosts.digest():
                why = "runs with another list of hosts and ranks: give both the same rank table or host list, or two runs two ports"
            elif not 0 < host < len(self._hosts.all):
                why = f"has no host {host} in its list"
            elif host in self._links:
                why = f"has {self._hosts.all[host]} already: the run was started twice there"
            else:
                link.send(_line("welcome"))  # before it is among the links, to which other threads send
                self._links[host] = link
        if not why:
            self._serve(host, link)
            return
        self._events.put(HostRemark(text=f"{host_name(str(hello.get('address'))[:100])} was refused: this one {why}"))
        link.send(_line("refused", text=why))
        link.finish()
        with suppress(OSError):
            for _ in link.messages:
                pass
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
                        text = f"waiting for {first}: its port {port} cannot be reached ({why}); this port must be open too"
                        self._events.put(HostRemark(text=text))
                    else:
                        text = f"{first} could not be reached at port {port} within {self._limit:g} s ({why})"
                        text += "; look whether the run was started there, and at firewalls between the hosts"
                        self._events.put(HostMissing(text=text))
                self._closed.wait(_RETRY_SECONDS)
        finally:
            self._all_here.set()

    def _call(self, address: tuple[str, int]) -> str:
        """One try to reach host 0, and all that follows from it. Returns why it has failed, so that it is worth another one."""
        link: _PeerLink | None = None
        answer: Mapping[str, Any] = {}
        why = "something else answers there"
        try:
            link = _PeerLink(socket.create_connection(address, timeout=_HELLO_SECONDS))
            own = self._hosts.all[self._hosts.own].address
            link.send(_line("hello", host=self._hosts.own, hosts=self._hosts.digest(), address=own))
            answer = next(link.messages, {})
        except OSError as error:
            why = str(error.strerror or error)
        if link is not None and answer.get("kind") == "welcome":
            with self._lock:
                self._links[0] = link
            self._serve(0, link)
            return ""
        if link is not None:
            link.close()
        if answer.get("kind") == "refused":
            self._events.put(HostFailed(text=f"{self._hosts.all[0]} at port {address[1]} {answer.get('text')}", code=2))
            return ""
        return why

    def _serve(self, host: int, link: _PeerLink) -> None:
        """Pass on what a host says until it closes or is lost."""
        with self._lock:
            told = list(self._told)
        for line in told:
            link.send(line)
        if not self.missing():
            self._all_here.set()
        self._events.put(Message(host=host, kind="arrived", values={}))
        name, ended, why = self._hosts.all[host], False, "closed its connection without saying how it ended; look into its output"
        try:
            link.set_silence(LOST_SECONDS)
            for message in link.messages:
                kind = str(message.get("kind"))
                ended = ended or kind in _LAST_WORDS
                if kind != "life":
                    self._events.put(Message(host=host, kind=kind, values=message))
        except TimeoutError:
            why = f"has not been heard from for {LOST_SECONDS:g} s; it has crashed, or the network between the hosts is cut"
        except ConnectionError:  # closed with something of ours unread
            pass
        except OSError as error:
            why = f"cannot be reached any more ({error.strerror or error})"
        link.gone.set()
        link.finish()
        if not ended and not self._closed.is_set():
            self._events.put(HostFailed(text=f"{name} {why}"))


class _PeerLink:
    """One connection: lines both ways. messages: what comes, until the peer closes; raises OSError of the network, TimeoutError after
    the silence that is set."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.gone = threading.Event()
        self.messages = self._read()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_silence(_HELLO_SECONDS)

    def set_silence(self, seconds: float) -> None:
        self._connection.settimeout(seconds)

    def send(self, line: bytes) -> None:
        """A peer that cannot be sent to is found lost by those who listen to it."""
        with suppress(OSError), self._sending:
            self._connection.sendall(line)

    def _read(self) -> Iterator[Mapping[str, Any]]:
        rest = b""
        while chunk := self._connection.recv(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LINE_BYTES:
                raise OSError("its lines have no end")
            for line in lines:
                with suppress(MalformedError):
                    message = parse_json(line)
                    if isinstance(message, dict):
                        yield message

    def finish(self) -> None:
        """No more will be sent; what the peer still says must be read, or the last words would be lost on the way."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _line(kind: str, **values: Any) -> bytes:
    return json.dumps({"kind": kind, **values}).encode() + b"\n"


def _listen(address: str, port: int) -> socket.socket:
    """Listen for the launchers of the other hosts. Raises ConfigError when the port cannot be had."""
    try:
        return listen(address, port)
    except OSError as error:
        raise ConfigError(
            f"host {address}, port {port}: cannot listen there for the launchers of the other hosts: {error.strerror or error}; it must be"
            " a free port of this machine: end what uses it, or set MASTER_PORT to another (this one is the port after it)"
        ) from None
