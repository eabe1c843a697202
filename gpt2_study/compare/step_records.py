"""Comparison of two records of a step, tensor by tensor, in the order of the computation; sentences and
a table of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.files import atomic_write
from common.structured_files import read_json_mapping
from common.tensor_files.safetensors_file import open_safetensors
from common.training.recording import BACKWARD, FORWARD, GRADIENTS, LAST_NORM, TOKENS, WEIGHTS, activation_names
from common.weights.names import EMBEDDING, POSITIONS
from common.weights.pieces import ShardedReader
from gpt2_study.verdict import OTHER_KERNELS

LOSS = "loss"
TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative tolerance by the type of the computation. An activation of 12 layers adds up the
roundings of some 50 operations, each of 2^-24, 2^-11 or 2^-8.
"""

Array = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor in both runs."""

    section: str
    name: str
    largest: float
    """Largest absolute difference of two elements."""
    relative: float
    """Norm of the difference by the larger norm of both; NaN where a value is not finite."""
    place: tuple[int, ...] | None
    """First element that differs beyond the tolerance; None where the tensor is the same."""
    sample: int | None = None
    """Sample of the global batch to which the place belongs, for activations."""

    @property
    def differs(self) -> bool:
        return self.place is not None


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    """Comparison of all tensors that both records have."""

    step: int
    tolerance: float
    rows: tuple[Row, ...]
    left_out: tuple[str, ...]
    """Tensors that only one record has, or has with another shape."""
    ranks: Mapping[int, tuple[int, int]]
    """Rank in each run that reads a sample of the global batch."""

    @property
    def first(self) -> Row | None:
        return next((row for row in self.rows if row.differs), None)


class StepReader:
    """Record of all ranks, read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        """Open a record. Raises DataError and CheckpointError."""
        self.facts = _facts(folder, 0)
        self._shapes: dict[str, list[int]] = {}
        self._stored = ShardedReader(folder)
        for rank in range(int(self.facts["ranks"])):
            facts = self.facts if rank == 0 else _facts(folder, rank)
            reader = open_safetensors(folder / f"rank_{rank:05d}.safetensors")
            self._stored.add(reader, facts["pieces"])
            for name, spans in facts["pieces"].items():
                ends = [end for _, end in spans]
                before = self._shapes.setdefault(name, ends)
                self._shapes[name] = [max(pair) for pair in zip(before, ends, strict=True)]
        self._stored.require({name: tuple(shape) for name, shape in self._shapes.items()})

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, None if it is not recorded."""
        shape = self._shapes.get(name)
        if shape is None:
            return None
        if name.startswith((FORWARD, BACKWARD)):
            return (shape[0], shape[1] // self.facts["hidden"], self.facts["hidden"])
        return tuple(shape)

    def read(self, name: str) -> Array:
        piece = tuple((0, size) for size in self._shapes[name])
        return self._stored.read(name, piece).reshape(self.shape(name) or ())


def _facts(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank_{rank:05d}.json"
    if not path.is_file():
        raise DataError(f"{path}: rank {rank} has not recorded the step; its log says why")
    return read_json_mapping(path, error=DataError)


def compare_records(one: Path, other: Path, tolerance: float | None) -> LayerComparison:
    """Compare two records. tolerance: relative to the norm of a tensor; None takes TOLERANCES.

    Raises DataError and CheckpointError.
    """
    readers = StepReader(one), StepReader(other)
    facts = [reader.facts for reader in readers]
    if tolerance is None:
        tolerance = max(TOLERANCES[each["compute"]] for each in facts)
        if facts[0]["backend"] != facts[1]["backend"]:
            tolerance = max(tolerance, OTHER_KERNELS)
    rows, left_out = [], []
    for section, name in order(max(each["layers"] for each in facts)):
        key = f"{section}/{name}" if name else section
        shapes = [reader.shape(key) for reader in readers]
        if name != LOSS and (shapes[0] is None or shapes[0] != shapes[1]):
            if shapes != [None, None]:
                found = ["not recorded" if shape is None else str(list(shape)) for shape in shapes]
                left_out.append(f"{key}: {found[0]} and {found[1]}")
            continue
        rows.append(_row(section, name, *readers, tolerance))
    samples = facts[0]["samples"]
    ranks = zip(*(each["ranks_of_samples"] for each in facts), strict=False)
    return LayerComparison(
        step=facts[0]["step"],
        tolerance=tolerance,
        rows=tuple(rows),
        left_out=tuple(left_out),
        ranks=dict(zip(samples, ranks, strict=False)) if samples == facts[1]["samples"] else {},
    )


def order(layers: int) -> Iterator[tuple[str, str]]:
    """Yield section and name of all tensors in the order in which a step computes them.

    The gradients of the token table come last: the embedding adds its part there to the head's. The softmax does not
    see the biases of keys. Adam moves them by rounding errors, so they are left out among the weights.
    """
    yield TOKENS, ""
    forward = list(activation_names(layers))
    yield from ((WEIGHTS, name) for name in (EMBEDDING, POSITIONS))
    for name in forward:
        yield from ((WEIGHTS, parameter) for parameter in parameters_of(name) if not parameter.endswith("k_proj.bias"))
    yield from ((FORWARD, name) for name in (*forward, LOSS))
    for name in reversed(forward):
        yield BACKWARD, name
        yield from ((GRADIENTS, parameter) for parameter in reversed(parameters_of(name)))
    yield from ((GRADIENTS, name) for name in (POSITIONS, EMBEDDING))


def parameters_of(activation: str) -> list[str]:
    """Return the parameters from which a recorded activation is computed directly."""
    inner = {"attn": (".q_proj", ".k_proj", ".v_proj", ".c_proj"), "mlp": (".c_fc", ".c_proj")}
    inner |= dict.fromkeys(("ln_1", "ln_2", LAST_NORM), ("",))
    modules = inner.get(activation.rpartition(".")[2], ())
    return [f"{activation}{name}.{kind}" for name in modules for kind in ("weight", "bias")]


def _row(section: str, name: str, one: StepReader, other: StepReader, tolerance: float) -> Row:
    if name == LOSS:
        values, found = (np.array([reader.facts["loss"]], np.float64) for reader in (one, other))
        largest, relative, place = difference(values, found, tolerance)
        return Row(section=section, name=name, largest=largest, relative=relative, place=place)
    key = f"{section}/{name}" if name else section
    scale = 0.0
    if section in (WEIGHTS, GRADIENTS) and name.endswith(("q_proj.bias", "k_proj.bias")):
        weight = f"{section}/{name.removesuffix('bias')}weight"
        scale = max(_terms(one.read(weight)), _terms(other.read(weight)))
    largest, relative, place = difference(one.read(key), other.read(key), tolerance, scale)
    sample = None
    if place is not None and section in (TOKENS, FORWARD, BACKWARD):
        sample = one.facts["samples"][place[0]]
    return Row(section=section, name=name, largest=largest, relative=relative, place=place, sample=sample)


def _terms(weight: Array) -> float:
    """Return the size of the terms that add up to a bias or to its gradient.

    They nearly cancel for queries, and wholly for keys, which the softmax does not see. Gradients
    of the weight are the same terms times inputs of size one, which do not cancel.
    """
    return float(np.linalg.norm(weight)) / math.sqrt(weight.shape[1])


def difference(
    one: NDArray[Any], other: NDArray[Any], tolerance: float, scale: float = 0.0
) -> tuple[float, float, tuple[int, ...] | None]:
    """Return the largest absolute difference, the relative one, and the first place beyond the tolerance.

    scale: least norm to which the difference is relative. An element is beyond the tolerance if its difference is more
    than that share of the root mean square.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
        size = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)), scale)
    if not np.isfinite(apart).all():
        place = np.argwhere(~np.isfinite(apart))[0]
        return math.nan, math.nan, tuple(int(index) for index in place)
    largest, total = float(apart.max(initial=0.0)), float(np.linalg.norm(apart))
    relative = total / size if size else 0.0
    if relative <= tolerance:
        return largest, relative, None
    beyond = np.argwhere(apart > tolerance * size / math.sqrt(apart.size))[0]
    return largest, relative, tuple(int(index) for index in beyond)


