"""Read the tensors of a checkpoint as a whole, whichever ranks wrote which pieces of them. Any
rectangle of a tensor can be read on its own.

Weights of 8 bits are read with ``safetensors`` alone:

    NAME.weight         int8 (out, in): matrices, and the table of tokens, which is the head too
    NAME.weight_scale   float32 (out,): a weight is its integer times the scale of its row
    NAME.input_scale    float32 (1,): that of the layer's input, where training has found one

All other tensors are float32. A layer without ``input_scale`` rounds each token of its input by
the largest number of that token. The layer's output is the integer product times both scales, plus
the bias. ``common.quantization`` makes the integers.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError
from common.log import LOG
from common.tensor_files.safetensors_file import open_safetensors, shapes_of
from common.weights.names import check_tensors

WEIGHT_SCALE = "_scale"
"""Suffix that makes the name of a weight's scales from the name of the weight."""
_INPUT_SCALE = "input_scale"


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerScheme:
    """Scheme by which one parameter becomes integers."""

    scales: NDArray[np.float32] | None = None
    """Scales (out,) of the rows of the weight; None: from the largest number of each row."""
    per_channel: bool = True
    """Whether each row has its own scale, if scales are not given."""
    bits: int = 8
    """Number of bits of the integers, if scales are not given."""
    input_scale: float | None = None
    """Scale of the layer's input; None: each token has its own."""


Scheme: TypeAlias = Mapping[str, LayerScheme]
"""Schemes by the names of the parameters that are quantized. All others stay float32."""


def input_scale_name(weight: str) -> str:
    """Return the name of the input's scale of the layer with this weight."""
    return f"{weight.removesuffix('weight')}{_INPUT_SCALE}"


class QuantizedReader:
    """Reader of a safetensors file with weights of 8 bits. It returns them as float32, and logs that once."""

    def __init__(self, path: Path, reader: Any) -> None:
        self._reader = reader
        self.say_once = cache(lambda: LOG.info(f"{path}: its weights of 8 bits are taken as float32"))
        names = list(reader.keys())  # safe_open is not a mapping
        integers = [name for name in names if reader.get_slice(name).get_dtype() == "I8"]
        of_scales = {name + WEIGHT_SCALE for name in integers} | {name for name in names if name.endswith(_INPUT_SCALE)}
        self._names = [name for name in names if name not in of_scales]
        if lost := of_scales.difference(names):
            raise CheckpointError(
                f"{path}: not a whole file of 8 bits: lacks {min(lost)}; copy it again or use another one"
            )
        self.scheme: Scheme = {
            name: LayerScheme(
                scales=reader.get_tensor(name + WEIGHT_SCALE),
                input_scale=float(reader.get_tensor(of_input)[0]) if of_input in names else None,
            )
            for name in integers
            for of_input in [input_scale_name(name)]
        }

    def keys(self) -> list[str]:
        """Names of parameters, without those of scales."""
        return self._names

    def quantized(self) -> Iterator[tuple[str, NDArray[np.int8], LayerScheme]]:
        """Yield the weights of 8 bits as they are stored: name, integers (out, in), and their scheme."""
        for name, layer in self.scheme.items():
            yield name, self._reader.get_tensor(name), layer

    def get_tensor(self, name: str) -> NDArray[np.float32]:
        return np.asarray(self.get_slice(name)[...])

    def get_slice(self, name: str) -> Any:
        """Return a tensor to cut rectangles from."""
        stored = self._reader.get_slice(name)
        layer = self.scheme.get(name)
        if layer is None:
            return stored
        assert layer.scales is not None
        return _Slice(self, stored, layer.scales)


@dataclass(frozen=True)
class _Slice:
    """Tensor of 8 bits, read as float32."""

    file: QuantizedReader
    stored: Any
    scales: NDArray[np.float32]

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape())

    def __getitem__(self, spans: Any) -> NDArray[np.float32]:
        self.file.say_once()
        rows = spans[0] if isinstance(spans, tuple) else spans
        values: NDArray[np.float32] = self.stored[spans] * self.scales[rows, None]
        return values


