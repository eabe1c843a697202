"""Runs the cells of a study one after another, and keeps what became of each in study.json."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from common.errors import DataError, StorageError
from common.interrupts import exiting_at_sigterm
from common.log import LOG, progress_bar
from common.study.cells import PlannedCell
from common.study.children import LAUNCHER_LOG, Where, judge, launches, reason_not_started, run_launches, shell_command
from common.study.measure import measure
from common.study.results import CellResult, Repeat, State, Study, write_study

CELLS = "cells"
_FINAL = (State.REFUSED, State.OUT_OF_MEMORY, State.TIMED_OUT)
"""States that would only happen again: later repeats of such a cell are left out."""


def run_cells(study: Study, planned: Sequence[PlannedCell], folder: Path, where: Where) -> None:
    """Run what is missing of a study. ``folder`` is held by the caller.

    study.json is written after every repeat, so that a killed study resumes after the last one that
    it recorded.
    """
    limit = float(study.definition["time_limit"])
    plans = {each.cell.id: each for each in planned}
    with ExitStack() as stack:
        stack.enter_context(exiting_at_sigterm())
        left = list(missing(study))
        done = sum(len(found.repeats) for found in study.cells)
        bar = stack.enter_context(progress_bar(total=done + len(left), initial=done, unit="run", description="study"))
        for number, (found, index) in enumerate(left):
            name = found.cell.id
            if _is_over(found):
                bar.update()
                continue
            cells_left = len({other.cell.id for other, _ in left[number:] if not _is_over(other)})
            bar.set_postfix_str(f"{name} {index}/{study.repeats}, {cells_left} cells left")
            repeat = _run_once(study, plans[name], index, folder, where, limit)
            found.repeats.append(repeat)
            found.repeats.sort(key=lambda each: each.index)
            write_study(study, folder)
            bar.update()
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
            if not _is_over(found) and all(each.index != index for each in found.repeats):
                yield found, index


def _is_over(found: CellResult) -> bool:
    return any(each.state in _FINAL for each in found.repeats)


def now() -> str:
    """Return the local time with its offset."""
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")


# ---- one run ----


def _run_once(study: Study, planned: PlannedCell, index: int, folder: Path, where: Where, limit: float) -> Repeat:
    own = Path(CELLS) / planned.cell.id / f"repeat_{index}"
    place = folder / own
    typed = shell_command(
        launches(planned, folder / "by_hand" / planned.cell.id, where) if planned.config is not None else []
    )
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
    outcome = run_launches(launches(planned, place, where), place / LAUNCHER_LOG, limit)
    repeat.seconds = outcome.seconds
    repeat.state, repeat.reason = judge(outcome, place, limit)
    if repeat.state is State.FINISHED:
        try:
            repeat.measured = measure(planned.cell, place, warmup_steps=study.warmup_steps)
        except DataError as error:
            repeat.state, repeat.reason = State.FAILED, " ".join(str(error).split())
    if not any(key.startswith("checkpoint.") for key in study.definition["settings"]):
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
    return repeat
