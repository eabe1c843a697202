"""A study that resumes in the folder of an earlier start."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from common.errors import ConfigError
from common.study.cells import PlannedCell
from common.study.definition import did_you_mean
from common.study.results import Study

_SAME = ("name", "small", "warmup_steps", "measured_steps", "calculated")
_SAME_OF_CELLS = ("base", "settings", "ranks", "hosts", "peer")


def take_over(study: Study, before: Study, redo: Collection[str], folder: Path) -> None:
    """Put the repeats of an earlier start into the study, except those of the cells to redo.

    Raises ConfigError where the folder holds another study.
    """
    remedy = "choose another --output_dir"
    for key in _SAME:
        old, new = getattr(before, key), getattr(study, key)
        if old != new:
            raise ConfigError(
                f"{folder}: holds a study with {key} {old}, and this one has {new}; {remedy}"
            )
    cells = {found.cell.id: found for found in study.cells}
    for earlier in before.cells:
        name = earlier.cell.id
        if name not in cells:
            raise ConfigError(
                f"{folder}: holds the cell {name}, which this study does not have; {remedy}"
            )
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
