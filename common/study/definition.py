"""The sections of a study's YAML: the base configuration, the axes, and how cells are run."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PEERS = ("transformers", "nanogpt_style", "deepspeed")
"""Programs beside this project that a cell may run in its place."""
SPECIAL = ("ranks", "hosts", "peer", "base")
"""Axes that are not keys of the configuration: processes in all, machines, the program, the file
that the cell's configuration begins with.
"""
Scalar = str | int | float | bool | None
Condition = dict[str, Scalar | list[Scalar]]
"""Axis -> label, or labels of which one must hold; all axes must hold."""


class Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class SameLosses(Part):
    """Cells that must compute the same losses."""

    along: list[str]
    """Axes along which losses must not differ. Cells that agree on all others form a group."""
    leave_out: list[Condition] = Field([], alias="except")
    """Cells that belong to no group, such as those of another precision."""
    tolerance: Annotated[float, Field(ge=0.0, le=1.0)] = 1e-6
    """Relative difference up to which losses and gradient norms count as the same."""
    reason: str = ""
    """Why the tolerance is wider than rounding in another order explains."""


class Definition(Part):
    """A study: every combination of the axes that the filters leave is a cell."""

    title: str
    """One line, the heading of the report."""
    base: str
    """Configuration of every cell: any file that run_gpt2.py takes, relative to this one."""
    settings: dict[str, Any] = {}
    """Keys of the configuration for all cells, dotted or nested; they win over the base."""
    axes: dict[str, list[Scalar] | dict[str, dict[str, Any]]]
    """Axis -> values of the key of the configuration (or of ranks, hosts, peer) that it is named
    after; or axis -> label -> the keys that the label sets.
    """
    only: list[Condition] = []
    """A cell stays if one of these holds; empty: all stay."""
    leave_out: list[Condition] = Field([], alias="except")
    """A cell goes if one of these holds."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**6)] = 3
    """Steps at the start of a run whose times are not counted."""
    measured_steps: Annotated[int, Field(gt=0, le=10**6)] = 10
    """Steps behind them."""
    trace: bool = True
    """Whether two more steps follow that are traced: their times are not counted, and they yield
    the parts of a step's time and memory.
    """
    repeats: Annotated[int, Field(gt=0, le=1000)] = 3
    """Runs of each cell. Repeats of different cells alternate."""
    time_limit: Annotated[float, Field(gt=0.0, le=1e6)] = 600.0
    """Seconds that one run may take, start and end included."""
    same_losses: SameLosses | None = None
    """Cells that are compared with each other; null: none."""
    baseline: Condition = {}
    """Axis -> label, or labels, of the cell that speed-up is counted against. Of several, each cell
    takes the one that shares most other labels with it. Empty: no speed-up.
    """


SMALL = "small"
"""The section whose keys replace the others' in the variant for two CPU cores."""


def did_you_mean(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def labels_of(values: Sequence[Scalar] | Mapping[str, Any]) -> list[str]:
    """Return the labels on an axis, in order."""
    return [label(value) for value in values]


def label(value: Scalar) -> str:
    """Return a value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def definition_schema() -> dict[str, Any]:
    """Return the JSON Schema of a study's YAML, for editors."""
    schema = Definition.model_json_schema()
    properties = dict(schema["properties"])
    schema["properties"] |= {
        SMALL: {
            "description": "Keys that replace the others in the variant for two CPU cores.",
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }
    }
    return schema
