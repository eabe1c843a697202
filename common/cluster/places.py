"""Placement of ranks on devices and hosts, from a rank table, a range, or both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.cluster.environment import in_pod
from common.errors import ConfigError
from common.log import spans
from common.processes.addresses import LOOPBACK, is_here
from common.whole_numbers import MAX_RANKS

if TYPE_CHECKING:
    from common.cluster.rank_table import RankTable, Server

_NAMES_OF_POD = ("POD_NAME", "HOSTNAME", "POD_IP", "XDL_IP", "POD_UID")
"""Variables with a name of the pod (XDL_IP: of its node), in our job files and MindCluster's."""


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """Place of a rank.

    local_rank: 0, 1, ... on its host. host: server_id or address; ``node 1`` and so on if unknown.
    """

    rank: int
    device_id: int
    local_rank: int
    host: str


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Places of all ranks in order. master: address of the host of rank 0 for the others."""

    all: tuple[RankPlacement, ...]
    own_host: str
    master: str

    @property
    def world_size(self) -> int:
        return len(self.all)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.host for place in self.all))

    def of_host(self, host: str) -> tuple[RankPlacement, ...]:
        return tuple(place for place in self.all if place.host == host)

    @property
    def own(self) -> tuple[RankPlacement, ...]:
        return self.of_host(self.own_host)


def parse_range(text: str, name: str = "DEVICE_RANGE", list_name: str = "--devices") -> range:
    """Parse ``[0,8)``; ``[0,8]`` is equal, as both ends are exclusive.

    name, list_name: of what holds it, and what takes single devices or "". Raises ConfigError.
    """
    parts = re.fullmatch(r"\[ *([^, ]{1,18}) *, *([^, ]{1,18}) *[\])]", text.strip())
    for end, number in zip(("start", "end"), parts.groups() if parts else (), strict=False):
        if not re.fullmatch("[0-9]+", number):
            raise ConfigError(f"{end}_device={number} is not a number")
    found = range(int(parts[1]), int(parts[2])) if parts else range(0)
    if not found:
        single = f"; for single devices give {list_name} 0,1,4" if list_name else ""
        raise ConfigError(
            f"{name} is {text!r}, expected a range such as '[0,8]', of the first device"
            " and an exclusive, greater end; quote it, since the shell replaces [0,8] with the name"
            f" of a file 0 or 8 in this folder{single}"
        )
    return found


def parse_devices(text: str, name: str = "--devices") -> tuple[int, ...]:
    """Parse ``0,1,4``, in the order of the ranks. name: of what holds it. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if re.fullmatch("[0-9]{1,9}", word)]
    if len({*numbers}) < len(words) or len(words) > MAX_RANKS:
        raise ConfigError(f"{name} {text!r}: expected device numbers, each once, with commas between, such as 0,1,4")
    return tuple(numbers)


def places_of_table(table: RankTable) -> tuple[RankPlacement, ...]:
    """Return the place of every rank, in order, by a table that names machines (not 2.0)."""
    found = (
        RankPlacement(rank=device.rank_id, device_id=device.device_id, local_rank=index, host=server.address)
        for server in table.server_list
        for index, device in enumerate(server.device)
    )
    return tuple(sorted(found, key=lambda place: place.rank))


def place_hosts(places: tuple[RankPlacement, ...], own_host: str, master: str | None = None) -> Placement:
    """Return a placement with known hosts. master: overrides the address of rank 0's host."""
    several = len({place.host for place in places}) > 1
    return Placement(all=places, own_host=own_host, master=master or (places[0].host if several else LOOPBACK))


