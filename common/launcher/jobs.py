"""Job of this host for one attempt: its processes, their rendezvous and the other hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from common.cluster import hccn
from common.cluster.places import Placement, server_of_pod
from common.cluster.rank_environment import (
    SCHEDULER,
    Rendezvous,
    make_rendezvous,
    rank_command,
    rank_variables,
    scheduler_variables,
)
from common.cluster.rank_table import RankTable
from common.cluster.rank_table_files import write_table
from common.config.schema import RunConfig
from common.device import sees_accelerator
from common.launcher.host_channel import Host, Hosts
from common.launcher.rank_process import ProcessSpec
from common.launcher.request import LaunchRequest, absolute
from common.launcher.supervisor import Job
from common.launcher.terminal import tell
from common.parallel.run import Run
from common.planner.show import layout_warnings
from common.processes.addresses import is_own
from common.processes.process_tree import cores_of_ranks
from common.resolve.engine_checks import check_here


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
    fair = max(1, len(os.sched_getaffinity(0)) // len(own))
    children = []
    for place, share in zip(own, cores_of_ranks(len(own)), strict=True):
        cores = share if pinned else ()
        threads = len(cores) or fair
        variables = rank_variables(place, places, rendezvous, cores=threads, environ=environ)
        children.append(ProcessSpec(rank=place.rank, command=command, environment=variables, cores=cores))
    if rendezvous.scheduler and own[0].rank == 0:
        variables = scheduler_variables(places, rendezvous)
        children.append(ProcessSpec(rank=-1, command=SCHEDULER, environment=variables, name="scheduler"))
    return tuple(children)


def make_hosts(places: Placement, rendezvous: Rendezvous, addresses: Sequence[str] = ()) -> Hosts:
    """Return all hosts, for the channel between their launchers.

    addresses: those by which they reach each other, if the placement does not have them.
    """
    names = places.hosts
    hosts = [
        Host(address=address, ranks=tuple(place.rank for place in places.of_host(name)))
        for name, address in zip(names, addresses or (places.master, *names[1:]), strict=True)
    ]
    return Hosts(all=tuple(hosts), own=names.index(places.own_host), port=rendezvous.port + 1)


def job_of_ranks(
    request: LaunchRequest,
    config: Run,
    places: Placement,
    table: RankTable | None,
    port: int | None,
    *,
    starts: bool = True,
) -> Job:
    """Return the job of this host, with a rendezvous of its own; warn of settings that are probably unintended.

    port: where the ranks meet; None for a default. starts: False for a job that is only shown.
    """
    for text in _warnings(places, config, table, starts=starts):
        tell(f"warning: {text}", error=True)
    # a run that is only shown may be for other machines
    kind = check_here(config) if starts else config.device
    table_path = request.table
    if table is not None and table.version == "0":
        folder = log_folder(request, config)
        table_path = folder / "rank_table.json"  # MindSpore does not read version 0
        if starts:
            folder.mkdir(parents=True, exist_ok=True)
            write_table(table, table_path)
    rendezvous = make_rendezvous(
        places,
        port=port,
        table=table_path,
        backend=config.backend,
        environ=os.environ,
        on_cpu=kind == "cpu",
        rdma=request.use_rdma,
    )
    command = rank_command(request.config, request.mode, request.overrides, program=request.program)
    children = make_children(places, rendezvous, command, environ=os.environ, pinned=not request.no_pinning)
    has_links = config.logging.style == "fleetx"  # with the names of Paddle's launcher
    links = {child.rank: f"workerlog.{child.rank}" for child in children if has_links and not child.name}
    return Job(
        children=tuple(replace(child, folder=request.folder, log_link=links.get(child.rank, "")) for child in children),
        log_folder=log_folder(request, config),
        stall_limit=config.runtime.stall_limit,
        follow=not request.quiet,
        steps=config.train.max_steps if request.mode in ("train", "finetune") else None,
        hosts=make_hosts(places, rendezvous),
        return_limit=config.runtime.return_limit,
    )


def _warnings(places: Placement, config: Run, table: RankTable | None, *, starts: bool) -> list[str]:
    found = layout_warnings(places, config.topology)
    if table is not None:
        on_ascend = (config.backend, config.device) == ("mindspore", "auto")
        if starts and on_ascend and not hccn.npu_numbers():
            found.append(
                "device=auto chose cpu: this machine shows no Ascend (/dev/davinciN), for which the rank table is"
            )
        is_here = is_own(places.own_host) or server_of_pod(table, os.environ)
        if table.version != "2.0" and not is_here:
            found.append(
                f"{places.own_host} is not an address of this machine: is this the range of another"
                " one, or the table of another cluster?"
            )
    elif given := os.environ.get("RANK_TABLE_FILE"):
        found.append(f"RANK_TABLE_FILE={given} of your environment is not used: the command names no table")
    return found


def log_folder(request: LaunchRequest, config: RunConfig) -> Path:
    """Return the absolute folder of the ranks' logs."""
    return absolute(str(request.log_dir or config.output_dir))


def ranks_here(places: Placement, request: LaunchRequest, config: RunConfig) -> str:
    """Return a line about the ranks of this host. Ranks on a CPU have no devices."""
    on_cpu = config.device == "cpu" or (config.device == "auto" and not sees_accelerator())
    has_devices = request.table is not None or not on_cpu
    ranks = ", ".join(
        f"{place.rank} on device {place.device_id}" if has_devices else str(place.rank) for place in places.own
    )
    return f"ranks of {places.own_host}: {ranks}; of {places.world_size} in all"