def open_parameters(path: Path) -> Any:
    """Open a file of ours as a reader of float32 tensors, whether its weights have 8 bits or not.

    Raises CheckpointError.
    """
    reader = open_safetensors(path)
    is_integer = any(reader.get_slice(name).get_dtype() == "I8" for name in reader.keys())  # noqa: SIM118
    return QuantizedReader(path, reader) if is_integer else reader


TensorSlice: TypeAlias = tuple[tuple[int, int], ...]
"""Rectangle of a (padded) parameter: (first row, end), (first column, end); a vector has only the first pair."""
Rectangle: TypeAlias = Sequence[Sequence[int]]
"""The same as lists, as in the manifest."""
Array = NDArray[np.float32]


def shape_of(piece: TensorSlice) -> tuple[int, ...]:
    return tuple(end - first for first, end in piece)


class ShardedReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, list[tuple[Any, TensorSlice]]] = defaultdict(list)
        self._split: set[str] = set()

    def add(self, reader: Any, pieces: Mapping[str, Rectangle] | None) -> None:
        """Add the tensors of an open file. It holds these rectangles of those in ``pieces``, and the others whole."""
        for name, shape in shapes_of(reader).items():
            spans: Rectangle = [[0, size] for size in shape]
            # a tensor that the manifest does not list does not belong to the model: require refuses it
            if pieces is not None and name in pieces:
                spans = pieces[name]
                self._split.add(name)
            self._parts[name].append((reader, tuple((first, end) for first, end in spans)))

    def __bool__(self) -> bool:
        return bool(self._parts)

    def require(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless exactly these tensors are there, whole and with these shapes."""
        found = {
            name: tuple(max(spans[dim][1] for _, spans in parts) for dim in range(len(parts[0][1])))
            for name, parts in self._parts.items()
        }
        there = {
            name: sum(math.prod(shape_of(spans)) for _, spans in self._parts[name])
            for name, shape in expected.items()
            if name in self._split and len(shape) == len(found[name]) and all(map(operator.le, found[name], shape))
        }
        partial = {name: elements for name, elements in there.items() if elements != math.prod(expected[name])}
        check_tensors(self._path, found, expected, partial)

    def read(self, name: str, piece: TensorSlice) -> Array:
        """Return a rectangle of a tensor; elements beyond its rows are 0."""
        from safetensors import SafetensorError

        parts = self._parts[name]
        if len(parts) == 1 and parts[0][1] == piece:
            return np.asarray(parts[0][0].get_tensor(name))
        values = np.zeros(shape_of(piece), np.float32)
        for reader, spans in parts:
            common = [(max(first, at), min(end, to)) for (first, end), (at, to) in zip(piece, spans, strict=True)]
            if all(first < end for first, end in common):
                target, source = (
                    tuple(slice(first - at, end - at) for (first, end), (at, _) in zip(common, of, strict=True))
                    for of in (piece, spans)
                )
                try:
                    values[target] = reader.get_slice(name)[source]
                except SafetensorError as error:
                    raise CheckpointError(f"{self._path}: {name} is not as its record says: {error}") from None
        return values


def open_stored(checkpoint: Path, file: str, manifest: Mapping[str, Any]) -> ShardedReader:
    """Return the tensors of ``file`` (model.safetensors), written by one rank or in parts by each
    rank. Raises CheckpointError.
    """
    stored = ShardedReader(checkpoint / file)
    for name, record in manifest["files"].items():
        if name == file or name.startswith(f"{Path(file).stem}.rank_"):
            stored.add(open_parameters(checkpoint / name), record.get("pieces"))
    return stored


def file_of_rank(file: str, rank: int) -> str:
    return f"{Path(file).stem}.rank_{rank:05d}{Path(file).suffix}"
