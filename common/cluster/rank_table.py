"""Records of an Ascend rank table (which rank is on which device), and their validation."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import DataError
from common.processes.addresses import is_ip, is_loopback
from common.whole_numbers import spans

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, kw_only=True)
class TableDevice:
    """One chip. device_ip: address of its network port; None if absent, as on one server.

    super_device_id: its number inside a super pod (version 1.2). extra: keys unknown to this
    project.
    """

    rank_id: int
    device_id: int
    device_ip: str | None = None
    super_device_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Server:
    """One machine, or a pod on it. server_id: usually the machine's IP address; in version 2.0 its
    innermost network instance.

    pod_names: of version 0.
    """

    server_id: str
    devices: tuple[TableDevice, ...]
    host_nic_ip: str | None = None
    pod_names: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Address for the ranks of other servers: of the pod, of the host, or server_id.

        HCCL's guide to versions 1.0 and 1.2 has names such as node_0 in server_id, beside host_ip.
        """
        others = (self.extra.get(key) for key in ("container_ip", "host_ip"))
        return next(
            (other for other in others if isinstance(other, str) and is_ip(other)), self.server_id
        )


@dataclass(frozen=True, kw_only=True)
class SuperPod:
    """Servers whose chips share memory addresses (version 1.2).

    servers: server_id -> the unknown keys of its entry.
    """

    super_pod_id: str
    servers: Mapping[str, Mapping[str, Any]]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankTable:
    """Table with the place of every rank. version: "0", "1.0", "1.2" or "2.0", as it was read.

    Devices are in the order of their ranks, and servers in the order of their first rank, whatever
    the order in the file.
    """

    version: str
    servers: tuple[Server, ...]
    super_pods: tuple[SuperPod, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return sum(len(server.devices) for server in self.servers)

    def places(self) -> list[tuple[Server, TableDevice]]:
        """Return servers and devices of ranks 0, 1, 2, ..."""
        return sorted(_pairs(self.servers), key=lambda pair: pair[1].rank_id)

    def place(self, rank: int) -> tuple[Server, TableDevice]:
        """Return the server and device of ``rank``. Raises DataError for a rank that is not in the
        table.
        """
        if not 0 <= rank < self.world_size:
            raise DataError(
                f"rank {rank} is not in the rank table, which holds ranks 0 to"
                f" {self.world_size - 1}"
            )
        return self.places()[rank]


def in_rank_order(servers: Iterable[Server]) -> tuple[Server, ...]:
    """Sort servers and devices into the order that RankTable promises."""
    inside = [
        replace(server, devices=tuple(sorted(server.devices, key=lambda device: device.rank_id)))
        for server in servers
    ]
    return tuple(
        sorted(inside, key=lambda server: server.devices[0].rank_id if server.devices else -1)
    )


def parse_address(text: str, place: str) -> Address:
    """Parse an IPv4 or IPv6 address that another machine can reach.

    Raises DataError that begins with ``place``. Loopback is accepted: whether it is an error
    depends on the caller.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise DataError(
            f"{place}: {text!r} is not an IP address; expected one such as 192.168.1.10 or fd00::10"
        ) from None
    if address.is_unspecified or address.is_multicast:
        raise DataError(
            f"{place}: {text} is not the address of one machine; expected one such as 192.168.1.10"
            " or fd00::10"
        )
    return address


def validate(table: RankTable, place: str) -> None:
    """Reject a table that the communication library would reject minutes later.

    Raises DataError that begins with ``place``. Ranks must be 0, 1, ..., each once. Servers, device
    ids of a server and addresses must be unique. Several servers need addresses that others can
    reach. Source: the rank table chapters of Huawei's HCCL user guide.
    """
    for server in table.servers:
        if not server.devices:
            raise DataError(
                f"{place}: server {server.server_id} has no devices; leave it out or add them"
            )
    if not table.servers:
        raise DataError(
            f"{place}: there is no server in the table; make one with tools/hccl_tools.py"
        )
    _refuse_repeats(
        (server.server_id for server in table.servers),
        f"{place}: server",
        "merge its entries into one",
    )
    ranks = sorted(device.rank_id for _, device in _pairs(table.servers))
    if ranks != list(range(len(ranks))):
        raise DataError(
            f"{place}: {len(ranks)} devices have the ranks {spans(ranks)}; expected 0 to"
            f" {len(ranks) - 1}, each once; make the table again"
        )
    # a server is then a network instance, which may span machines; local_id is checked while
    # reading
    if table.version != "2.0":
        for server in table.servers:
            ids = (device.device_id for device in server.devices)
            _refuse_repeats(
                ids, f"{place}: server {server.server_id}: device_id", "list each device once"
            )
    _check_addresses(table, place)
    if table.version == "1.2":
        _check_super_pods(table, place)


def table_warnings(table: RankTable) -> list[str]:
    """Return a warning for each entry that is allowed but probably unintended."""
    found = []
    if any(is_loopback(server.address) for server in table.servers):
        found.append(
            f"server {table.servers[0].address} is a loopback address: fine on one machine,"
            " but the table cannot be merged with others; make it again with --server_ip"
        )
    if len({len(server.devices) for server in table.servers}) > 1:
        counts = ", ".join(
            f"{server.server_id} has {len(server.devices)}" for server in table.servers
        )
        found.append(
            f"servers hold different numbers of devices ({counts}); most collectives expect the"
            " same number"
        )
    return found


def _pairs(servers: Iterable[Server]) -> Iterator[tuple[Server, TableDevice]]:
    return ((server, device) for server in servers for device in server.devices)


def _refuse_repeats(values: Iterable[Hashable], what: str, remedy: str) -> None:
    for value, times in Counter(values).items():
        if times > 1:
            raise DataError(f"{what} {value} is there {times} times; {remedy}")


def _check_addresses(table: RankTable, place: str) -> None:
    several = len(table.servers) > 1
    seen: dict[Address, str] = {}
    for server, device in _pairs(table.servers):
        if several and is_loopback(server.address):
            raise DataError(
                f"{place}: server {server.address} is a loopback address, which other servers"
                " cannot reach; make that server's table again with tools/hccl_tools.py"
                " --server_ip"
            )
        where = f"{place}: rank {device.rank_id} (device {device.device_id} of {server.server_id})"
        if device.device_ip is None:
            if several and table.version != "2.0":
                raise DataError(
                    f"{where} has no device_ip, which several servers need; `hccn_tool -i"
                    f" {device.device_id} -ip -g` shows it"
                )
            continue
        address = parse_address(device.device_ip, f"{where}: device_ip")
        if address.is_loopback:
            raise DataError(
                f"{where}: device_ip {address} is a loopback address; set the device's own with"
                " `hccn_tool -i N -ip -s`"
            )
        if address in seen:
            raise DataError(
                f"{where}: device_ip {address} is also that of {seen[address]}; every device needs"
                " an address of its own"
            )
        seen[address] = f"rank {device.rank_id} (device {device.device_id} of {server.server_id})"


def _check_super_pods(table: RankTable, place: str) -> None:
    _refuse_repeats(
        (pod.super_pod_id for pod in table.super_pods),
        f"{place}: super_pod_id",
        "merge its entries into one",
    )
    members = [server_id for pod in table.super_pods for server_id in pod.servers]
    _refuse_repeats(
        members, f"{place}: super_pod_list: server", "a server belongs to one super pod"
    )
    servers = {server.server_id: server for server in table.servers}
    for server_id in sorted(servers.keys() ^ set(members)):
        raise DataError(
            f"{place}: server {server_id} is in server_list or in super_pod_list only; version 1.2"
            " needs it in both"
        )
    for pod in table.super_pods:
        numbers = []
        for server_id in pod.servers:
            for device in servers[server_id].devices:
                if device.super_device_id is None:
                    raise DataError(
                        f"{place}: rank {device.rank_id} has no super_device_id, which version 1.2"
                        " needs; `npu-smi info -t spod-info -i N -c 0` shows it; chips without"
                        " super pods use version 1.0"
                    )
                numbers.append(device.super_device_id)
        _refuse_repeats(
            numbers,
            f"{place}: super pod {pod.super_pod_id}: super_device_id",
            "give each device its own",
        )
