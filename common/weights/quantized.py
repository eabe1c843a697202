"""Weights of 8 bits, as our folders hold them. ``safetensors`` alone reads them:

    NAME.weight         int8 (out, in), from -127 to 127: matrices, and the table of tokens, which
                        is the head too
    NAME.weight_scale   float32 (out,): a weight is its integer times the scale of its row
    NAME.input_scale    float32 (1,): that of the layer's input, where training has found one

All other tensors are float32. A layer without ``input_scale`` rounds each token of its input by
the largest number of that token. The layer's output is the integer product times both scales, plus
the bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError
from common.log import LOG
from common.tensor_files.arrays import TensorKind
from common.tensor_files.safetensors_file import open_safetensors
from common.weights.names import POSITIONS, decays

LARGEST = 127
"""The largest integer of weights, of either sign. Inputs may be -128 too, where their scale is
fixed.
"""
WEIGHT_SCALE = "_scale"
"""What the name of a weight's scales has after the name of the weight."""
INPUT_SCALE = "input_scale"
_ROWS = 4096
"""Rows that are quantized at once, so that a large table needs little memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    integers: NDArray[np.int8]
    """(out, in)."""
    scales: NDArray[np.float32]
    """(out,)."""
    input_scale: float | None = None
    """None: each token of the input has its own."""


def takes_8_bits(name: str) -> bool:
    """Whether this parameter is quantized: the matrices and the table of tokens, not positions,
    biases and norms, which are a hundredth of the model.
    """
    return decays(name) and name != POSITIONS


def quantize_rows(name: str, weight: NDArray[np.float32]) -> QuantizedWeight:
    """Round each row (an output channel) by the number in it that is largest in size.

    Raises CheckpointError where a number is not finite.
    """
    integers = np.empty(weight.shape, np.int8)
    scales = np.empty(len(weight), np.float32)
    for first in range(0, len(weight), _ROWS):
        rows = slice(first, first + _ROWS)
        largest = np.abs(weight[rows]).max(1)
        if not np.isfinite(largest).all():
            raise CheckpointError(
                f"{name}: holds numbers that are not finite, which 8 bits cannot say; use a"
                " checkpoint from before the loss became infinite"
            )
        scales[rows] = np.maximum(largest / LARGEST, np.finfo(np.float32).tiny)
        integers[rows] = np.rint(weight[rows] / scales[rows, None])
    return QuantizedWeight(integers=integers, scales=scales)


def kinds_of_8_bits(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorKind]:
    """Return the tensors of a file of 8 bits, for parameters of these shapes, in their order."""
    kinds = {}
    for name, shape in shapes.items():
        is_integer = takes_8_bits(name)
        kinds[name] = TensorKind(dtype="int8" if is_integer else "float32", shape=shape)
        if is_integer:
            kinds[name + WEIGHT_SCALE] = TensorKind(dtype="float32", shape=shape[:1])
    return kinds


def arrays_of_8_bits(values: Iterable[tuple[str, NDArray[np.float32]]]) -> Iterator[NDArray[Any]]:
    """Yield the arrays of ``kinds_of_8_bits`` for parameters in float32. Raises CheckpointError
    where a number is not finite.
    """
    for name, array in values:
        if takes_8_bits(name):
            quantized = quantize_rows(name, array)
            yield quantized.integers
            yield quantized.scales
        else:
            yield array


class QuantizedReader:
    """A reader of a safetensors file with weights of 8 bits. It gives them as float32, and says so
    once.
    """

    def __init__(self, path: Path, reader: Any) -> None:
        """Raises CheckpointError where a scale is missing, of another shape or no usable number."""
        self._path = path
        self._reader = reader
        self._has_said = False
        names = list(reader.keys())  # safe_open is no mapping
        self._stored = set(names)
        integers = [name for name in names if reader.get_slice(name).get_dtype() == "I8"]
        of_scales = {name + WEIGHT_SCALE for name in integers} | {
            name for name in names if name.endswith(INPUT_SCALE)
        }
        self._names = [name for name in names if name not in of_scales]
        self._scales = {name: self._read_scales(name) for name in integers}

    def keys(self) -> list[str]:
        """Names of parameters, without those of scales."""
        return self._names

    def quantized(self) -> Iterator[tuple[str, QuantizedWeight]]:
        """Yield the weights of 8 bits as they are stored."""
        for name, (scales, input_scale) in self._scales.items():
            integers = self._reader.get_tensor(name)
            yield name, QuantizedWeight(integers=integers, scales=scales, input_scale=input_scale)

    def get_tensor(self, name: str) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.get_slice(name)[...]
        return values

    def get_slice(self, name: str) -> Any:
        """Return a tensor to cut rectangles from."""
        stored = self._reader.get_slice(name)
        return _Slice(self, stored, self._scales[name][0]) if name in self._scales else stored

    def say_once(self) -> None:
        """Tell that weights are taken as float32."""
        if not self._has_said:
            self._has_said = True
            LOG.info(f"{self._path}: its weights of 8 bits are taken as float32")

    def _read_scales(self, name: str) -> tuple[NDArray[np.float32], float | None]:
        rows = self._reader.get_slice(name).get_shape()[:1]
        scales = self._read_scale(name + WEIGHT_SCALE, rows)
        input_name = f"{name.removesuffix('weight')}{INPUT_SCALE}"
        if input_name not in self._stored:
            return scales, None
        return scales, float(self._read_scale(input_name, [1])[0])

    def _read_scale(self, name: str, shape: list[int]) -> NDArray[np.float32]:
        remedy = "write the folder again from the weights that it was made of"
        if name not in self._stored:
            raise CheckpointError(
                f"{self._path}: lacks {name}, without which the integers mean nothing; {remedy}"
            )
        scales: NDArray[np.float32] = self._reader.get_tensor(name)
        if list(scales.shape) != shape or scales.dtype != np.float32:
            raise CheckpointError(
                f"{self._path}: {name} is {scales.dtype} {list(scales.shape)}; expected float32"
                f" {shape}; {remedy}"
            )
        if not (np.isfinite(scales) & (scales > 0)).all():
            wrong = scales[~(np.isfinite(scales) & (scales > 0))][0]
            raise CheckpointError(
                f"{self._path}: {name} holds {wrong}; expected finite numbers above 0; {remedy}"
            )
        return scales


@dataclass(frozen=True)
class _Slice:
    """A tensor of 8 bits, as float32."""

    file: QuantizedReader
    stored: Any
    scales: NDArray[np.float32]

    def get_shape(self) -> list[int]:
        shape: list[int] = self.stored.get_shape()
        return shape

    def __getitem__(self, spans: Any) -> NDArray[np.float32]:
        self.file.say_once()
        rows = spans[0] if isinstance(spans, tuple) else spans
        values: NDArray[np.float32] = self.stored[spans] * self.scales[rows, None]
        return values


@contextmanager
def open_parameters(path: Path) -> Iterator[Any]:
    """Open a file of ours as a reader of float32 tensors, whether its weights are of 8 bits or not.

    Raises CheckpointError.
    """
    with open_safetensors(path) as reader:
        is_integer = any(reader.get_slice(name).get_dtype() == "I8" for name in reader.keys())  # noqa: SIM118
        yield QuantizedReader(path, reader) if is_integer else reader
