"""The text of ``--run_mode plan``: a layout on its own, on the servers of a rank table, or
suggested ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.accelerators import GIGA, Accelerator, find_accelerator, require_accelerator
from common.cluster.environment import announced_world_size
from common.cluster.places import place_hosts, places_of_table
from common.cluster.rank_table_files import read_table
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.planner.cluster import describe_cluster
from common.planner.fitting import resolve_on
from common.planner.plan import Likeness, describe_plan, make_plan, time_of
from common.planner.room import fits_machine
from common.planner.suggest import describe_next, describe_suggestions, suggest
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
    """Return the plan of the processes that a launcher announces, else of those that the layout
    needs.

    written: the configuration of these words. accelerator: whose step time to estimate. devices:
    how many of it to suggest layouts for. like: folder and configuration of a run that measured a
    step. Both are on machines with other ``link`` and ``network`` (GB/s of a device) or
    ``server_devices`` if they are given.
    """
    given = {
        "link": link and link * GIGA,
        "network": network and network * GIGA,
        "server_devices": server_devices,
    }
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
        return describe_suggestions(found, devices, device, likeness, all_layouts=all)
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
    text = describe_plan(plan, config, all_ranks=all, device=device, like=likeness)
    if device is None and (here := fits_machine(config, plan.peak)):
        return f"{here}\n{text}"
    if device is not None and 1 < ranks <= MAX_RANKS:
        text += describe_next(config, plan, device, likeness)
    return text


MAX_RANKS = 4096
"""Ranks up to which a plan looks for faster layouts too, which takes about a second."""


def _likeness(
    folder: Path, written: RunConfig, device: Accelerator | None, machine: Mapping[str, Any]
) -> tuple[Likeness, Accelerator]:
    """Return how a run's step compares with its plan, and the device to plan for: by default the
    run's own, on this machine. Raises ConfigError if the run did not measure a step, or its device
    is unknown.
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
    planned = time_of(make_plan(config), config, own).total
    like = Likeness(folder=str(folder), seconds=seconds, factor=seconds / planned)
    return like, device or own
