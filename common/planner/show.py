"""The text of ``--run_mode plan``: a layout on its own, on the servers of a rank table, or
suggested ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.accelerators import require_accelerator
from common.cluster.environment import announced_world_size
from common.cluster.rank_table_files import read_table
from common.config.schema import RunConfig
from common.planner.cluster import describe_cluster, places_of_plan
from common.planner.fitting import resolve_on
from common.planner.plan import describe_plan, make_plan
from common.planner.room import fits_machine
from common.planner.suggest import describe_suggestions, suggest
from common.resolve.derive import resolve_config, written_ranks


def plan_text(
    written: RunConfig,
    config_path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    *,
    all_ranks: bool = False,
    accelerator: str | None = None,
    devices: int | None = None,
) -> str:
    """Return the plan of the processes that a launcher announces, else of those that the layout
    needs.

    written: the configuration of these words. accelerator: whose step time to estimate. devices:
    how many of it to suggest layouts for.
    """
    device = require_accelerator(accelerator) if accelerator else None
    ranks = announced_world_size(environ) or written_ranks(written)
    if devices is not None and device is not None:
        is_auto = written.train.micro_batch_size == "auto"
        config = resolve_config(written, world_size=ranks)
        found = suggest(config, devices, device, is_auto=is_auto)
        return describe_suggestions(found, devices, device)
    config = resolve_on(written, device, world_size=ranks)
    if environ.get("RANK_TABLE_FILE"):
        path = Path(environ["RANK_TABLE_FILE"]).absolute()
        table = read_table(path)
        return describe_cluster(
            config,
            places_of_plan(table),
            config_path=config_path.absolute(),
            overrides=overrides,
            table=(path, table),
            all_ranks=all_ranks,
            environ=environ,
            device=device,
        )
    plan = make_plan(config)
    text = describe_plan(plan, config, all_ranks=all_ranks, device=device)
    if device is None and (here := fits_machine(config, plan.peak)):
        text += f"\n{here}\n"
    return text
