"""Where processes listen for others of their run: at a loopback address where that is the one they meet at, else at all addresses."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress

from common.cluster.environment import LOOPBACK, Process
from common.cluster.rank_environment import interface_of, is_ip


def listen(address: str, port: int) -> socket.socket:
    """Listen where others reach this host by ``address``, all its addresses where that is a name. Raises OSError when the port is taken."""
    if is_ip(address) and ipaddress.ip_address(address).is_loopback:
        return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # a container may have none of version 6; a port that is taken is so for both
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def network_of_one_host(process: Process) -> Mapping[str, str]:
    """Variables by which gloo and NCCL keep to the loopback interface; none where the run has several hosts."""
    if process.local_world_size < process.world_size:
        return {}
    interface = interface_of(LOOPBACK)
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
