"""Read and write MindSpore's strategy files without MindSpore or protobuf. They say how the ranks
of each pipeline stage split the parameters.

Format: ParallelStrategyMap of mindspore/ccsrc/utils/node_strategy.proto, or the same as JSON.
Meaning: mindspore/parallel/_tensor.py. In a file of several stages, which
``merge_pipeline_strategys`` makes, a parameter is called ``STAGE-NAME``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import index
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from common.errors import CheckpointError
from common.files import atomic_write
from common.structured_files import parse_json, read_bytes, require_mapping
from common.tensor_files.arrays import Bytes
from common.tensor_files.protobuf import bytes_field, int_field, read_message, read_numbers

_MAX_BYTES = 2**28
_MAX_RANKS = 2**20

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""[first, end) of each dim."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of one parameter: how the ranks of a stage split it."""

    devices: tuple[int, ...]
    """Sizes of the axes in which the ranks are arranged, the slowest first."""
    axes: tuple[tuple[int, ...], ...]
    """Axes that split each dim, as their places in ``devices``; the outermost first."""
    shards: int = 1
    """Number of parts into which the optimizer's ranks split dim 0 once more."""

    def __post_init__(self) -> None:
        """Raise ValueError for axes that do not exist or that split two dims."""
        used = [axis for axes in self.axes for axis in axes]
        if (
            min(self.devices, default=0) < 1
            or math.prod(self.devices) > _MAX_RANKS
            or len(used) != len(set(used))
            or not all(0 <= axis < len(self.devices) for axis in used)
        ):
            raise ValueError(f"axes {list(self.axes)} of devices {list(self.devices)}")
        if self.shards < 1 or (self.shards > 1 and not self.axes) or self.copies % self.shards:
            raise ValueError(f"{self.copies} ranks hold the same part, and split it {self.shards}")

    @property
    def ranks(self) -> int:
        """Number of ranks of a stage."""
        return math.prod(self.devices)

    @property
    def copies(self) -> int:
        """Number of ranks of a stage that hold the same part before ``shards`` split it."""
        return math.prod(self.devices[axis] for axis in self._free_axes)

    @property
    def _free_axes(self) -> list[int]:
        used = {axis for axes in self.axes for axis in axes}
        return [axis for axis in range(len(self.devices)) if axis not in used]

    def parts(self) -> tuple[int, ...]:
        """Return the number of parts of each dim."""
        counts = [math.prod(self.devices[axis] for axis in axes) for axes in self.axes]
        return (counts[0] * self.shards, *counts[1:]) if counts else ()

    def place(self, rank: int) -> tuple[int, ...]:
        """Return which part of each dim a rank of the stage holds."""
        at = np.unravel_index(rank, self.devices)

        def number(axes: Sequence[int]) -> int:
            places, sizes = ([of[axis] for axis in axes] for of in (at, self.devices))
            return int(np.ravel_multi_index(places, sizes)) if axes else 0

        places = [number(axes) for axes in self.axes]
        if places:
            places[0] = places[0] * self.shards + number(self._free_axes) % self.shards
        return tuple(places)

    def first_ranks(self, ranks: Iterable[int], without: Iterable[int] = ()) -> list[int]:
        """Return the first of ``ranks`` that holds each part. Parts that a rank of ``without`` holds are left out."""
        places = _places(self)
        held, first = {places[rank] for rank in without}, dict[tuple[int, ...], int]()
        for rank in ranks:
            first.setdefault(places[rank], rank)
        return [rank for place, rank in first.items() if place not in held]

    def spans(self, rank: int, part: tuple[int, ...]) -> Spans:
        """Return the rectangle that a rank holds; its shape is ``part``."""
        return tuple((place * size, (place + 1) * size) for place, size in zip(self.place(rank), part, strict=True))


@cache
def _places(layout: Layout) -> tuple[tuple[int, ...], ...]:
    return tuple(layout.place(rank) for rank in range(layout.ranks))


Strategy: TypeAlias = Mapping[int, Mapping[str, Layout]]
"""Layout by stage and parameter name."""


# ---- reading ----


