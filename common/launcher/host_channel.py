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

import asyncio
import json
import queue
import socket
import threading
import time
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError, create_model

from common.errors import ConfigError, RunError
from common.launcher.rank_process import Failure, RankState
from common.launcher.terminal import tell
from common.log import rank_names, spans
from common.processes.addresses import is_own, listen
from common.structured_files import MalformedError, parse_json

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
_HELLO_SECONDS = 10.0
_LINE_BYTES = 1 << 20
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
        return [_PROTOCOL, bool(self.devices), *([host.address, list(host.ranks)] for host in self.all)]


@dataclass(frozen=True, kw_only=True)
class Message:
    """Event: a message of a host, that it is lost (with a text), or one of this launcher's own."""

    kind: str
    host: int = -1
    values: Mapping[str, Any]


_MESSAGES: dict[str, type[BaseModel] | type[Failure]] = {
    "ready": create_model("ready"),
    "begin": create_model("begin", number=(int, ...)),
    "life": create_model("life", states=(list[RankState], []), done=(bool, False), stopped=(bool, False)),
    "failed": Failure,
    "stop": create_model("stop", signal=(int, ...), where=(str, "")),
    "end": create_model("end", code=(int, ...), failure=(Failure | None, ...), then=(str, ...)),
}
"""Values of each kind of message after the welcome."""


def host_name(address: str) -> str:
    """Return a host's name for messages. One without an address is called ``node 1``."""
    return address if address.startswith("node ") else f"host {address}"