def find_places(
    numbers: Sequence[int],
    *,
    rank_size: int | None = None,
    table: RankTable | None = None,
    master: str | None = None,
    nodes: int | None = None,
    node_rank: int | None = None,
    pod: Server | None = None,
) -> Placement:
    """Return the placement of a run from the arguments of ``run_distribute.sh``.

    numbers: devices of this machine, or with ``rank_size`` a range of global ranks. master, nodes, node_rank: for
    several hosts without a table, where every host runs equally many ranks. The last two follow from ``numbers`` if
    these are ranks. master overrides the address in a table. pod: server of the table that this pod is; its devices may
    be counted from 0, as its driver does. Raises ConfigError where two of these contradict each other.
    """
    if table is not None and (nodes is not None or node_rank is not None):
        raise ConfigError("--nnodes and --node_rank are for RANK_TABLE none; a rank table names the hosts")
    if table is not None and table.version != "2.0":
        return _in_table(numbers, rank_size, places_of_table(table), master, pod)
    if table is not None:
        return _in_networks(numbers, rank_size, table, master)
    if rank_size is not None:
        nodes, node_rank = _node_of_ranks(numbers, rank_size, nodes, node_rank)
    elif nodes is None:
        if node_rank is not None:
            raise ConfigError(f"--node_rank {node_rank} needs --nnodes, the number of hosts")
        nodes, node_rank = 1, 0
    _check_size(numbers, None, nodes * len(numbers))
    if node_rank is None and nodes > 1:
        raise ConfigError(f"--nnodes {nodes} needs --node_rank: which of them this host is, 0 to {nodes - 1}")
    own = node_rank or 0
    if own >= nodes:
        raise ConfigError(f"--node_rank {own} is not among --nnodes {nodes}: expected 0 to {nodes - 1}")
    devices = numbers if rank_size is None else range(len(numbers))
    return _evenly([*devices] * nodes, len(devices), own, master)


