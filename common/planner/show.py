"""The text of ``--run_mode plan``: a layout on its own, on the servers of a rank table with the
processes of every host, or suggested ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.accelerators import GIGA, Accelerator, find_accelerator, require_accelerator
from common.cluster.environment import announced_world_size
from common.cluster.places import Placement, place_hosts, places_of_table
from common.cluster.rank_environment import given_port, make_rendezvous, rank_command, rank_variables, shell_text
from common.cluster.rank_table import RankTable, table_warnings
from common.cluster.rank_table_files import read_table
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.parallel.run import Run
from common.parallel.topology import GroupKind, Topology
from common.planner.fitting import fits_machine, resolve_on
from common.planner.plan import Likeness, describe_plan, make_plan, time_of
from common.planner.suggest import describe_next, describe_suggestions, suggest
from common.processes.addresses import DEFAULT_PORT
from common.resolve.derive import resolve_config, written_ranks
from common.structured_files import read_json_mapping


def plan_text(
    written: RunConfig,
    config_path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    *,
    all: bool = False,
    accelerator: str | None = None,
    devices: int | None = None,
    like: tuple[Path, RunConfig] | None = None,
    link: float | None = None,
    network: float | None = None,
    server_devices: int | None = None,
) -> str:
    """Return the plan of the processes that a launcher announces, else of those that the layout needs.

    written: the configuration of these words. accelerator: whose step time to estimate. devices: how many of it to
    suggest layouts for. like: folder and configuration of a run that measured a step. Both are on machines with other
    ``link`` and ``network`` (GB/s of a device) or ``server_devices`` if they are given.
    """
    given = {"link": link and link * GIGA, "network": network and network * GIGA, "server_devices": server_devices}
    machine: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    device = replace(require_accelerator(accelerator), **machine) if accelerator else None
    likeness = None
    if like is not None:
        likeness, device = _likeness(*like, device, machine)
    ranks = announced_world_size(environ) or written_ranks(written)
    if devices is not None and device is not None:
        is_auto = written.train.micro_batch_size == "auto"
        config = resolve_config(written, world_size=ranks)
        found = suggest(config, devices, device, is_auto=is_auto)
        return describe_suggestions(config, found, devices, device, likeness, all_layouts=all)
    config = resolve_on(written, device, world_size=ranks)
    if environ.get("RANK_TABLE_FILE"):
        path = Path(environ["RANK_TABLE_FILE"]).absolute()
        table = read_table(path)
        ranks_there = places_of_table(table)
        return describe_cluster(
            config,
            place_hosts(ranks_there, ranks_there[0].host),
            config_path=config_path.absolute(),
            overrides=overrides,
            table=(path, table),
            all_ranks=all,
            environ=environ,
            device=device,
            like=likeness,
        )
    plan = make_plan(config)
    text = describe_plan(plan, all_ranks=all, device=device, like=likeness)
    if device is None and (here := fits_machine(config, plan.peak)):
        return f"{here}\n{text}"
    if device is not None and 1 < ranks <= MAX_RANKS:
        text += describe_next(plan, device, likeness)
    return text


MAX_RANKS = 4096
"""Ranks up to which a plan looks for faster layouts too, which takes about a second."""


def _likeness(
    folder: Path, written: RunConfig, device: Accelerator | None, machine: Mapping[str, Any]
) -> tuple[Likeness, Accelerator]:
    """Return how a run's step compares with its plan, and the device to plan for: by default the run's own, on this
    machine. Raises ConfigError if the run did not measure a step, or its device is unknown.
    """
    found = read_json_mapping(folder / "memory.json")
    seconds: Any = found.get("step_seconds")
    name, kind = str(found.get("name")), found.get("device")
    known = find_accelerator(name)
    own = device if known is None else replace(known, **machine)
    measured = type(seconds) in (int, float) and 0 < seconds < math.inf
    if not measured or own is None or kind == "cpu":
        other = "" if kind == "cpu" else ", or --accelerator"
        raise ConfigError(
            f"--like {folder}: expected a run that ended and measured steps on an accelerator with"
            f" known rates, found {seconds} s a step on {name} ({kind}); name another run{other}"
        )
    config = resolve_on(written, own, world_size=written_ranks(written))
    planned = time_of(make_plan(config), own).total
    like = Likeness(folder=str(folder), seconds=seconds, factor=seconds / planned)
    return like, device or own


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
    text = describe_plan(plan, all_ranks=all_ranks, places=places.all, device=device, like=like)
    lines = [text, "Checks of the cluster:"]
    if table is not None:
        lines.append(
            f"  rank table {table[0]}: valid, version {table[1].version}; it must be the same on"
            f" every host: sha256 {hashlib.sha256(table[0].read_bytes()).hexdigest()}"
        )
    counts = sorted({len(places.of_host(host)) for host in places.hosts})
    hosts = "1 host" if len(places.hosts) == 1 else f"{len(places.hosts)} hosts"
    lines.append(f"  {hosts}, {' or '.join(map(str, counts))} ranks each")
    found = [*layout_warnings(places, config.topology), *(table_warnings(table[1]) if table else ())]
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
            lines.append(shell_text(variables, rank_command(config_path, "train", overrides)).rstrip("\n"))
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
                f"the tensor group of ranks {group[0]}-{group[-1]} lies on {' and '.join(across)}: it exchanges data"
                f" in every layer, so model_parallel={topology.tensor} should divide the ranks of a server"
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
        stages = sorted({topology.coordinates(place.rank).pipeline for place in places.of_host(name)})
        if len(stages) > 1:
            found.append(
                f"{name} holds ranks of the pipeline stages {', '.join(map(str, stages))}; a stage"
                " is best on servers of its own"
            )
            break
    return found
