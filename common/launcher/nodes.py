"""Number of this host among those of a run, if the command does not give it."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

from common.cluster.environment import Process, connect_limit, place_of_pod, task_of_step
from common.cluster.places import host_names
from common.cluster.rank_environment import given_port, parse_master
from common.errors import ConfigError
from common.launcher.host_channel import Host, HostChannel, Hosts
from common.launcher.request import LaunchRequest
from common.launcher.terminal import tell
from common.processes.addresses import DEFAULT_PORT, is_here


def settle_nodes(request: LaunchRequest, *, meet: bool) -> LaunchRequest:
    """Return the request with the number of this host, found by its address, from the variables of
    a pod or of a step of Slurm, or from the master.

    meet: wait for the other hosts; a run that is only shown is node 1 unless it is the master.
    Raises ConfigError, and RunError if the others do not arrive.
    """
    if request.addresses:
        return _place_by_address(request)
    given = (request.table, request.rank_size, request.master, request.nnodes, request.node_rank)
    place = _place_by_environment() if all(item is None for item in given) else None
    if place is not None:
        source = "the step of Slurm" if place.launcher == "srun" else "the pod's environment"
        tell(f"hosts by {source}: {place.world_size}, this is number {place.rank}, rank 0 is on {place.master}")
        return _with_nodes(request, place.world_size, place.rank, str(place.master), place.port)
    host, port = parse_master(request.master)
    known = request.node_rank is not None or request.rank_size is not None or request.table
    nodes = request.nnodes or 1
    if known or nodes == 1:
        return request
    host = host_names(nodes, host)[0]
    number = 0 if request.mode == "plan" or is_here(host) else 1
    if meet:
        port = (port or given_port(os.environ) or DEFAULT_PORT) + 1
        number = find_node(host, port, nodes, tuple(request.numbers), connect_limit(os.environ))
    return replace(request, node_rank=number)


def find_node(master: str, port: int, nodes: int, devices: tuple[int, ...], limit: float) -> int:
    """Return the number of this host, 0 for the master, once all ``nodes`` have come to its port.

    devices: those of this host; several nodes on one machine need different ones. limit: seconds.
    Raises ConfigError if the master refuses this host, and RunError if not all come in time.
    """
    size = len(devices)
    hosts = Hosts(
        all=tuple(
            Host(address=name, ranks=tuple(range(node * size, (node + 1) * size)))
            for node, name in enumerate(host_names(nodes, master))
        ),
        own=0 if is_here(master) else -1,
        port=port,
        devices=devices,
    )
    try:
        channel = HostChannel(hosts, restarts=True)
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
            raise
        # another node of this machine has the port
        channel = HostChannel(replace(hosts, own=-1), restarts=True)
    try:
        tell(f"{nodes} hosts are numbered as they come to {hosts.all[0]}, port {port}")
        channel.gather(0, limit, lambda event: True)
        tell(f"this is node {channel.own} of {nodes}")
    finally:
        channel.close()
    return channel.own


def _place_by_environment() -> Process | None:
    """Return this launcher among those of a Slurm step, or of pods; None for one alone."""
    task = task_of_step(os.environ)
    if task is None or task.world_size == 1:
        return place_of_pod(os.environ)
    if task.local_world_size != 1:
        raise ConfigError(
            f"srun has started {task.local_world_size} tasks on this node, and each of them would"
            " start all of its ranks; give srun --ntasks-per-node=1, or start run_gpt2.py; for"
            " separate runs give the command --nnodes 1"
        )
    return task


def _place_by_address(request: LaunchRequest) -> LaunchRequest:
    """Return the request with the values that follow from ``--node_ips``."""
    addresses = request.addresses
    if request.nnodes not in (None, len(addresses)) or request.node_rank is not None:
        raise ConfigError(
            f"--node_ips names {len(addresses)} hosts and says which is which; leave --nnodes and --node_rank out"
        )
    own = [number for number, address in enumerate(addresses) if is_here(address)]
    if len(own) != 1 and request.mode != "plan":
        found = ", ".join(addresses[number] for number in own) or "none"
        raise ConfigError(
            f"--node_ips {','.join(addresses)}: {found} of them is an address of this machine,"
            " expected one; correct the list, or give --master IP:PORT --nnodes N --node_rank K"
        )
    node = own[0] if len(own) == 1 else 0
    port = given_port(os.environ) or DEFAULT_PORT
    placed = _with_nodes(request, len(addresses), node, addresses[0], port)
    return replace(placed, master=request.master or placed.master)


def _with_nodes(request: LaunchRequest, nodes: int, node: int, master: str, port: int | None) -> LaunchRequest:
    address = f"[{master}]" if ":" in master else master
    return replace(request, nnodes=nodes, node_rank=node, master=f"{address}:{port}")
