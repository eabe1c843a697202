"""Job of this host for one attempt: its processes, their rendezvous and the other hosts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from common.cluster import hccn
from common.cluster.places import Placement
from common.cluster.pods import server_of_pod
from common.cluster.rank_environment import make_rendezvous, rank_command
from common.cluster.rank_table import RankTable
from common.cluster.rank_table_files import write_table
from common.config.schema import RunConfig
from common.launcher.children import make_children, make_hosts
from common.launcher.host_channel import Hosts
from common.launcher.rank_process import ProcessSpec
from common.launcher.request import LaunchRequest, absolute
from common.launcher.supervisor import Job
from common.launcher.terminal import tell
from common.parallel.run import Run
from common.planner.cluster import layout_warnings
from common.processes.addresses import is_own
from common.resolve.auto_device import sees_accelerator
from common.resolve.engine_checks import check_here


@dataclass(frozen=True, kw_only=True)
class JobMaker:
    """Maker of the jobs of one launch. port: where the ranks meet; None for a default."""

    request: LaunchRequest
    table: RankTable | None
    port: int | None

    def make(self, config: Run, places: Placement, *, starts: bool = True) -> Job:
        """Return the job of this host, with a rendezvous of its own; warn of settings that are
        probably unintended.

        starts: False for a job that is only shown.
        """
        request, table = self.request, self.table
        needs_ascend = (
            starts
            and table is not None
            and (config.backend, config.device) == ("mindspore", "auto")
        )
        if needs_ascend and not hccn.npu_numbers():
            text = "this machine shows no Ascend (/dev/davinciN), for which the rank table is"
            tell(f"warning: device=auto chose cpu: {text}", error=True)
        # a run that is only shown may be for other machines
        kind = check_here(config) if starts else config.device
        table_path = request.table
        if table is not None and table.version == "0":
            folder = log_folder(request, config)
            table_path = folder / "rank_table.json"  # MindSpore does not read version 0
            if starts:
                folder.mkdir(parents=True, exist_ok=True)
                write_table(table, table_path)
        self._warn(places, config)
        rendezvous = make_rendezvous(
            places,
            port=self.port,
            table=table_path,
            backend=config.backend,
            environ=os.environ,
            on_cpu=kind == "cpu",
            rdma=request.use_rdma,
        )
        command = rank_command(
            request.config, request.mode, request.overrides, program=request.program
        )
        children = make_children(
            places, rendezvous, command, environ=os.environ, pinned=not request.no_pinning
        )
        if config.logging.style == "fleetx":  # names of Paddle's launcher
            children = tuple(
                child if child.name else replace(child, log_link=f"workerlog.{child.rank}")
                for child in children
            )
        return make_job(request, config, children, make_hosts(places, rendezvous))

    def _warn(self, places: Placement, config: Run) -> None:
        table = self.table
        found = layout_warnings(places, config.topology)
        if table is not None and not (
            table.version == "2.0" or is_own(places.own_host) or server_of_pod(table, os.environ)
        ):
            found.append(
                f"{places.own_host} is not an address of this machine: is this the range of another"
                " one, or the table of another cluster?"
            )
        if "RANK_TABLE_FILE" in os.environ and table is None:
            given = os.environ["RANK_TABLE_FILE"]
            found.append(
                f"RANK_TABLE_FILE={given} of your environment is not used: the first argument is"
                " none"
            )
        for text in found:
            tell(f"warning: {text}", error=True)


def make_job(
    request: LaunchRequest,
    config: Run,
    children: tuple[ProcessSpec, ...],
    hosts: Hosts | None = None,
) -> Job:
    """Return the job of these processes with the limits of the config."""
    return Job(
        children=children,
        log_folder=log_folder(request, config),
        stall_limit=config.runtime.stall_limit,
        follow=not request.quiet,
        steps=config.train.max_steps if request.mode in ("train", "finetune") else None,
        hosts=hosts,
        return_limit=config.runtime.return_limit,
    )


def log_folder(request: LaunchRequest, config: RunConfig) -> Path:
    """Return the absolute folder of the ranks' logs."""
    return absolute(str(request.log_dir or config.output_dir))


def ranks_here(places: Placement, request: LaunchRequest, config: RunConfig) -> str:
    """Return a line about the ranks of this host. Ranks on a CPU have no devices."""
    on_cpu = config.device == "cpu" or (config.device == "auto" and not sees_accelerator())
    ranks = ", ".join(
        str(place.rank)
        if on_cpu and request.table is None
        else f"{place.rank} on device {place.device_id}"
        for place in places.own
    )
    return f"ranks of {places.own_host}: {ranks}; of {places.world_size} in all"
