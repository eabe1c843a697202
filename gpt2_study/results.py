"""Results of a study: its cells, their repeats and what was measured, in ``study.json``.

The file is written after every repeat and holds all that tables, plots and reports need.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError
from common.files import atomic_write
from common.structured_files import MAX_JSON_BYTES, read_text

STUDY_FILE = "study.json"


class Record(BaseModel):
    """A part of study.json. NaN and infinities are written as texts, so that the file is JSON."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class State(StrEnum):
    """Outcome of a repeat."""

    FINISHED = "finished"
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    REFUSED = "refused"


class Cell(Record):
    """One point of the matrix: a configuration that is run ``repeats`` times."""

    id: str
    """Readable, and safe as the name of a folder."""
    axes: dict[str, str]
    """The label on each axis of the study, in the order of the axes."""
    base: str = ""
    """File of the configuration that the settings add to, relative to the project where it is
    part of it.
    """
    settings: dict[str, Any]
    """Dotted keys of the configuration and their values, beside those of the base file."""
    backend: str
    engine: str
    ranks: int
    hosts: int = 1
    peer: str | None = None
    group: str | None = None
    """Cells of one group must compute the same losses; None: not compared."""
    baseline: str | None = None
    """Id of the cell against which speed-up and efficiency are counted."""


class Measured(Record):
    """Figures of one run. Lists over steps include the steps of warm-up, except step_seconds."""

    step_seconds: list[float]
    """Seconds of each measured step, without those of warm-up."""
    tokens_per_step: int
    samples_per_step: int
    loss: list[float]
    gradient_norm: list[float]
    validation_loss: float | None = None
    sample_hash: str | None = None
    """Hash of the samples up to the last step that recorded it."""
    peak_memory: list[int] = []
    """Bytes of each rank that recorded its peak, in the order of ranks."""
    peak_memory_source: str = ""
    """Source of peak_memory, such as "resident memory of the process"."""
    memory_parts: dict[str, int] = {}
    """Bytes by part on the fullest rank, tensors counted: state (weights and optimizer), step (what comes and goes
    within a step: gradients, activations, loss, buffers); a part that was not counted is absent.
    """
    split: dict[str, float | None] = {}
    """Seconds a step by part: data, forward_backward, communication, update; None: not known."""
    mfu: float | None = None
    first_step_seconds: float | None = None


class Repeat(Record):
    """One run of a cell."""

    index: int
    """Counted from 1."""
    state: State
    reason: str = ""
    """One line, empty where the run finished."""
    command: list[str]
    """Words that start the same run by hand."""
    folder: str
    """Relative to the folder of the study."""
    seconds: float
    """From the start of the launcher to its end."""
    measured: Measured | None = None


class Prediction(Record):
    """Plan of a cell."""

    memory: list[dict[str, int]] = []
    """Bytes of each rank by kind, in the order of ranks."""
    peak: list[int] = []
    """Bytes of each rank at most: the sum of its kinds, without what two of them share."""
    step_seconds: float | None = None
    reason: str = ""
    """Why something is missing."""


class CellResult(Record):
    """A cell, what was expected of it, and its runs so far in the order of their indices."""

    cell: Cell
    prediction: Prediction | None = None
    repeats: list[Repeat] = []


class Machine(Record):
    """Machine that the study ran on, as far as the launching host can tell."""

    host: str
    cpu: str
    cores: int
    memory: int
    """Bytes."""
    accelerators: list[str] = []


class Study(Record):
    """All of study.json."""

    format: int = 1
    name: str
    """Name of the definition's file, such as "precision"."""
    title: str
    small: bool = False
    definition: dict[str, Any]
    """The definition as it was run, with the small section and overrides put in."""
    warmup_steps: int
    measured_steps: int
    repeats: int
    tolerance: float
    """Relative difference up to which the losses of a group count as the same."""
    tolerance_reason: str = ""
    machine: Machine
    versions: dict[str, str]
    started: str
    """Local time with its offset, ISO 8601."""
    finished: str | None = None
    """None while repeats are missing."""
    cells: list[CellResult] = Field(min_length=1)


def write_study(study: Study, folder: Path) -> None:
    """Write study.json into the folder, whole or not at all. Raises StorageError."""
    with atomic_write(folder / STUDY_FILE, "w") as file:
        file.write(study.model_dump_json(indent=1) + "\n")


def read_study(folder: Path) -> Study:
    """Return what a study has found so far. Raises ConfigError with the file and what is wrong."""
    path = folder / STUDY_FILE
    text = read_text(path, limit=8 * MAX_JSON_BYTES)
    try:
        return Study.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise ConfigError(
            f"{path}: {where + ': ' if where else ''}{fault['msg']}; the file is damaged or of"
            " another version of this project; run the study again in a new output_dir"
        ) from None
