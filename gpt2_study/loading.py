"""A study's YAML: its sections (the base configuration, the axes, how cells are run) and its reading.

Each fault is a ConfigError that names file, line and key.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.config.aliases import ALIASES, Sources
from common.config.hints import hint, schema_keys
from common.config.load import flatten, read_value, read_yaml
from common.errors import ConfigError
from common.structured_files import shown
from common.whole_numbers import MAX_RANKS
from common.yaml_files import KeyPath

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


RESERVED = {
    "output_dir": "each run has a folder of its own; give --output_dir for the study's",
    "train.max_steps": "the length of a run is warmup_steps + measured_steps",
    "train.max_epochs": "the length of a run is warmup_steps + measured_steps",
    "train.max_tokens": "the length of a run is warmup_steps + measured_steps",
}
"""Keys that the study sets itself, and what to give instead."""

Fault = tuple[tuple[Any, ...], str]
"""Path of a key, and what is wrong with it."""


def load_definition(
    path: Path, words: Sequence[str] = (), *, small: bool = False, only: Sequence[str] = ()
) -> Definition:
    """Read a study. Words ``section.key=value`` are added to its settings; ``repeats=1`` and the
    like, without a dot, change a number of the study itself.

    only: words ``axis=label``; cells with another label on that axis are left out.
    """
    tree, sources = read_yaml(path)
    reduced = tree.pop(SMALL, None)
    if small and reduced is None:
        raise ConfigError(f"{path}: has no section small; leave --small out")
    variants = [(tree, sources)]
    if reduced is not None:
        if not isinstance(reduced, dict):
            raise ConfigError(f"{sources.get((SMALL,), path)}: small: expected keys and values")
        moved = {key[1:]: place for key, place in sources.items() if key[:1] == (SMALL,)}
        # a section that small replaces has none of the other's lines
        kept = {key: place for key, place in sources.items() if key[:1] and key[0] not in reduced}
        variants.append(({**tree, **reduced}, kept | moved))
    # both are checked, so that a fault in one shows whichever is run
    checked = [_build(tree, places, words, path) for tree, places in variants]
    chosen = checked[-1 if small else 0]
    for key in (word.partition("=")[0] for word in words):
        for axis, values in chosen.axes.items():
            set_by_labels = values.values() if isinstance(values, dict) else ()
            if key == axis or any(key in dict(flatten(keys)) for keys in set_by_labels):
                raise ConfigError(
                    f"command line: {key}: the axis {axis} sets it; leave it out,"
                    f" or choose cells with --only {axis}=LABEL"
                )
    return _narrowed(chosen, only)


def _narrowed(definition: Definition, only: Sequence[str]) -> Definition:
    others: dict[str, list[Scalar]] = {}
    for word in only:
        axis, equals, name = word.rpartition("=")
        if not equals or axis not in definition.axes:
            axes = ", ".join(definition.axes) or "none"
            raise ConfigError(f"--only {word}: expected AXIS=LABEL; the axes are {axes}")
        labels = [*map(label, definition.axes[axis])]
        if name not in labels:
            raise ConfigError(f"--only {word}: the axis {axis} has no {name!r}; it has {', '.join(labels)}")
        others[axis] = [other for other in others.get(axis, labels) if other != name]
    gone: list[Condition] = [{axis: [*labels]} for axis, labels in others.items()]
    return definition.model_copy(update={"leave_out": [*definition.leave_out, *gone]})


def _build(tree: dict[str, Any], sources: Sources, words: Sequence[str], path: Path) -> Definition:
    """Return the definition with the words of the command line put in."""
    changed, places, settings = dict(tree), dict(sources), {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"command line: {word!r}: expected section.key=value")
        value = read_value(text, tuple(key.split(".")), f"command line: {key}")
        if key in ("repeats", "warmup_steps", "measured_steps", "time_limit"):
            changed[key], places[key,] = value, "command line"
        else:
            settings[key], places["settings", *key.split(".")] = value, "command line"
    if settings and isinstance(tree.get("settings", {}), dict):
        changed["settings"] = {**dict(flatten(tree.get("settings") or {})), **settings}
    try:
        definition = Definition.model_validate(changed)
        lines = [f"{_place(at, places, path)}: {text}" for at, text in _faults(definition)]
    except ValidationError as error:
        lines = _explain(error.errors(), places, path)
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))
    return definition


_EXPECTED = {
    "axes": "a list of values, or labels with the keys that each sets",
    "only": "a list of axis: label",
    "except": "a list of axis: label",
    "baseline": "axis: label",
}
"""Short description of each section, in place of pydantic's list of alternatives."""