class HostChannel:
    """This host's end, and the events of its launcher. A single host has one without a port.

    Messages are JSON objects, one a line. Connections belong to the event loop of one thread. Anyone who reaches the
    port can call, so it belongs in the network of the cluster.

    restarts: a host that comes although the run has begun, since its launcher was started again, is
    told to come later, for the next attempt. Otherwise it is refused.
    """

    def __init__(self, hosts: Hosts, *, restarts: bool, say: Callable[..., None] = tell) -> None:
        """Listen on host 0. Raises ConfigError if its port is not available."""
        self._hosts, self._restarts, self._say = hosts, restarts, say
        self.own = hosts.own
        """Index of this host."""
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._links: dict[int, StreamWriter] = {}
        self._callers = {0: (hosts.all[0].address, list(hosts.devices))}
        """Address of the hosts that have come, and devices of those without a number."""
        self._ready: set[int] = set()
        self._begun: int | None = None
        """Number of the attempt that has begun."""
        self._life: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        if len(hosts.all) == 1:
            return
        server = None
        if hosts.own == 0:
            first = hosts.all[0].address
            try:
                server = listen(first, hosts.port)
            except OSError as error:
                raise ConfigError(
                    f"host {first}, port {hosts.port}: cannot listen there for the launchers of the other hosts:"
                    f" {error.strerror or error}; it must be a free port of this machine: end what uses it, or set"
                    " MASTER_PORT to another (this one is the port after it)"
                ) from error
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(server,), name="hosts", daemon=True)
        self._thread.start()

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
        self._life, self._begun = {}, None  # the loop sends in order: no life of the attempt before follows
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
        come = self._ready & set(self._links)
        missing = [str(host) for n, host in enumerate(self._hosts.all) if n and n not in come]
        if not missing:
            self._begun = number
            self._ready.clear()
            self.tell("begin", number=number)
        return f"{', '.join(missing)}: its launcher has not come to port {self._hosts.port}, which must be open", False

    def _call(self) -> tuple[str, bool]:
        """Call host 0, if necessary. Returns what is missing, and whether host 0 has answered."""
        first, port = self._hosts.all[0], self._hosts.port
        if self.has_first or self._begun is not None:  # host 0 may have left since it began
            return "the others; this host has come", True
        try:
            connection = socket.create_connection((first.address, port), _CONNECT_SECONDS)
        except OSError as error:
            return f"{first}: its port {port}, which must be open, cannot be reached ({error.strerror or error})", False
        answer = asyncio.run_coroutine_threadsafe(self._greet(connection), self._loop).result()
        if self.has_first:
            return self._call()
        if answer.get("kind") == "refused":
            raise ConfigError(f"{first} at port {port} {answer.get('text')}")
        if answer.get("kind") == "later":
            return f"{first}: it is not ready for this host yet, or has one in its place", True
        return f"{first}: something else answers at its port {port}", False

    def tell(self, kind: str, **values: Any) -> None:
        """Send to host 0, or from host 0 to all others."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._send, kind, values)

    @property
    def has_first(self) -> bool:
        """Tell whether host 0 has taken this host in."""
        return self.own != 0 and 0 in self._links

    def set_life(self, **values: Any) -> None:
        """Set what ``life`` says of this host, whose end is told at once."""
        before, self._life = self._life, values
        if values["done"] and not before.get("done"):
            self.tell("life", **values)

    def close(self) -> None:
        """Let sent messages arrive, for at most a few seconds."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(2 * _CLOSE_SECONDS)

    # ---- in the thread of the event loop ----

    def _run(self, server: socket.socket | None) -> None:
        said: set[str] = set()

        def report(loop: object, context: Mapping[str, Any]) -> None:
            """Say each fault once: without file descriptors asyncio finds the same one a hundred times a second."""
            text = f"connections of other hosts: {context['message']}: {context.get('exception')}"
            if text not in said:
                said.add(text)
                self._say(text, error=True)

        self._loop.set_exception_handler(report)  # asyncio's own prints tracebacks
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_all(server))

    async def _serve_all(self, server: socket.socket | None) -> None:
        """Serve the other hosts until the channel is closed."""
        listening = None
        if server is not None:
            listening = await asyncio.start_server(
                lambda *streams: self._in_task(self._admit(*streams)), sock=server, limit=_LINE_BYTES
            )
        while not self._closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), LIFE_SECONDS)
            self._send("life", self._life)
        if listening is not None:
            listening.close()
        links, self._links = self._links, {}
        for link in links.values():
            with suppress(OSError):
                link.write_eof()
        # what the others still send must be read, otherwise the last messages would be lost
        with suppress(TimeoutError):
            waits = [link.wait_closed() for link in links.values()]
            await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), _CLOSE_SECONDS)

    def _in_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, kind: str, values: Mapping[str, Any], *links: StreamWriter) -> None:
        """Send to some, or to all; a lost peer is noticed where its messages are read."""
        for link in links or self._links.values():
            link.write(json.dumps({"kind": kind, **values}, default=vars).encode() + b"\n")

    async def _greet(self, connection: socket.socket) -> dict[str, Any]:
        """Say hello to host 0. Returns its answer; empty if none comes in time."""
        reader, link = await asyncio.open_connection(sock=connection, limit=_LINE_BYTES)
        own = {"host": self._hosts.own, "hosts": self._hosts.listed(), "devices": self._hosts.devices}
        self._send("hello", own, link)
        answer = await _hello(reader)
        if answer.get("kind") == "welcome" and answer.get("host") in range(1, len(self._hosts.all)):
            self.own = int(answer["host"])
            self._links[0] = link
            self._in_task(self._serve(0, reader, link))
        else:
            link.close()
        return answer

    async def _admit(self, reader: StreamReader, link: StreamWriter) -> None:
        """Answer a caller, serve the one that is taken in, and close the connection."""
        with closing(link):
            hello, hosts = await _hello(reader), self._hosts.all
            host, devices = hello.get("host"), hello.get("devices")
            address = str(link.get_extra_info("peername")[0]).removeprefix("::ffff:")
            if type(host) is not int or type(devices) is not list or any(type(device) is not int for device in devices):
                if hello:  # anything but an object is no launcher's
                    self._say(f"{host_name(address)} was refused: its first message is damaged", error=True)
                return
            if host < 0:
                host = next((n for n in range(1, len(hosts)) if n not in self._links), 0)
            if why := self._refusal(hello, host, address):
                self._say(f"{host_name(address)} was refused: this one {why}", error=True)
                self._send("refused", {"text": why}, link)
            elif self._begun is not None or host in (0, *self._links):
                self._send("later", {}, link)
            else:
                self._send("welcome", {"host": host}, link)  # before anything else is sent to it
                self._links[host], self._callers[host] = link, (address, devices)
                self._events.put(Message(kind="ready", host=host, values={}))
                named = f", devices {spans(devices)}" if devices else ""
                self._say(f"{hosts[host]} has come from {address}{named}", error=True)
                await self._serve(host, reader, link)

    def _refusal(self, hello: Mapping[str, Any], host: int, address: str) -> str:
        """Return why this run has no place for a caller; empty if it has, now or later."""
        if hello.get("hosts") != self._hosts.listed() or host >= len(self._hosts.all):
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

    async def _serve(self, host: int, reader: StreamReader, link: StreamWriter) -> None:
        """Pass on a host's messages until it closes or is lost."""
        why = "closed its connection without saying how it ended; look into its output"
        try:
            while True:
                message = await _receive(reader, LOST_SECONDS)
                kind = str(message.get("kind"))
                values = vars(TypeAdapter(_MESSAGES[kind]).validate_python(message))
                self._events.put(Message(kind=kind, host=host, values=values))
        except (KeyError, ValidationError):
            why = "has sent a damaged message"
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
        self._links.pop(host, None)
        self._callers.pop(host, None)
        self._events.put(Message(kind="lost", host=host, values={"text": f"{self._hosts.all[host]} {why}"}))


async def _hello(reader: StreamReader) -> dict[str, Any]:
    """Return the first object of a caller, or of its answer; empty if none comes in time."""
    with suppress(OSError):
        return await _receive(reader, _HELLO_SECONDS)
    return {}


async def _receive(reader: StreamReader, limit: float) -> dict[str, Any]:
    """Return the next object.

    Raises TimeoutError after ``limit`` seconds, and ConnectionError at the end and for a line that is
    not an object. Other kinds of OSError come from the network.
    """
    with suppress(MalformedError, IncompleteReadError, asyncio.LimitOverrunError):
        message = parse_json(await asyncio.wait_for(reader.readuntil(), limit))
        if isinstance(message, dict):
            return message
    raise ConnectionError("it has ended, or sends something else")
