"""Read weights of 8 bits from our folders. Only ``safetensors`` is needed to read them:

    NAME.weight         int8 (out, in): matrices, and the table of tokens, which is the head too
    NAME.weight_scale   float32 (out,): a weight is its integer times the scale of its row
    NAME.input_scale    float32 (1,): that of the layer's input, where training has found one

All other tensors are float32. A layer without ``input_scale`` rounds each token of its input by
the largest number of that token. The layer's output is the integer product times both scales, plus
the bias. ``common.quantization`` makes the integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError
from common.log import LOG
from common.tensor_files.safetensors_file import open_safetensors
from common.weights.names import POSITIONS, decays

WEIGHT_SCALE = "_scale"
"""Suffix that makes the name of a weight's scales from the name of the weight."""
_INPUT_SCALE = "input_scale"
_REMEDY = "write the folder again from the weights that it was made of"


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerScheme:
    """Scheme by which one parameter becomes integers."""

    scales: NDArray[np.float32] | None = None
    """Scales of the rows of the weight; None: from the largest number of each row."""
    per_channel: bool = True
    """Whether each row has its own scale, if scales are not given."""
    bits: int = 8
    """Number of bits of the integers, if scales are not given."""
    input_scale: float | None = None
    """Scale of the layer's input; None: each token has its own."""


Scheme: TypeAlias = Mapping[str, LayerScheme]
"""Schemes by the names of the parameters that are quantized. All others stay float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    integers: NDArray[np.int8]
    """(out, in)."""
    scales: NDArray[np.float32]
    """(out,)."""
    input_scale: float | None


def input_scale_name(weight: str) -> str:
    """Return the name of the input's scale of the layer with this weight."""
    return f"{weight.removesuffix('weight')}{_INPUT_SCALE}"


class QuantizedReader:
    """Reader of a safetensors file with weights of 8 bits. It returns them as float32, and logs
    that once.
    """

    def __init__(self, path: Path, reader: Any) -> None:
        """Open the file. Raises CheckpointError if a scale is missing, of another shape or
        unusable.
        """
        self._path = path
        self._reader = reader
        self.say_once = cache(lambda: LOG.info(f"{path}: its weights of 8 bits are taken as float32"))
        names = list(reader.keys())  # safe_open is not a mapping
        self._stored = set(names)
        integers = [name for name in names if reader.get_slice(name).get_dtype() == "I8"]
        of_scales = {name + WEIGHT_SCALE for name in integers} | {name for name in names if name.endswith(_INPUT_SCALE)}
        self._names = [name for name in names if name not in of_scales]
        self.scheme = {name: self._read_layer(name) for name in integers}

    def keys(self) -> list[str]:
        """Names of parameters, without those of scales."""
        return self._names

    def quantized(self) -> Iterator[tuple[str, QuantizedWeight]]:
        """Yield the weights of 8 bits as they are stored."""
        for name, layer in self.scheme.items():
            assert layer.scales is not None
            yield (
                name,
                QuantizedWeight(
                    integers=self._reader.get_tensor(name), scales=layer.scales, input_scale=layer.input_scale
                ),
            )

    def get_tensor(self, name: str) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.get_slice(name)[...]
        return values

    def get_slice(self, name: str) -> Any:
        """Return a tensor to cut rectangles from."""
        stored = self._reader.get_slice(name)
        layer = self.scheme.get(name)
        if layer is None:
            return stored
        assert layer.scales is not None
        return _Slice(self, stored, layer.scales)

    def _read_layer(self, name: str) -> LayerScheme:
        shape = self._reader.get_slice(name).get_shape()
        if len(shape) != 2 or not decays(name) or name == POSITIONS:
            raise CheckpointError(
                f"{self._path}: {name} {shape} has 8 bits; expected that only of matrices and of"
                f" the table of tokens; {_REMEDY}"
            )
        scales = self._read_scale(name + WEIGHT_SCALE, shape[:1])
        input_scale = None
        if input_scale_name(name) in self._stored:
            input_scale = float(self._read_scale(input_scale_name(name), [1])[0])
        return LayerScheme(scales=scales, input_scale=input_scale)

    def _read_scale(self, name: str, shape: list[int]) -> NDArray[np.float32]:
        absent: NDArray[np.float32] = np.empty(0, np.float32)
        scales = self._reader.get_tensor(name) if name in self._stored else absent
        if list(scales.shape) != shape or scales.dtype != np.float32 or not (np.isfinite(scales) & (scales > 0)).all():
            found = f"{scales.dtype} {list(scales.shape)}" if scales.size else "not there"
            raise CheckpointError(
                f"{self._path}: {name} is {found}; expected float32 {shape}, all finite and above 0; {_REMEDY}"
            )
        return scales


@dataclass(frozen=True)
class _Slice:
    """Tensor of 8 bits, read as float32."""

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
    """Open a file of ours as a reader of float32 tensors, whether its weights have 8 bits or not.

    Raises CheckpointError.
    """
    with open_safetensors(path) as reader:
        is_integer = any(reader.get_slice(name).get_dtype() == "I8" for name in reader.keys())  # noqa: SIM118
        yield QuantizedReader(path, reader) if is_integer else reader
