"""Plan of a cluster: the processes of every host, and whether the layout suits its servers.

All of it is known before anything starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.accelerators import Accelerator
from common.cluster.places import Placement
from common.cluster.rank_environment import (
    given_port,
    make_rendezvous,
    rank_command,
    rank_variables,
    shell_text,
)
from common.cluster.rank_table import RankTable, table_warnings
from common.parallel.run import Run
from common.parallel.topology import GroupKind, Topology
from common.planner.plan import Likeness, describe_plan, make_plan
from common.processes.addresses import DEFAULT_PORT


def describe_cluster(
    config: Run,
    places: Placement,
    *,
    config_path: Path,
    overrides: Sequence[str] = (),
    table: tuple[Path, RankTable] | None = None,
    all_ranks: bool = False,
    environ: Mapping[str, str],
    device: Accelerator | None = None,
    like: Likeness | None = None,
) -> str:
    """Describe a run on these places.

    The text has the arithmetic, the ranks, the checks of the whole cluster, and variables and
    command of the first rank of each host, or of every rank. device, like: those of describe_plan.
    """
    plan = make_plan(config)
    text = describe_plan(
        plan, config, all_ranks=all_ranks, places=places.all, device=device, like=like
    )
    lines = [text, "Checks of the cluster:"]
    if table is not None:
        lines.append(
            f"  rank table {table[0]}: valid, version {table[1].version}; it must be the same on"
            f" every host: sha256 {hashlib.sha256(table[0].read_bytes()).hexdigest()}"
        )
    counts = sorted({len(places.of_host(host)) for host in places.hosts})
    hosts = "1 host" if len(places.hosts) == 1 else f"{len(places.hosts)} hosts"
    lines.append(f"  {hosts}, {' or '.join(map(str, counts))} ranks each")
    found = [*layout_warnings(places, plan.topology), *(table_warnings(table[1]) if table else ())]
    lines += [f"  warning: {remark}" for remark in dict.fromkeys(found)]
    port = given_port(environ) or DEFAULT_PORT
    for host in places.hosts:
        rendezvous = make_rendezvous(
            places,
            port=port,
            table=table and table[0],
            backend=config.backend,
            environ=environ,
            host=host,
            on_cpu=config.device == "cpu",
        )
        here = places.of_host(host)
        for place in here if all_ranks else here[:1]:
            variables = rank_variables(place, places, rendezvous, cores=None, environ=environ)
            lines += ["", f"# rank {place.rank}: device {place.device_id} of {host}"]
            lines.append(
                shell_text(variables, rank_command(config_path, "train", overrides)).rstrip("\n")
            )
    return "\n".join(lines) + "\n"


def layout_warnings(places: Placement, topology: Topology) -> list[str]:
    """Return a warning for each slow or unusual part of the layout.

    Needs as many places as the layout has ranks.
    """
    host = [place.host for place in places.all]
    found = []
    for group in topology.groups(GroupKind.TENSOR):
        across = list(dict.fromkeys(host[rank] for rank in group))
        if len(across) > 1:
            found.append(
                f"the tensor group of ranks {group[0]}-{group[-1]} lies on {' and '.join(across)}:"
                f" it exchanges data in every layer, so model_parallel={topology.tensor} should"
                " divide the ranks of a server"
            )
            break
    if topology.pipeline == 1:
        return found
    if topology.pipeline > len(places.hosts):
        servers = "1 server" if len(places.hosts) == 1 else f"{len(places.hosts)} servers"
        found.append(
            f"pipeline_stage={topology.pipeline} is more than {servers}; MindFormers asks for at"
            " least one server per stage"
        )
        return found
    for name in places.hosts:
        stages = sorted(
            {topology.coordinates(place.rank).pipeline for place in places.of_host(name)}
        )
        if len(stages) > 1:
            found.append(
                f"{name} holds ranks of the pipeline stages {', '.join(map(str, stages))}; a stage"
                " is best on servers of its own"
            )
            break
    return found
