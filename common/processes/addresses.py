"""Addresses and ports of this machine, and the network interfaces that hold them."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from random import SystemRandom

LOOPBACK = "127.0.0.1"
"""Address of a run that needs no other host."""
DEFAULT_PORT = 29500
OWN_PORTS = range(61440, 65535)
"""Ports above those that the system gives to connections."""


def is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def may_be_host(text: str) -> bool:
    """Tell whether text has the form of an address or of a host's name, without a port."""
    return is_ip(text) or re.fullmatch(r"[^\s:/\[\]-][^\s:/\[\]]*", text) is not None


def is_loopback(host: str) -> bool:
    """Tell whether an address or name leads each machine to itself."""
    name = host.lower().removesuffix(".")
    return ipaddress.ip_address(name).is_loopback if is_ip(name) else name == "localhost"


def free_port() -> int:
    """Return a TCP port that nothing has here now, and that no connection is likely to take."""
    with socket.socket() as probe:
        for port in (*SystemRandom().sample(OWN_PORTS, 99), 0):
            with suppress(OSError):
                probe.bind((LOOPBACK, port))
                break
        return int(probe.getsockname()[1])


def listen(address: str, port: int) -> socket.socket:
    """Listen at a loopback address only, or at all addresses of this machine.

    address: the one by which other hosts reach this machine. Raises OSError if the port is taken.
    """
    if is_ip(address) and is_loopback(address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # a container may have no IPv6; a taken port is taken for both
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def is_own(host: str) -> bool:
    """Tell whether an address or host name is this machine's."""
    return any(interface_of(address) for address in _addresses(host))


def is_here(host: str) -> bool:
    """Tell whether an address, or a name in /etc/hosts, leads this machine to itself."""
    return is_own(host) or any(is_loopback(address) for address in _addresses(host))


def interface_of(address: str) -> str | None:
    """Return the network interface that holds an address, or one of a host name; else None."""
    wanted = {ipaddress.ip_address(found) for found in _addresses(address)}
    return next((name for held, name in _interfaces() if held in wanted), None)


def own_address(own: str, others: Iterable[str]) -> str | None:
    """Return the address by which other hosts reach this one, which they call ``own``.

    If no name is given, it is the address from which this host reaches them. A loopback address is
    returned only if one was given: a host's own name may stand for one in its /etc/hosts.
    """
    if _is_literal(own):
        return own if is_own(own) else None
    named = [address for address in _addresses(own) if not is_loopback(address)]
    found = next((address for address in named if is_own(address)), None)
    if found is not None:
        return found
    for host in dict.fromkeys(others):
        for address in _addresses(host) if host != own else ():
            route = _route_to(address)
            if route is not None and (_is_literal(host) or not is_loopback(route)):
                return route
    return _default_address()


def _is_literal(host: str) -> bool:
    return is_ip(host) or host == "localhost"


def _route_to(address: str) -> str | None:
    """Return this machine's address from which another is reached; None without a route."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, DEFAULT_PORT))  # sends nothing: chooses a route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _default_address() -> str | None:
    """Return the address towards the internet, else the only one that is not loopback, or None."""
    route = _route_to("192.0.2.1")  # an address reserved for documentation (RFC 5737)
    if route is not None and not is_loopback(route):
        return route
    held = [str(address) for address, _ in _interfaces() if not (address.is_loopback or address.is_link_local)]
    return held[0] if len(held) == 1 else None


def _addresses(host: str) -> list[str]:
    """Resolve a host name; an address resolves to itself. Empty for an unknown name."""
    if is_ip(host):
        return [host]
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _interfaces() -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, str]]:
    """Return every IP address of this machine with the name of its interface."""
    import psutil  # not at the top of the file: --help of run_gpt2.py loads no library

    return [
        (ipaddress.ip_address(entry.address.partition("%")[0]), name)  # fe80::1%eth0
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