def read_strategy(path: Path) -> dict[int, dict[str, Layout]]:
    """Return the layouts of a file, of one or several stages. Raises CheckpointError."""
    content = read_bytes(path, limit=_MAX_BYTES, error=CheckpointError)
    try:
        if content[:1] == b"{":
            tree = require_mapping(parse_json(content), "the strategy", error=CheckpointError)
            stages = [item["stage"] for item in tree["parallel_strategy_item"].values()]
            records = tree["parallel_layout_item"]
        else:
            fields = read_message(np.frombuffer(content, np.uint8))
            stages = [index(read_message(read_message(item)[2][-1])[1][-1]) for item in fields.get(2, ())]
            layouts = map(read_message, fields.get(3, ()))
            records = {entry[1][-1].tobytes().decode(): _record(entry[2][-1]) for entry in layouts}
        found: dict[int, dict[str, Layout]] = {}
        for name, record in records.items():
            first, dash, rest = name.partition("-")
            stage, parameter = (int(first), rest) if dash and first.isdigit() else (stages[0] if stages else 0, name)
            try:
                found.setdefault(stage, {})[parameter] = _layout(record)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if not found:
            raise ValueError("it has no layout of a parameter")
        return found
    except (ValueError, TypeError, AttributeError, LookupError, CheckpointError) as error:
        own = isinstance(error, (ValueError, CheckpointError))  # others have Python's words
        reason = getattr(error, "problem", error) if own else "of another form"
        raise CheckpointError(
            f"{path}: not a whole strategy file of MindSpore: {reason}; expected its protobuf or"
            " JSON: copy it again from the run"
        ) from None


_LISTS = {1: "dev_matrix", 2: "tensor_map", 3: "param_split_shape"}
_NUMBERS = {5: "field", 6: "opt_weight_shard_step", 7: "opt_weight_shard_size"}


def _record(message: Bytes) -> dict[str, Any]:
    """Return a message ParallelLayouts as the dict of its JSON form."""
    fields = read_message(message)
    found: dict[str, Any] = {
        name: [
            [value for each in read_message(part).get(1, ()) for value in read_numbers(each)]
            for part in fields.get(number, ())
        ]
        for number, name in _LISTS.items()
    }
    for name in ("dev_matrix", "param_split_shape"):
        found[name] = found[name][0] if found[name] else []
    maps = found["tensor_map"]
    several = len(maps) > 1  # a list of axes for each dim, or one axis for each dim
    found["tensor_map"] = [dims for dims in maps if dims] if several else [*chain(*maps)]
    numbers = {name: [*map(index, fields[number])] for number, name in _NUMBERS.items() if number in fields}
    return found | {name: read_numbers(values[-1])[0] for name, values in numbers.items()}


def _layout(record: Mapping[str, Any]) -> Layout:
    """Return a layout. The file counts axes from the last one, and -1 splits nothing."""
    if record.get("param_split_shape") or record.get("field"):
        raise ValueError("parts of unequal sizes, or of fields, which GPT-2 has not")
    devices = tuple(record["dev_matrix"])
    maps = [dims if isinstance(dims, list) else [dims] for dims in record["tensor_map"]]
    axes = tuple(tuple(len(devices) - 1 - place for place in dims if place != -1) for dims in maps)
    layout = Layout(devices=devices, axes=axes)
    size, step = record.get("opt_weight_shard_size", 0), record.get("opt_weight_shard_step", 0)
    shards = layout.copies if size == -1 else size if step else 1
    return Layout(devices=devices, axes=axes, shards=max(shards, 1))


# ---- writing ----


def write_strategy(path: Path, strategy: Strategy) -> None:
    """Write one file of all stages, as ``merge_pipeline_strategys`` does. Raises StorageError."""

    def dims(number: int, values: Iterable[int]) -> bytes:
        return bytes_field(number, b"".join(int_field(1, value) for value in values))

    items, layouts = [], []
    for stage, found in strategy.items():
        splits = int_field(1, stage) + bytes_field(2, b"")
        # one operator carries the stage; the network's own operators are not read
        items.append(bytes_field(2, bytes_field(1, b"parameters") + bytes_field(2, splits)))
        for name, layout in found.items():
            # one axis at most splits a dim of what is written
            maps = [len(layout.devices) - 1 - axes[0] if axes else -1 for axes in layout.axes]
            message = dims(1, layout.devices) + dims(2, maps) + dims(3, ()) + dims(4, ()) + int_field(5, 0)
            step = layout.ranks // layout.copies if layout.shards > 1 else 0
            message += int_field(6, step) + int_field(7, layout.shards if step else 0)
            layouts.append(bytes_field(3, bytes_field(1, f"{stage}-{name}".encode()) + bytes_field(2, message)))
    with atomic_write(path) as file:
        file.write(int_field(1, 1) + b"".join((*items, *layouts)))
