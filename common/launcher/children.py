"""Processes that a host's launcher starts, and the hosts whose launchers it talks to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from common.cluster.places import Placement
from common.cluster.rank_environment import (
    SCHEDULER,
    Rendezvous,
    rank_variables,
    scheduler_variables,
)
from common.launcher.cores import cores_of_ranks
from common.launcher.host_channel import Host, Hosts
from common.launcher.rank_process import ProcessSpec


def make_children(
    places: Placement,
    rendezvous: Rendezvous,
    command: tuple[str, ...],
    *,
    environ: Mapping[str, str],
    pinned: bool = True,
) -> tuple[ProcessSpec, ...]:
    """Return one process per rank of this host, all with the same command.

    The host of rank 0 also has MindSpore's scheduler if needed. pinned: each rank has its own
    cores, if there are enough.
    """
    own = places.own
    shares = cores_of_ranks(len(own))
    fair = max(1, len(os.sched_getaffinity(0)) // len(own))
    children = [
        ProcessSpec(
            rank=place.rank,
            command=command,
            environment=rank_variables(
                place,
                places,
                rendezvous,
                cores=len(cores) if cores and pinned else fair,
                environ=environ,
            ),
            cores=cores if pinned else (),
        )
        for place, cores in zip(own, shares, strict=True)
    ]
    if rendezvous.scheduler and own[0].rank == 0:
        children.append(
            ProcessSpec(
                rank=-1,
                command=SCHEDULER,
                environment=scheduler_variables(places, rendezvous),
                name="scheduler",
            )
        )
    return tuple(children)


def make_hosts(
    places: Placement, rendezvous: Rendezvous, addresses: Sequence[str] = ()
) -> Hosts | None:
    """Return all hosts, for the channel between their launchers; None for one host.

    addresses: those by which they reach each other, if the placement does not have them.
    """
    if len(places.hosts) == 1:
        return None
    addresses = addresses or (places.master, *places.hosts[1:])
    ranks = [tuple(place.rank for place in places.of_host(host)) for host in places.hosts]
    return Hosts(
        all=tuple(
            Host(address=address, ranks=held)
            for address, held in zip(addresses, ranks, strict=True)
        ),
        own=places.hosts.index(places.own_host),
        port=rendezvous.port + 1,
    )
