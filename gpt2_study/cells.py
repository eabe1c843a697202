"""The matrix of a study: every combination of its axes that the filters leave, as cells."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from common.accelerators import Hardware
from common.config.load import flatten, read_value
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.parallel.run import Run
from common.paths import ROOT
from common.resolve.derive import resolve_config, written_ranks
from common.run_config import read_config
from common.systems.config import ConfigFile
from gpt2_study.loading import SPECIAL, Condition, Definition, label
from gpt2_study.measure import TRACED_STEPS, trace_settings
from gpt2_study.results import Cell

MAX_CELLS = 1000
_MAX_ID_LENGTH = 120
_SHORT = {
    "data_parallel": "dp",
    "model_parallel": "tp",
    "pipeline_stage": "pp",
    "micro_batch_size": "mbs",
    "global_batch_size": "gbs",
    "accumulation_steps": "acc",
}
_QUIET = {
    "checkpoint.interval": 0,
    "checkpoint.resume": "never",
    "logging.interval": 1,
    "logging.hash_interval": 1,
    "logging.tensorboard": False,
    "logging.trackers": [],
    "logging.plot": False,
    "validation.interval": 0,
}
"""Settings of every cell that the study may change: only what is measured is written."""


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """A cell and what the resolver says of it. config: None where it is refused."""

    cell: Cell
    written: RunConfig
    config: Run | None = None
    refusal: str = ""


def expand(definition: Definition, config: Path) -> list[PlannedCell]:
    """Return the cells in the order of the axes, the last axis fastest. config: the study's file.

    A layout that the resolver refuses is a cell with its reason. Raises ConfigError where no cell
    is left, where two have the same name, and for a value that its key cannot have.
    """
    axes = {axis: [*map(label, values)] for axis, values in definition.axes.items()}
    total = math.prod(map(len, axes.values()))
    if total > 100 * MAX_CELLS:
        raise ConfigError(
            f"{config}: the axes have {total:,} combinations, more than {100 * MAX_CELLS:,}; take fewer values"
        )
    points = [dict(zip(axes, labels, strict=True)) for labels in product(*axes.values())]
    points = [each for each in points if not definition.only or any(holds(one, each) for one in definition.only)]
    points = [each for each in points if not any(holds(one, each) for one in definition.leave_out)]
    if not points:
        raise ConfigError(
            f"{config}: no cell is left: only and except remove all {total:,} combinations of the"
            " axes; change them, or --only of the command line"
        )
    if len(points) > MAX_CELLS:
        raise ConfigError(
            f"{config}: {len(points):,} cells are left, more than {MAX_CELLS}; add filters, or take fewer values"
        )
    read, chosen = cache(read_config), []
    ids = _names(points, axes, definition, config)
    if definition.baseline:
        chosen = [pair for pair in zip(points, ids, strict=True) if holds(definition.baseline, pair[0])]
    found = []
    for point, name, group in zip(points, ids, _groups(points, definition), strict=True):
        # the cell with the baseline's labels that shares most others
        near = max(chosen, key=lambda pair: len(point.items() & pair[0].items()), default=(None, None))
        found.append(_plan(definition, config, read, axes=point, id=name, group=group, baseline=near[1]))
    return found


def holds(condition: Condition, point: Mapping[str, str]) -> bool:
    """Whether a point has one of the wanted labels on every axis that the condition names."""
    return all(
        point[axis] in map(label, wanted if isinstance(wanted, list) else [wanted])
        for axis, wanted in condition.items()
    )


# ---- names ----


def _names(
    points: Sequence[Mapping[str, str]], axes: Mapping[str, list[str]], definition: Definition, config: Path
) -> list[str]:
    """Return readable names that are safe as folders. Raises ConfigError for two that are equal."""
    every = [name for labels in axes.values() for name in labels]

    def part(axis: str, name: str) -> str:
        short = axis.rpartition(".")[2]
        short = _SHORT.get(short, short)
        stands_alone = isinstance(definition.axes[axis], dict) or (
            re.search(r"[A-Za-z]", name)
            and len(name) > 1
            and name not in ("none", "null", "true", "false", "auto")
            and every.count(name) == 1
        )
        text = name if stands_alone else f"{short}{'' if name[:1].isdigit() else '_'}{name}"
        return re.sub(r"[^A-Za-z0-9._+]+", "_", text)

    found = ["-".join(part(*pair) for pair in point.items()) or "run" for point in points]
    for number, name in enumerate(found):
        if name in found[:number]:
            raise ConfigError(f"{config}: two cells are called {name}; give labels that differ in letters or digits")
        if len(name) > _MAX_ID_LENGTH or name.strip(".") == "":
            raise ConfigError(f"{config}: the cell {name[:60]}... cannot be the name of a folder; give shorter labels")
    return found


def _groups(points: Sequence[Mapping[str, str]], definition: Definition) -> list[str | None]:
    same = definition.same_losses
    if same is None:
        return [None] * len(points)
    names = [
        None
        if any(holds(each, point) for each in same.leave_out)
        else "-".join(text for axis, text in point.items() if axis not in same.along) or "all"
        for point in points
    ]
    return [name if names.count(name) > 1 else None for name in names]


# ---- settings ----


def _settings(definition: Definition, point: Mapping[str, str]) -> dict[str, Any]:
    """Return the dotted keys of a point, the special axes included; later axes win."""
    pairs = [*_QUIET.items(), *flatten(definition.settings)]
    for axis, name in point.items():
        values = definition.axes[axis]
        if isinstance(values, dict):
            pairs += flatten(values[name])
        else:
            pairs.append((axis, next(value for value in values if label(value) == name)))
    found: dict[str, Any] = {}
    for key, value in pairs:
        found.pop(key, None)  # the later one goes behind what it refines
        found[key] = value
    return found


def words_of(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings as ``section.key=value``, which the command line reads as these values."""
    for key, value in settings.items():
        text = json.dumps(value)
        with suppress(ConfigError):  # text that is not YAML
            if isinstance(value, str) and read_value(value, tuple(key.split(".")), key) == value:
                text = value
        yield f"{key}={text}"


