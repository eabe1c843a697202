"""Integer weights with scales: which weights, and their tensors in a file.

``common.weights.quantized`` describes the file. The rounding is that of training (``scheme``), so a
model trained with rounded weights computes equal results with integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.schema import QuantizationConfig
from common.errors import CheckpointError, ConfigError
from common.log import LOG
from common.quantization.scheme import ActivationScales, Array, quantize, quantized_layers, scale_of, weight_levels
from common.tensor_files.arrays import TensorKind
from common.weights.names import POSITIONS, decays
from common.weights.quantized import WEIGHT_SCALE, LayerScheme, QuantizedWeight, Scheme, input_scale_name

_BITS = 8
_STORED = weight_levels(_BITS)
_ROWS = 4096
"""Rows quantized at once, so that a large table needs little memory."""


def usual_scheme(names: Iterable[str]) -> Scheme:
    """Return the scheme of weights that were trained in float.

    It covers the matrices and the table of tokens. Positions, biases and norms are a hundredth of
    the model and stay in float.
    """
    return {name: LayerScheme() for name in names if decays(name) and name != POSITIONS}


def trained_scheme(where: Path, config: QuantizationConfig, num_layers: int, scales: ActivationScales) -> Scheme:
    """Return the scheme of a checkpoint that was trained with ``config``, at ``where``.

    Inputs of one micro batch that shared a scale get one for each token. Raises ConfigError for
    settings that 8-bit integers cannot compute, and CheckpointError if there are no scales yet.
    """
    if config.activations == "none" or config.activation_bits != _BITS:
        raise ConfigError(
            f"{where}: was trained with quantization.activations={config.activations} and"
            f" activation_bits={config.activation_bits}; integers are multiplied by inputs of"
            f" {_BITS} bits: export float32, or train with those"
        )
    if config.activations == "abs_max":
        LOG.warning(
            f"{where}: was trained with one scale for the inputs of a micro batch; here each token"
            " has its own, so texts do not depend on others of the batch"
        )
    has_fixed = config.activations == "moving_average_abs_max"
    if has_fixed and not scales.is_known:
        raise CheckpointError(
            f"{where}: holds no scales of activations, which training with"
            " quantization.activations=moving_average_abs_max finds; train a step with it"
        )
    return {
        f"{layer}.weight": LayerScheme(
            per_channel=config.weights == "channel_wise_abs_max",
            bits=config.weight_bits,
            input_scale=float(scales.scale(layer)) if has_fixed else None,
        )
        for layer in quantized_layers(config, num_layers)
    }


def to_integers(name: str, weight: Array, scheme: LayerScheme) -> QuantizedWeight:
    """Quantize a weight. Raises CheckpointError for a number that is not finite."""
    largest = np.abs(weight).max(1)
    if not np.isfinite(largest).all():
        raise CheckpointError(
            f"{name}: holds numbers that are not finite, which 8 bits cannot represent; use a"
            " checkpoint from before the loss became infinite"
        )
    scales, levels = scheme.scales, _STORED
    if scales is None:
        if not scheme.per_channel:
            largest[:] = largest.max()
        levels = weight_levels(scheme.bits)
        scales = scale_of(largest, levels.high)
    integers = np.empty(weight.shape, np.int8)
    for first in range(0, len(weight), _ROWS):
        rows = slice(first, first + _ROWS)
        integers[rows] = quantize(weight[rows], scales[rows, None], levels)
    return QuantizedWeight(integers=integers, scales=scales, input_scale=scheme.input_scale)


def kinds_of_integers(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> dict[str, TensorKind]:
    """Return the tensors of a file for parameters of these shapes, in their order."""
    kinds = {}
    for name, shape in shapes.items():
        layer = scheme.get(name)
        kinds[name] = TensorKind(dtype="int8" if layer else "float32", shape=shape)
        if layer:
            kinds[name + WEIGHT_SCALE] = TensorKind(dtype="float32", shape=shape[:1])
        if layer and layer.input_scale is not None:
            kinds[input_scale_name(name)] = TensorKind(dtype="float32", shape=(1,))
    return kinds


def arrays_of_integers(values: Iterable[tuple[str, Array]], scheme: Scheme) -> Iterator[NDArray[Any]]:
    """Yield the arrays of ``kinds_of_integers`` for parameters in float32.

    Raises CheckpointError for a number that is not finite.
    """
    for name, array in values:
        if name not in scheme:
            yield array
            continue
        quantized = to_integers(name, array, scheme[name])
        yield quantized.integers
        yield quantized.scales
        if quantized.input_scale is not None:
            yield np.array([quantized.input_scale], np.float32)