TABLE = "layers.tsv"
_HEAD = ("section", "name", "largest difference", "relative difference", "first place", "sample")
_TITLES = {
    TOKENS: "tokens of the batch",
    WEIGHTS: "weight {} before the step",
    FORWARD: "{}, forward",
    BACKWARD: "gradient of the output of {}, backward",
    GRADIENTS: "gradient of {}, backward",
}
_BEFORE, _AFTER = 3, 6
"""Rows that are printed before and after the first that differs."""


def describe(found: LayerComparison) -> Iterator[str]:
    """Yield the lines that say where two steps begin to differ."""
    compared = f"step {found.step}: {len(found.rows)} tensors, tolerance {found.tolerance:g}"
    for line in found.left_out[:5]:
        yield f"not compared: {line}"
    if len(found.left_out) > 5:
        yield f"not compared: {len(found.left_out) - 5} more"
    row = found.first
    if row is None:
        largest = max((each.relative for each in found.rows), default=0.0)
        yield f"{compared}: no difference; the largest relative one is {largest:.2g}"
        return
    beyond = sum(each.differs for each in found.rows)
    yield f"{compared}: {beyond} differ"
    yield from table(found.rows, found.rows.index(row))
    parts = []
    if row.sample is not None and row.place is not None:
        names = ("token",) if row.section == TOKENS else ("token", "channel")
        inner = ", ".join(f"{name} {index}" for name, index in zip(names, row.place[1:], strict=True))
        parts.append(f"from sample {row.sample} of the batch on, {inner}")
        if row.sample in found.ranks and max(found.ranks[row.sample]):
            one, other = found.ranks[row.sample]
            parts.append(f"which rank {one} of A and rank {other} of B read")
    where = f" ({'; '.join(parts)})" if parts else ""
    relative = f"relative {row.relative:.2g}, largest {row.largest:.2g}"
    yield f"first difference: {_TITLES[row.section].format(row.name)}{where}; {relative}"


def table(rows: Sequence[Row], first: int) -> Iterator[str]:
    """Yield the rows around the first difference, aligned."""
    start, end = max(0, first - _BEFORE), first + _AFTER + 1
    lines = [_HEAD, *map(_cells, rows[start:end])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()
    rest = len(rows) - end
    if rest > 0:
        yield f"... and {rest} more rows"


def write_table(found: LayerComparison, path: Path) -> None:
    """Write all rows, separated by tabs. Raises OSError."""
    with atomic_write(path, "w") as file:
        for cells in (_HEAD, *map(_cells, found.rows)):
            file.write("\t".join(cells) + "\n")


def _cells(row: Row) -> tuple[str, ...]:
    place = "-" if row.place is None else ",".join(map(str, row.place))
    sample = "-" if row.sample is None else str(row.sample)
    relative, largest = f"{row.relative:.3g}", f"{row.largest:.3g}"
    return (row.section, row.name or "-", largest, relative, place, sample)
