"""Read the tensors of a checkpoint as a whole, whichever ranks wrote which pieces of them. Any
rectangle of a tensor can be read on its own.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError
from common.tensor_files.safetensors_file import shapes_of
from common.weights.names import check_tensors
from common.weights.quantized import open_parameters


@dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """Rectangle of a (padded) parameter that one rank holds. Ends are exclusive; a vector has no
    columns.
    """

    rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in (self.rows, *([self.columns] if self.columns else [])))


Array = NDArray[np.float32]
Rectangle = list[list[int]]
"""Return [[first row, end], [first column, end]] as in the manifest; a vector has only the first
pair.
"""


def to_rectangle(piece: TensorSlice) -> Rectangle:
    return [list(span) for span in (piece.rows, piece.columns) if span is not None]


class ShardedReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, list[tuple[Any, tuple[slice, ...]]]] = defaultdict(list)
        self._split: set[str] = set()

    def add(self, reader: Any, pieces: Mapping[str, Rectangle] | None) -> None:
        """Tensors of one open file. Of the tensors in ``pieces`` it holds these rectangles, of the
        others everything.
        """
        for name, shape in shapes_of(reader).items():
            spans = [[0, size] for size in shape]
            # a tensor that the manifest does not list does not belong to the model: require refuses
            # it
            if pieces is not None and name in pieces:
                spans = pieces[name]
                self._split.add(name)
                if tuple(end - first for first, end in spans) != shape:
                    raise CheckpointError(
                        f"{self._path}: the manifest says {spans} of {name}, its part is"
                        f" {list(shape)}; use another checkpoint"
                    )
            self._parts[name].append((reader, tuple(slice(*span) for span in spans)))

    def __bool__(self) -> bool:
        return bool(self._parts)

    def require(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless exactly these tensors are there, whole and with these
        shapes.
        """
        found = {
            name: tuple(max(spans[dim].stop for _, spans in parts) for dim in range(len(parts[0][1])))
            for name, parts in self._parts.items()
        }
        there = {
            name: sum(math.prod(span.stop - span.start for span in spans) for _, spans in self._parts[name])
            for name, shape in expected.items()
            if name in self._split and len(shape) == len(found[name]) and all(map(operator.le, found[name], shape))
        }
        partial = {name: elements for name, elements in there.items() if elements != math.prod(expected[name])}
        check_tensors(self._path, found, expected, partial)

    def read(self, name: str, piece: TensorSlice) -> Array:
        """Return a rectangle of a tensor; elements beyond its rows are 0."""
        wanted = [piece.rows, *([piece.columns] if piece.columns else [])]
        parts = self._parts[name]
        if len(parts) == 1 and [(span.start, span.stop) for span in parts[0][1]] == wanted:
            whole: Array = parts[0][0].get_tensor(name)
            return whole
        values = np.zeros(piece.shape, np.float32)
        for reader, spans in parts:
            common = [
                (max(first, span.start), min(end, span.stop)) for (first, end), span in zip(wanted, spans, strict=True)
            ]
            if all(first < end for first, end in common):
                target = tuple(
                    slice(first - start, end - start) for (first, end), (start, _) in zip(common, wanted, strict=True)
                )
                source = tuple(
                    slice(first - span.start, end - span.start)
                    for (first, end), span in zip(common, spans, strict=True)
                )
                values[target] = reader.get_slice(name)[source]
        return values


@contextmanager
def open_stored(checkpoint: Path, file: str, manifest: Mapping[str, Any]) -> Iterator[ShardedReader]:
    """Return the tensors of ``file`` (model.safetensors), written by one rank or in parts by each
    rank. Raises CheckpointError.
    """
    stored = ShardedReader(checkpoint / file)
    with ExitStack() as stack:
        for name, record in manifest["files"].items():
            if name == file or name.startswith(f"{Path(file).stem}.rank_"):
                stored.add(stack.enter_context(open_parameters(checkpoint / name)), record.get("pieces"))
        yield stored


def file_of_rank(file: str, rank: int) -> str:
    return f"{Path(file).stem}.rank_{rank:05d}{Path(file).suffix}"
