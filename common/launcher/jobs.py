"""Job of this host for one attempt: its processes, their rendezvous and the other hosts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from common.cluster import hccn
from common.cluster.places import Placement
from common.cluster.pods import server_of_pod
from common.cluster.rank_environment import Rendezvous, make_rendezvous, rank_command
from common.cluster.rank_table import RankTable
from common.cluster.rank_table_files import write_table
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.launcher.attempts import Attempt
from common.launcher.children import make_children, make_hosts
from common.launcher.control import Hosts
from common.launcher.elastic import HostChoice, hosts_of
from common.launcher.meeting import meet
from common.launcher.request import LaunchRequest, absolute
from common.launcher.supervisor import Job, connect_limit
from common.launcher.terminal import tell
from common.parallel.run import Run
from common.planner.cluster import layout_warnings
from common.processes.addresses import is_own
from common.processes.ranks import ProcessSpec
from common.resolve.auto_device import sees_accelerator
from common.resolve.engine_checks import check_here


@dataclass(frozen=True, kw_only=True)
class JobMaker:
    """Maker of the jobs of one launch. port: where the ranks meet; None for a default."""

    request: LaunchRequest
    table: RankTable | None
    port: int | None

    def make(self, config: Run, places: Placement, *, starts: bool = True) -> Job:
        """Return the job of this host, with a rendezvous of its own.

        starts: False for a job that is only shown.
        """
        children, hosts = self._children(config, places, starts=starts)
        return make_job(self.request, config, children, hosts)

    def meet(self, choice: HostChoice, places: Placement, number: int) -> Attempt | None:
        """Meet the other hosts, and return the attempt on those that host 0 chooses.

        None if this host was a spare until the run was over. Raises RunError if too few come.
        """
        full = make_hosts(
            places, self._rendezvous(choice.nominal.config, places, self.request.table)
        )
        assert full is not None
        limit = choice.nominal.config.runtime.return_limit
        meeting = meet(
            full,
            attempt=number,
            limit=limit if number else connect_limit(os.environ),
            choose=choice.choose,
        )
        share = choice.share(meeting.hosts) if meeting.hosts else None
        if share is None:
            return None
        overrides = (*self.request.overrides, *share.overrides)
        maker = replace(self, request=replace(self.request, overrides=overrides))
        own = share.places
        if len(own.hosts) < len(places.hosts):
            maker = maker.on_table_of(own, share.config)
            tell(f"this attempt has {len(own.hosts)} of {len(places.hosts)} hosts")
        tell(ranks_here(own, self.request, share.config))
        job = replace(
            maker.make(share.config, own),
            hosts=hosts_of(full, meeting.hosts, own),
            full=full,
            phase=str(meeting.attempt),
            may_take_back=lambda come: choice.is_better(meeting.hosts, come),
        )
        return Attempt(job=job, number=meeting.attempt)

    def on_table_of(self, places: Placement, config: Run) -> JobMaker:
        """Return the maker with a rank table of these hosts, if the launch has one."""
        if self.table is None:
            return self
        if self.table.version == "2.0":
            raise ConfigError(
                f"{self.request.table}: a rank table of version 2.0 names networks instead of"
                " machines, so the run cannot continue on fewer hosts; leave runtime.min_nodes out"
            )
        table = self.table.only(places.hosts)
        path = log_folder(self.request, config) / f"rank_table_{len(places.hosts)}_hosts.json"
        write_table(table, path)
        return replace(self, table=table, request=replace(self.request, table=path))

    def _children(
        self, config: Run, places: Placement, *, starts: bool
    ) -> tuple[tuple[ProcessSpec, ...], Hosts | None]:
        """Return the processes of this host, and the hosts; warn of settings that are probably
        unintended.
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
        rendezvous = self._rendezvous(config, places, table_path, on_cpu=kind == "cpu")
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
        return children, make_hosts(places, rendezvous)

    def _rendezvous(
        self,
        config: Run,
        places: Placement,
        table: Path | None,
        *,
        on_cpu: bool = False,
    ) -> Rendezvous:
        return make_rendezvous(
            places,
            port=self.port,
            table=table,
            backend=config.backend,
            environ=os.environ,
            on_cpu=on_cpu,
            rdma=self.request.use_rdma,
        )

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
