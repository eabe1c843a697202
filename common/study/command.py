"""A study from its command line to its report: what tools/study.py asks for."""

from __future__ import annotations

import os
import platform
import shlex
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.accelerators import find_accelerator, require_accelerator
from common.cluster import hccn
from common.device import processor_name
from common.doctor.software import installed_versions
from common.errors import ConfigError
from common.flags import flag
from common.launcher.host_list import parse_hosts
from common.log import LOG
from common.paths import ROOT, require_package
from common.planner.fitting import machine_memory
from common.processes.process_tree import run_program
from common.run_folder import owned_folder
from common.study.cells import PlannedCell, expand
from common.study.definition import Definition, did_you_mean
from common.study.loading import load_definition
from common.study.planning import describe_cells, predict
from common.study.report import PAGE, write_outcome
from common.study.results import STUDY_FILE, CellResult, Machine, State, Study, read_study, write_study
from common.study.running import now, run_cells
from common.study.starting import Where, find_slurm, launches

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


def run_study(request: StudyRequest, show: Callable[[str], object]) -> int:
    """Plan, run or report a study. Returns the exit code: 0, or 1 where no cell has finished.

    show: writes text to standard output. Raises ConfigError for bad input.
    """
    if request.ssh and request.hosts is None:
        raise ConfigError("--ssh needs --hosts: the names of the hosts")
    folder = _folder(request)
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
    require_cells(request.redo, cells)
    device = require_accelerator(request.accelerator) if request.accelerator else None
    where = Where(
        hosts=parse_hosts(request.hosts) if request.hosts else (),
        slurm=request.hosts is None and find_slurm(os.environ),
    )
    if request.plan:
        show(describe_cells(definition, cells, device))
        return 0
    if where.hosts and not request.ssh:
        for planned in cells:
            if planned.config is not None:
                place = folder / "by_hand" / planned.cell.id
                for launch in launches(planned, place, where):
                    show(f"# {planned.cell.id}\n{shlex.join(launch.typed())}\n")
        return 0
    study = _new_study(request, definition, cells)
    here = next(map(find_accelerator, study.machine.accelerators), None)
    for found, planned in zip(study.cells, cells, strict=True):
        found.prediction = predict(planned, here)
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


def _folder(request: StudyRequest) -> Path:
    name = request.config.stem + ("_small" if request.small else "")
    return Path(os.path.abspath(request.output_dir or Path("output") / "study" / name))


def _new_study(request: StudyRequest, definition: Definition, cells: list[PlannedCell]) -> Study:
    same = definition.same_losses
    return Study(
        name=request.config.stem,
        title=definition.title,
        small=request.small,
        definition=definition.model_dump(by_alias=True),
        warmup_steps=definition.warmup_steps,
        measured_steps=definition.measured_steps,
        repeats=definition.repeats,
        tolerance=same.tolerance if same else 0.0,
        tolerance_reason=same.reason if same else "",
        machine=machine_here(),
        versions=versions_here(),
        started=now(),
        cells=[CellResult(cell=planned.cell) for planned in cells],
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


def require_cells(names: Collection[str], cells: Sequence[PlannedCell]) -> None:
    """Raise ConfigError for a name of --redo that is not the name of a cell."""
    known = [each.cell.id for each in cells]
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known)
            have = f"; the cells are {', '.join(known[:20])}"
            raise ConfigError(f"--redo {name}: no such cell{meant or have}")