def _plan(definition: Definition, study: Path, read: Callable[[Path], ConfigFile], **names: Any) -> PlannedCell:
    """Return a cell. names: the fields that say which one it is."""
    name, settings = names["id"], _settings(definition, names["axes"])
    special = {key: settings.pop(key) for key in SPECIAL if key in settings}
    steps = definition.warmup_steps + definition.measured_steps
    settings["train.max_steps"] = steps
    given = special.get("base") or definition.base
    base = Path(os.path.abspath(study.parent / given))
    if not base.is_file():
        raise ConfigError(f"{study}: base: {given}: there is no file {base}; give a path relative to the study's")

    def opened() -> RunConfig:
        try:
            return read(base).open((*words_of(settings), f"output_dir={name}")).config
        except ConfigError as error:
            # the settings of a cell stand in the study, although a run takes them as words
            lines = (line.removeprefix("command line: ") for line in str(error).splitlines())
            raise ConfigError("\n".join(f"{study}: cell {name}: {line}" for line in lines)) from None

    written = opened()
    if definition.trace and not any(key.startswith("profile.") for key in settings):
        settings |= trace_settings(written.backend, steps + 1)
        settings["train.max_steps"] = steps + TRACED_STEPS
        written = opened()
    cell = Cell(
        **names,
        base=str(base.relative_to(ROOT) if base.is_relative_to(ROOT) else base),
        settings=settings,
        backend=written.backend,
        engine=written.engine,
        ranks=special.get("ranks") or written_ranks(written),
        hosts=special.get("hosts") or 1,
        peer=special.get("peer"),
    )
    try:
        if cell.ranks % cell.hosts:
            raise ConfigError(f"{cell.ranks} ranks do not divide over {cell.hosts} hosts; change ranks or hosts")
        config = resolve_config(written, world_size=cell.ranks, hardware=Hardware(kind=written.device))
    except ConfigError as error:
        return PlannedCell(cell=cell, written=written, refusal=" ".join(str(error).split()))
    return PlannedCell(cell=cell, written=written, config=config)
