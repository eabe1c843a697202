"""Plans of a study's cells; nothing is started."""

from __future__ import annotations

from collections.abc import Sequence

from common.accelerators import GIB, Accelerator
from common.errors import ConfigError
from common.planner.fitting import is_open, memory_limit, resolve_on
from common.planner.plan import make_plan, table, time_of
from common.study.cells import PlannedCell
from common.study.definition import Definition
from common.study.results import Prediction


def predict(planned: PlannedCell, device: Accelerator | None = None) -> Prediction:
    """Return the memory of each rank, and with ``device`` the time of a step on it."""
    config, written = planned.config, planned.written
    if config is None or written is None:
        return Prediction(reason=planned.refusal)
    if device is not None or is_open(written):
        config = resolve_on(written, device, world_size=planned.cell.ranks)
    try:
        plan = make_plan(config)
    except ConfigError as error:
        return Prediction(reason=" ".join(str(error).split()))
    topology = plan.topology
    of_ranks = [plan.stages[topology.coordinates(rank).pipeline].memory for rank in range(topology.world_size)]
    return Prediction(
        memory=[{name: round(size) for name, size in each.parts.items()} for each in of_ranks],
        peak=[round(each.peak) for each in of_ranks],
        step_seconds=None if device is None else time_of(plan, config, device).total,
    )


def describe_cells(definition: Definition, cells: Sequence[PlannedCell], device: Accelerator | None = None) -> str:
    """Return a table of the cells with their ranks and what is expected, and how long all may
    take.
    """
    width = max(len(planned.cell.id) for planned in cells)
    rows = [_row(planned, device, width) for planned in cells]
    runs = definition.repeats * sum(planned.config is not None for planned in cells)
    refused = [planned for planned in cells if planned.config is None]
    lines = [
        definition.title,
        *table(("cell".ljust(width), *_HEAD), rows),
        "",
        f"{_count(len(cells), 'cell')}, {_count(definition.repeats, 'repeat')}:"
        f" {_count(runs, 'run')} of"
        f" {definition.warmup_steps} + {definition.measured_steps} steps, each within"
        f" {definition.time_limit:g} s",
    ]
    if device is None:
        lines.append("(GiB: the planner's, on the fullest rank; s/step needs --accelerator NAME)")
    lines += [f"refused: {planned.cell.id}: {planned.refusal}" for planned in refused]
    return "\n".join(lines) + "\n"


_HEAD = ("program", "ranks", "hosts", "dp x tp x pp", "GiB a rank", "s/step")


def _row(planned: PlannedCell, device: Accelerator | None, width: int) -> tuple[str, ...]:
    cell, config, expected = planned.cell, planned.config, predict(planned, device)
    program = cell.peer or (cell.engine if cell.engine != "native" else cell.backend)
    start = (cell.id.ljust(width), program, str(cell.ranks), str(cell.hosts))
    if config is None:
        return (*start, "refused", "-", "-")
    layout = config.parallel
    sizes = (layout.data_parallel, layout.model_parallel, layout.pipeline_stage)
    peak, time = max(expected.peak, default=0), "-"
    limit = None if device is None else memory_limit(config, device)
    if limit is not None and peak >= limit:
        time = "does not fit"
    elif expected.step_seconds is not None:
        time = f"{expected.step_seconds:.3g}"
    return (*start, "x".join(map(str, sizes)), f"{peak / GIB:.3f}" if peak else "-", time)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