def _explain(faults: Sequence[Any], sources: Sources, path: Path) -> list[str]:
    """Return a line for each place that is at fault."""
    lines: dict[str, str] = {}
    for fault in faults:
        at = tuple(fault["loc"])
        while len(at) > 1 and at not in sources:
            at = at[:-1]  # the rest is a position, or the name of a form such as list[...]
        where = f"{_place(at, sources, path)}: {'.'.join(map(str, at))}"
        message = str(fault["msg"])
        if fault["type"] == "extra_forbidden":
            model = SameLosses if at[0] == "same_losses" and len(at) > 1 else Definition
            known = [field.alias or name for name, field in model.model_fields.items()]
            text = f"{where}: unknown key{did_you_mean(str(at[-1]), [*known, SMALL])}"
        elif fault["type"] == "missing":
            text = f"{path}: {'.'.join(map(str, fault['loc']))}: required, and absent; add it"
        elif at[0] in _EXPECTED:
            text = f"{where}: expected {_EXPECTED[at[0]]}, found {shown(fault['input'])}"
        else:
            text = f"{where}: {message[0].lower()}{message[1:]}, found {shown(fault['input'])}"
        lines.setdefault(where, text)
    return [*lines.values()]


def _place(at: tuple[Any, ...], sources: Sources, path: Path) -> str:
    return next((sources[at[:n]] for n in range(len(at), 0, -1) if at[:n] in sources), str(path))


def _faults(definition: Definition) -> Iterator[Fault]:
    """Yield where and what: names of axes, labels and keys that nothing has."""
    for key, value in flatten(definition.settings):
        yield from _value_faults(key, value, ("settings", *key.split(".")))
    for axis, values in definition.axes.items():
        at = ("axes", axis)
        if not values:
            yield at, f"axes.{axis}: has no values; name one, or leave the axis out"
        if isinstance(values, dict):
            for name, keys in values.items():
                for key, value in flatten(keys):
                    yield from _value_faults(key, value, (*at, name, *key.split(".")))
            continue
        if axis in SPECIAL or _is_key(axis):
            for value in values:
                yield from _value_faults(axis, value, at)
        else:
            others = f"; name a key of the configuration, or one of {', '.join(SPECIAL)}, or give each label its keys"
            yield at, f"axes.{axis}: unknown axis{did_you_mean(axis, SPECIAL) or hint(axis) or others}"
        if len({*map(label, values)}) < len(values):
            yield at, f"axes.{axis}: a value is there twice; name each once"
    yield from _condition_faults(definition)


def _is_key(name: str) -> bool:
    """Whether a key of the configuration has this name, or stands above one that takes any."""
    return name in schema_keys() or name in ALIASES


def _value_faults(key: str, value: Any, at: tuple[Any, ...]) -> Iterator[Fault]:
    if key in RESERVED:
        yield at, f"{key}: is set by the study: {RESERVED[key]}"
    elif key in SPECIAL and at[0] == "settings":
        yield at, f"{key}: is an axis; put it under axes"
    elif key not in SPECIAL and not _is_key(key):
        yield at, f"{key}: unknown key{hint(key)}"
    elif key in ("ranks", "hosts") and not (type(value) is int and 0 < value <= MAX_RANKS):
        yield at, f"{key}: {value!r}: expected a whole number, 1 to {MAX_RANKS}"
    elif key == "base" and not isinstance(value, str):
        yield at, f"base: {value!r}: expected the path of a configuration"
    elif key == "peer" and value not in (None, *PEERS):
        meant = did_you_mean(str(value), PEERS)
        yield at, f"peer: {value!r}: expected {', '.join(PEERS)} or null{meant}"


def _condition_faults(definition: Definition) -> Iterator[Fault]:
    """Yield the filters, groups and baselines that name an axis or a label that is not there."""
    same = definition.same_losses or SameLosses.model_validate({"along": []})
    lists = {"only": definition.only, "except": definition.leave_out, "same_losses.except": same.leave_out}
    listed: dict[KeyPath, Condition] = {
        (*name.split("."), number): each for name, found in lists.items() for number, each in enumerate(found)
    }
    listed |= {("baseline",): definition.baseline, ("same_losses", "along"): {axis: [] for axis in same.along}}
    for at, condition in listed.items():
        name = ".".join(part for part in at if isinstance(part, str))
        for axis, wanted in condition.items():
            if axis not in definition.axes:
                have = f"; the axes are {', '.join(definition.axes) or 'none'}"
                yield (*at, axis), f"{name}: {axis}: unknown axis{did_you_mean(axis, definition.axes) or have}"
                continue
            labels = [*map(label, definition.axes[axis])]
            for value in map(label, wanted if isinstance(wanted, list) else [wanted]):
                if value not in labels:
                    meant = did_you_mean(value, labels) or f"; it has {', '.join(labels)}"
                    yield (*at, axis), f"{name}: {axis}: has no {value!r}{meant}"
