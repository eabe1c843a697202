"""Numbering of the hosts of a run without given numbers.

The host with the master's address is node 0. It waits at the port above the master's for all
others, sorts them by address and tells each its number. The launchers then use the same port to
watch each other.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError, RunError
from common.launcher.control import REMIND_SECONDS, ROLL_CALL, host_name
from common.launcher.terminal import tell
from common.processes.addresses import is_here, is_own, listen
from common.processes.channel import HELLO_SECONDS, Channel, ChannelEndedError, connect
from common.whole_numbers import MOST_RANKS, spans

_PEER = "a launcher"
_LOOK_SECONDS = 0.5
_CLOSE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class RollCall:
    """Parameters of the numbering. master: address or name of node 0. port: where it listens.

    nodes: number of hosts. devices: numbers of those that this host uses. limit: seconds within
    which all hosts must arrive.
    """

    master: str
    port: int
    nodes: int
    devices: tuple[int, ...]
    limit: float


@dataclass(frozen=True, kw_only=True)
class _Caller:
    """Host that waits for its number. address: as this host sees it."""

    address: str
    devices: tuple[int, ...]
    link: Channel

    def __str__(self) -> str:
        return f"{self.address} (devices {spans(self.devices)})"

    @property
    def order(self) -> tuple[int, int, tuple[int, ...]]:
        address = ipaddress.ip_address(self.address)
        return address.version, int(address), self.devices


def find_node(call: RollCall) -> int:
    """Return the number of this host, 0 for the master, once all hosts have arrived.

    Several nodes on one machine need different devices. Raises ConfigError if the master rejects
    this host, and RunError if not all arrive in time.
    """
    if is_here(call.master):
        try:
            server = listen(call.master, call.port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # else another node of this machine has the port
                raise ConfigError(
                    f"--master {call.master}, port {call.port}: cannot listen there for the other"
                    f" hosts: {error.strerror or error}"
                ) from None
        else:
            with server:
                return _number_the_others(call, server)
    return _ask(call)


def _number_the_others(call: RollCall, server: socket.socket) -> int:
    began, reminded = time.monotonic(), False
    callers: list[_Caller] = []
    server.settimeout(_LOOK_SECONDS)
    tell(f"node 0 of {call.nodes}: the others are numbered when all have come to port {call.port}")
    try:
        while len(callers) < call.nodes - 1:
            waited = time.monotonic() - began
            came = ", ".join(map(str, callers)) or "none"
            if waited > call.limit:
                raise RunError(
                    f"{len(callers)} of {call.nodes - 1} other hosts have come to port {call.port}"
                    f" within {call.limit:g} s: {came}; start the same command on each, look"
                    " whether this port is open, or give each its --node_rank"
                )
            if waited > REMIND_SECONDS and not reminded:
                reminded = True
                tell(f"waiting for {call.nodes - 1 - len(callers)} hosts more; here: {came}")
            with suppress(TimeoutError):
                _admit(call, callers, server)
            for caller in [caller for caller in callers if caller.link.is_closed]:
                caller.link.close()
                callers.remove(caller)
                tell(f"host {caller} has left again", error=True)
        callers.sort(key=lambda caller: caller.order)
        for number, caller in enumerate(callers, 1):
            with suppress(OSError):  # the others then miss its launcher
                caller.link.send({"kind": "number", "number": number})
            tell(f"node {number} is {caller}")
    finally:
        for caller in callers:
            _finish(caller.link)
    return 0


def _admit(call: RollCall, callers: list[_Caller], server: socket.socket) -> None:
    """Accept or reject the next caller. Raises TimeoutError if there is none."""
    connection, (found, *_) = server.accept()
    link = Channel(connection, _PEER)
    hello = link.hello()
    devices = _numbers(hello.get("devices"))
    if hello.get("kind") != ROLL_CALL or devices is None:
        link.close()
        return
    address = ipaddress.ip_address(str(found).partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None) or address
    caller = _Caller(address=str(mapped), devices=devices, link=link)
    why = _refusal(call, callers, caller, hello)
    if not why:
        callers.append(caller)
        return
    tell(f"host {caller} was refused: {why}", error=True)
    with suppress(OSError):
        link.send({"kind": "refused", "text": why})
    _finish(link)


def _numbers(devices: Any) -> tuple[int, ...] | None:
    """Return the device numbers that a caller sends; None if it sends none."""
    if not isinstance(devices, list) or not 0 < len(devices) <= MOST_RANKS:
        return None
    if not all(type(number) is int and 0 <= number < 10**9 for number in devices):
        return None
    return tuple(devices)


def _refusal(
    call: RollCall, callers: Sequence[_Caller], caller: _Caller, hello: Mapping[str, Any]
) -> str:
    """Return why a host cannot be part of this run; empty if it can."""
    if hello.get("nodes") != call.nodes:
        return (
            f"its --nnodes is {hello.get('nodes')}, and that of the master {call.nodes}; give the"
            " same on every host"
        )
    if len(caller.devices) != len(call.devices):
        return (
            f"it has {len(caller.devices)} devices, and the master {len(call.devices)}; without a"
            " rank table every host runs equally many ranks"
        )
    here = [other.devices for other in callers if other.address == caller.address]
    here += [call.devices] if is_own(caller.address) else []
    if any(set(devices) & set(caller.devices) for devices in here):
        return (
            "this host has come already: the run was started twice there; end one of the two, or"
            " give several nodes on one machine devices of their own"
        )
    return ""


def _ask(call: RollCall) -> int:
    """Ask the master for the number of this host, and wait until all have arrived."""
    deadline = time.monotonic() + call.limit
    master, told, why = f"{host_name(call.master)} at port {call.port}", False, ""
    tell(f"asking {master} for the number of this host among {call.nodes}")
    while (left := deadline - time.monotonic()) > 0:
        try:
            link = connect(call.master, call.port, _PEER, min(left, HELLO_SECONDS))
        except OSError as error:
            why = str(error.strerror or error)
        else:
            answer, why = _converse(call, link, left)
            if answer.get("kind") == "refused":
                raise ConfigError(f"{master} refused this host: {answer.get('text')}")
            number = answer.get("number")
            if type(number) is int and 0 < number < call.nodes:
                tell(f"node {number} of {call.nodes}, as {master} says")
                return number
        if not told and deadline - time.monotonic() < call.limit - REMIND_SECONDS:
            told = True
            tell(f"waiting for {master} to number this host ({why})", error=True)
        time.sleep(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
    raise RunError(
        f"{master} has not numbered this host within {call.limit:g} s ({why}); look whether the"
        " run was started there and on all other hosts, and at firewalls, or give --node_rank"
    )


def _converse(call: RollCall, link: Channel, limit: float) -> tuple[dict[str, Any], str]:
    """Return the master's answer, or an empty answer and the reason."""
    try:
        link.send({"kind": ROLL_CALL, "nodes": call.nodes, "devices": list(call.devices)})
        return link.receive(limit), "it gave no number"
    except TimeoutError:
        return {}, "not all hosts have come"
    except ChannelEndedError:
        return {}, "it closed the connection"
    except OSError as error:
        return {}, str(error.strerror or error)
    finally:
        link.close()


def _finish(link: Channel) -> None:
    """Close a connection once the other end has read all data."""
    link.finish()
    with suppress(OSError):
        link.receive(_CLOSE_SECONDS)
    link.close()