def _evenly(devices: Sequence[int], size: int, own: int, master: str | None) -> Placement:
    """Place ranks with these devices on hosts of ``size`` ranks each. own: index of this host."""
    hosts = host_names(len(devices) // size, master)
    places = tuple(
        RankPlacement(rank=rank, device_id=device, local_rank=rank % size, host=hosts[rank // size])
        for rank, device in enumerate(devices)
    )
    return place_hosts(places, hosts[own], hosts[0])


def _in_table(
    numbers: Sequence[int],
    rank_size: int | None,
    places: tuple[RankPlacement, ...],
    master: str | None,
    pod: Server | None,
) -> Placement:
    _check_size(numbers, rank_size, len(places))
    own = places[0 if rank_size is None else numbers[0]].host
    whole = place_hosts(places, own, master)
    if rank_size is None:
        if pod is not None:
            whole = replace(whole, own_host=pod.address)
            if list(numbers) == list(range(len(whole.own))):  # as a container counts its devices
                own_devices = (
                    place if place.host != pod.address else replace(place, device_id=place.local_rank)
                    for place in whole.all
                )
                whole = replace(whole, all=tuple(own_devices))
        elif len(whole.hosts) > 1:
            here = [host for host in whole.hosts if is_here(host)]
            if len(here) != 1:
                raise ConfigError(
                    f"the rank table is of {len(whole.hosts)} servers, so the range must be of ranks: put RANK_SIZE"
                    f" behind the mode, such as '[0,{len(whole.of_host(whole.hosts[0]))})' MODE {whole.world_size}; a"
                    " range of devices is enough where one server has an address of this machine; here"
                    f" {' and '.join(here) or 'none'} has"
                )
            whole = replace(whole, own_host=here[0])
        held = sorted(place.device_id for place in whole.own)
        if sorted(numbers) != held:
            options = (
                f"--device_num '{_shown(numbers)}'"
                if isinstance(numbers, range)
                else f"--device_num '[0,{len(numbers)})' --visible_devices {_shown(numbers)}"
            )
            raise ConfigError(
                f"DEVICE_RANGE {_shown(numbers)} is not what the rank table holds"
                f"{f' for {whole.own_host}' if len(whole.hosts) > 1 else ''}, devices"
                f" {spans(held, least=3)}; make a table of these devices with tools/hccl_tools.py"
                f" {options}, or give ranks: '[0,{len(held)})' MODE {len(places)}"
            )
    elif [place.rank for place in whole.own] != list(numbers):
        servers = "; ".join(
            f"{host} has {spans((place.rank for place in whole.of_host(host)), least=3)}" for host in whole.hosts
        )
        raise ConfigError(
            f"the ranks {_shown(numbers)} are not those of one server of the rank table:"
            f" {servers}; start all ranks of a server at once"
        )
    return whole


def server_of_pod(table: RankTable, environ: Mapping[str, str]) -> Server | None:
    """Return the only server of a table, or the one that carries a name of this pod.

    None outside pods, and if none or several do. Source: MindCluster's description of hccl.json and its rank_table.sh.
    """
    if not in_pod(environ):
        return None
    if len(table.server_list) == 1:
        return table.server_list[0]
    names = {environ[name] for name in _NAMES_OF_POD if environ.get(name)}
    found = [
        server
        for server in table.server_list
        if not names.isdisjoint((server.server_id, server.address, *server.pod_names))
    ]
    return found[0] if len(found) == 1 else None


def _in_networks(numbers: Sequence[int], rank_size: int | None, table: RankTable, master: str | None) -> Placement:
    """Place ranks equally, since version 2.0 does not say where a machine ends."""
    _check_size(numbers, rank_size, table.world_size)
    devices = [device.device_id for _, device in table.places()]
    if rank_size is None:
        if sorted(devices) != sorted(numbers):
            raise ConfigError(
                f"DEVICE_RANGE {_shown(numbers)} is not what the rank table holds, devices"
                f" {spans(devices, least=3)}; put RANK_SIZE behind the mode and give ranks"
            )
        return _evenly(devices, len(devices), 0, master)
    return _evenly(devices, len(numbers), _node_of_ranks(numbers, rank_size, None, None)[1], master)


def _check_size(numbers: Sequence[int], rank_size: int | None, held: int) -> None:
    if rank_size is not None and rank_size != held:
        raise ConfigError(
            f"RANK_SIZE={rank_size}, but the rank table holds {held} ranks; give {held}, or the table of all machines"
        )
    if held > MAX_RANKS or len(numbers) > MAX_RANKS:
        raise ConfigError(
            f"{max(held, len(numbers))} ranks are more than this launcher starts, {MAX_RANKS};"
            " look at the range and at RANK_SIZE"
        )
    if rank_size is not None and numbers[-1] >= held:
        raise ConfigError(
            f"the ranks {_shown(numbers)} go past RANK_SIZE={rank_size}; the last range ends with"
            f" {rank_size}, exclusive"
        )


def _node_of_ranks(numbers: Sequence[int], rank_size: int, nodes: int | None, node_rank: int | None) -> tuple[int, int]:
    """Return the number of hosts with ``len(numbers)`` ranks each, and the index of this one."""
    size = len(numbers)
    _check_size(numbers, rank_size, rank_size)
    if rank_size % size or numbers[0] % size:
        raise ConfigError(
            f"the ranks {_shown(numbers)} are not an equal part of RANK_SIZE={rank_size}: without a"
            f" rank table every host runs equally many, such as '[0,{size})',"
            f" '[{size},{2 * size})', ... of a multiple of {size}"
        )
    found = rank_size // size, numbers[0] // size
    for name, given, follows in (("nnodes", nodes, found[0]), ("node_rank", node_rank, found[1])):
        if given is not None and given != follows:
            raise ConfigError(
                f"--{name} {given}, but the ranks {_shown(numbers)} of {rank_size} make it {follows}; leave it out"
            )
    return found


def host_names(nodes: int, master: str | None) -> list[str]:
    """Return the hosts of a run without a table, that of rank 0 first. Raises ConfigError."""
    if nodes > 1 and master is None:
        raise ConfigError(
            f"{nodes} hosts need a common address: give --master IP:PORT, the address of the host"
            " of rank 0, or a rank table of 1.0"
        )
    return [master or LOOPBACK, *(f"node {node}" for node in range(1, nodes))]


def _shown(numbers: Sequence[int]) -> str:
    if isinstance(numbers, range):
        return f"[{numbers.start},{numbers.stop})"
    return ",".join(map(str, numbers))
