"""A study from its command line to its report: what tools/study.py asks for.

Plans of its cells start nothing. Cells run one after another, and study.json keeps what became of each.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from common.accelerators import GIB, Accelerator, find_accelerator, require_accelerator
from common.cluster import hccn
from common.device import processor_name
from common.doctor.software import installed_versions
from common.errors import ConfigError, DataError, StorageError
from common.flags import flag
from common.interrupts import exiting_at_sigterm
from common.launcher.host_list import parse_hosts
from common.log import LOG, progress_bar, show
from common.paths import ROOT, require_package
from common.planner.fitting import is_open, machine_memory, memory_limit, resolve_on
from common.planner.plan import make_plan, table, time_of
from common.processes.process_tree import run_program
from common.run_folder import owned_folder
from gpt2_study.cells import PlannedCell, expand
from gpt2_study.children import Where, launches, reason_not_started, run_launches, shell_command
from gpt2_study.loading import Definition, did_you_mean, load_definition
from gpt2_study.measure import measure
from gpt2_study.report import PAGE, write_outcome
from gpt2_study.results import (
    STUDY_FILE,
    CellResult,
    Machine,
    Prediction,
    Repeat,
    State,
    Study,
    read_study,
    write_study,
)

PACKAGES = (*("torch", "torch_npu", "triton", "torchao", "mindspore", "deepspeed", "transformers", "numpy"), "horovod")
_QUERY_SECONDS = 10.0
_SAME = ("name", "small", "warmup_steps", "measured_steps")
_SAME_OF_CELLS = ("base", "settings", "ranks", "hosts", "peer")


@dataclass(frozen=True, kw_only=True)
class StudyRequest:
    """The options of tools/study.py."""

    config: Path = flag("FILE: the study's YAML", required=True)
    small: bool = flag("run the variant for two CPU cores, the section small of the YAML", default=False)
    only: tuple[str, ...] = flag(
        "AXIS=LABEL: leave out cells with other labels on this axis; may be given several times", default=()
    )
    plan: bool = flag("show the cells and what is expected; start nothing", default=False)
    accelerator: str | None = flag(
        'NAME: with --plan: add the time of a step on a device that is not here, such as "Ascend'
        ' 910A", and say what does not fit'
    )
    redo: tuple[str, ...] = flag("CELL: run this cell again; may be given several times", default=())
    output_dir: Path | None = flag("DIR: folder of runs and report (default: output/study/NAME)")
    report_only: bool = flag("make tables, plots and report again from study.json; start nothing", default=False)
    hosts: str | None = flag("A,B: print the commands of every cell for these hosts; start nothing without --ssh")
    ssh: bool = flag("run the cells on --hosts over ssh", default=False)
    overrides: tuple[str, ...] = flag(
        "keys of the configuration to set in all cells",
        default=(),
        positional=True,
        nargs="*",
        metavar="section.key=value",
    )


def run_study(request: StudyRequest) -> int:
    """Plan, run or report a study. Returns the exit code: 0, or 1 where no cell has finished.

    Raises ConfigError for bad input.
    """
    if request.ssh and request.hosts is None:
        raise ConfigError("--ssh needs --hosts: the names of the hosts")
    name = request.config.stem + ("_small" if request.small else "")
    folder = Path(os.path.abspath(request.output_dir or Path("output") / "study" / name))
    if request.accelerator is not None and not request.plan:
        raise ConfigError("--accelerator is for --plan; leave it out, or add --plan")
    if not (request.plan or (request.hosts and not request.ssh)):
        require_package("scipy", extra="study", purpose="which tells differences from chance")
    if request.report_only:
        study = read_study(folder)
        with owned_folder(folder):
            return _end(study, folder)
    definition = load_definition(request.config, request.overrides, small=request.small, only=request.only)
    cells = expand(definition, request.config)
    known = [each.cell.id for each in cells]
    for name in request.redo:
        if name not in known:
            have = f"; the cells are {', '.join(known[:20])}"
            raise ConfigError(f"--redo {name}: no such cell{did_you_mean(name, known) or have}")
    device = require_accelerator(request.accelerator) if request.accelerator else None
    # the script of a Slurm job, or a shell in one, but no task of a step
    in_job = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_NODELIST" not in os.environ
    hosts = parse_hosts(request.hosts) if request.hosts else ()
    where = Where(hosts=hosts, slurm=request.hosts is None and in_job)
    if request.plan:
        show(describe_cells(definition, cells, device))
        return 0
    if where.hosts and not request.ssh:
        for planned in cells:
            if planned.config is not None:
                place = folder / "by_hand" / planned.cell.id
                for launch in launches(planned, place, where):
                    show(f"# {planned.cell.id}\n{shlex.join(shell_command([launch]))}\n")
        return 0
    study = _new_study(request, definition, cells)
    with owned_folder(folder):
        if (folder / STUDY_FILE).exists():
            take_over(study, read_study(folder), request.redo, folder)
        write_study(study, folder)
        run_cells(study, cells, folder, where)
        return _end(study, folder)


def _end(study: Study, folder: Path) -> int:
    """Write the outcome, and return the exit code."""
    write_outcome(study, folder)
    LOG.info(f"{study.title}: {folder / PAGE}")
    states = {each.state for found in study.cells for each in found.repeats}
    return 0 if State.FINISHED in states else 1


def _new_study(request: StudyRequest, definition: Definition, cells: list[PlannedCell]) -> Study:
    same, machine = definition.same_losses, machine_here()
    here = next(map(find_accelerator, machine.accelerators), None)
    return Study(
        **definition.model_dump(include={"title", "warmup_steps", "measured_steps", "repeats"}),
        name=request.config.stem,
        small=request.small,
        definition=definition.model_dump(by_alias=True),
        tolerance=same.tolerance if same else 0.0,
        tolerance_reason=same.reason if same else "",
        machine=machine,
        versions=versions_here(),
        started=now(),
        cells=[CellResult(cell=each.cell, prediction=predict(each, here)) for each in cells],
    )


def machine_here() -> Machine:
    gpus = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    code, output, _ = run_program(gpus, _QUERY_SECONDS)
    devices = output.strip().splitlines() if code == 0 else []
    devices += [f"Ascend device {number}" for number in hccn.npu_numbers()]
    return Machine(
        host=socket.gethostname(),
        cpu=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        memory=machine_memory(),
        accelerators=devices,
    )


def versions_here() -> dict[str, str]:
    """Return the versions of what computes, as far as it is installed, and of this project."""
    installed = installed_versions(PACKAGES)
    found = {name: version for name, version in installed.items() if version}
    code, commit, _ = run_program(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], _QUERY_SECONDS)
    last = {"commit": commit.strip()} if code == 0 else {}
    return {"python": platform.python_version(), **found, **last}


def take_over(study: Study, before: Study, redo: Collection[str], folder: Path) -> None:
    """Put the repeats of an earlier start into the study, except those of the cells to redo.

    Raises ConfigError where the folder holds another study.
    """
    remedy = "choose another --output_dir"
    for key in _SAME:
        old, new = getattr(before, key), getattr(study, key)
        if old != new:
            raise ConfigError(f"{folder}: holds a study with {key} {old}, and this one has {new}; {remedy}")
    cells = {found.cell.id: found for found in study.cells}
    for earlier in before.cells:
        name = earlier.cell.id
        if name not in cells:
            raise ConfigError(f"{folder}: holds the cell {name}, which this study does not have; {remedy}")
        if name in redo:
            continue
        for key in _SAME_OF_CELLS:
            if getattr(earlier.cell, key) != getattr(cells[name].cell, key):
                raise ConfigError(
                    f"{folder}: its cell {name} has other {key} than in this study; {remedy}, or"
                    f" repeat it with --redo {name}"
                )
        cells[name].repeats = earlier.repeats
    study.started = before.started


def predict(planned: PlannedCell, device: Accelerator | None = None) -> Prediction:
    """Return the memory of each rank, and with ``device`` the time of a step on it."""
    config = planned.config
    if config is None:
        return Prediction(reason=planned.refusal)
    if device is not None or is_open(planned.written):
        config = resolve_on(planned.written, device, world_size=planned.cell.ranks)
    try:
        plan = make_plan(config)
    except ConfigError as error:
        return Prediction(reason=" ".join(str(error).split()))
    topology = config.topology
    of_ranks = [plan.stages[topology.coordinates(rank).pipeline] for rank in range(topology.world_size)]
    return Prediction(
        memory=[{name: round(size) for name, size in each.parts.items()} for each in of_ranks],
        peak=[round(each.peak) for each in of_ranks],
        step_seconds=None if device is None else time_of(plan, device).total,
    )


def describe_cells(definition: Definition, cells: Sequence[PlannedCell], device: Accelerator | None = None) -> str:
    """Return a table of the cells with their ranks and what is expected, and how long all may
    take.
    """
    width = max(len(planned.cell.id) for planned in cells)
    rows = [_row(planned, device, width) for planned in cells]
    runs = definition.repeats * sum(planned.config is not None for planned in cells)
    counts = [
        f"{number} {noun}{'s' * (number != 1)}"
        for number, noun in ((len(cells), "cell"), (definition.repeats, "repeat"), (runs, "run"))
    ]
    steps = f"{definition.warmup_steps} + {definition.measured_steps} steps"
    lines = [
        definition.title,
        *table(("cell".ljust(width), "program", "ranks", "hosts", "dp x tp x pp", "GiB a rank", "s/step"), rows),
        "",
        f"{counts[0]}, {counts[1]}: {counts[2]} of {steps}, each within {definition.time_limit:g} s",
    ]
    if device is None:
        lines.append("(GiB: the planner's, on the fullest rank; s/step needs --accelerator NAME)")
    lines += [f"refused: {planned.cell.id}: {planned.refusal}" for planned in cells if planned.config is None]
    return "\n".join(lines) + "\n"


def _row(planned: PlannedCell, device: Accelerator | None, width: int) -> tuple[str, ...]:
    cell, config = planned.cell, planned.config
    program = cell.peer or (cell.engine if cell.engine != "native" else cell.backend)
    start = (cell.id.ljust(width), program, str(cell.ranks), str(cell.hosts))
    if config is None:
        return (*start, "refused", "-", "-")
    layout, expected = config.parallel, predict(planned, device)
    peak, time = max(expected.peak, default=0), "-"
    limit = None if device is None else memory_limit(config, device)
    if limit is not None and peak >= limit:
        time = "does not fit"
    elif expected.step_seconds is not None:
        time = f"{expected.step_seconds:.3g}"
    sizes = f"{layout.data_parallel}x{layout.model_parallel}x{layout.pipeline_stage}"
    return (*start, sizes, f"{peak / GIB:.3f}" if peak else "-", time)


CELLS = "cells"
_FINAL = (State.REFUSED, State.OUT_OF_MEMORY, State.TIMED_OUT)
"""States that would only happen again: later repeats of such a cell are left out."""


def run_cells(study: Study, planned: Sequence[PlannedCell], folder: Path, where: Where) -> None:
    """Run what is missing of a study. ``folder`` is held by the caller.

    study.json is written after every repeat, so that a killed study resumes after the last one that it recorded.
    """
    plans = {each.cell.id: each for each in planned}
    left, done = list(missing(study)), sum(len(found.repeats) for found in study.cells)
    bar = progress_bar(total=done + len(left), initial=done, unit="run", description="study")
    with exiting_at_sigterm(), bar:
        while left:
            found, index = left[0]
            name = found.cell.id
            cells_left = len({other.cell.id for other, _ in left})
            bar.set_postfix_str(f"{name} {index}/{study.repeats}, {cells_left} cells left")
            repeat = _run_once(study, plans[name], index, folder, where)
            found.repeats.append(repeat)
            found.repeats.sort(key=lambda each: each.index)
            write_study(study, folder)
            left = list(missing(study))  # fewer where the cell is over
            bar.update()
            bar.total = bar.n + len(left)
            why = f": {repeat.reason}" if repeat.reason else ""
            LOG.info(f"{name} {index}/{study.repeats}: {repeat.state} after {repeat.seconds:.1f} s{why}")
    study.finished = now()
    write_study(study, folder)


def missing(study: Study) -> Iterator[tuple[CellResult, int]]:
    """Yield the repeats that are not there yet, in the order in which they run.

    Each round runs every cell once, and every second round backwards. So a machine that slowly
    becomes faster or slower does so for all cells alike.
    """
    for index in range(1, study.repeats + 1):
        for found in study.cells if index % 2 else reversed(study.cells):
            known = found.repeats
            if not any(each.index == index or each.state in _FINAL for each in known):
                yield found, index


def now() -> str:
    """Return the local time with its offset."""
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")


# ---- one run ----


def _run_once(study: Study, planned: PlannedCell, index: int, folder: Path, where: Where) -> Repeat:
    own = Path(CELLS) / planned.cell.id / f"repeat_{index}"
    place = folder / own
    typed = []
    if planned.config is not None:
        typed = shell_command(launches(planned, folder / "by_hand" / planned.cell.id, where))
    refusal = reason_not_started(planned, where)
    repeat = Repeat(index=index, state=State.REFUSED, reason=refusal, command=typed, folder=str(own), seconds=0.0)
    if refusal:
        return repeat
    try:  # a new run would resume from what one that was cut off has left
        if place.exists():
            shutil.rmtree(place)
        place.mkdir(parents=True)
    except OSError as error:
        raise StorageError(f"{place}: cannot be made: {error.strerror or error}") from None
    outcome = run_launches(launches(planned, place, where), place, float(study.definition["time_limit"]))
    repeat.seconds, repeat.state, repeat.reason = outcome.seconds, outcome.state, outcome.reason
    if repeat.state is State.FINISHED:
        try:
            repeat.measured = measure(planned.cell, place, warmup_steps=study.warmup_steps)
        except (ConfigError, DataError) as error:
            repeat.state, repeat.reason = State.FAILED, " ".join(str(error).split())
    if not any(key.startswith("checkpoint.") for key in study.definition["settings"]):
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
    return repeat
