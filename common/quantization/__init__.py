"""Integers of few bits instead of floats: which tensors, which scales, which rounding.

Both backends, the conversion to integers and the exports follow it.
A number x becomes round(x / scale) within the levels of its bits, with halves rounded to even. Fake
quantization multiplies that by the scale again, so that training sees the error (Jacob et al.
2018). The gradient passes unchanged where nothing was clipped, and is 0 elsewhere.

The quotient is computed as x * (1 / scale) in float32, as torch's own kernels do. All
implementations thus round the same numbers the same way, and a model trained with rounded weights
computes equal results with integers. ``common.weights.pieces`` describes the file of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.config.schema import QuantizationConfig, RunConfig
from common.errors import CheckpointError, ConfigError
from common.log import LOG
from common.tensor_files.arrays import TensorKind
from common.weights.names import EMBEDDING, POSITIONS, decays
from common.weights.pieces import WEIGHT_SCALE, Array, LayerScheme, Scheme, input_scale_name

LINEARS = (
    "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.c_proj", "mlp.c_fc", "mlp.c_proj",
)  # fmt: skip
"""Linear layers of a block. The embedding, which is also the head, stays in float."""
CALIBRATION_BATCHES = 8
"""Batches on which an evaluation measures unknown scales."""
_EMBEDDINGS = frozenset({EMBEDDING, "wpe.weight"})


class Levels(NamedTuple):
    low: int
    high: int


def weight_levels(bits: int) -> Levels:
    """Return -127 to 127 for 8 bits: symmetric, so that a product of two fits its sum."""
    return Levels(-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1)


def activation_levels(bits: int) -> Levels:
    """Return -128 to 127 for 8 bits, to which ONNX's QuantizeLinear saturates."""
    return Levels(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def quantized_layers(config: QuantizationConfig | None, num_layers: int) -> tuple[str, ...]:
    """Return names such as ``h.0.attn.q_proj`` in the order of the forward pass.

    Raises ConfigError if quantization.skip has an unknown name or leaves no layer.
    """
    if config is None:
        return ()
    names = [f"h.{block}.{linear}" for block in range(num_layers) for linear in LINEARS]
    for entry in config.skip:
        if not any(_covers(entry, name) for name in names):
            raise ConfigError(
                f"quantization.skip: {entry!r} names no layer of a model with {num_layers} blocks; expected a block"
                f" (h.0), a layer (h.0.{LINEARS[-1]}), or a layer of all blocks ({', '.join(LINEARS)})"
            )
    left = tuple(name for name in names if not any(_covers(entry, name) for entry in config.skip))
    if not left:
        raise ConfigError("quantization.skip leaves no layer; remove the section")
    return left


def frozen_parameters(config: RunConfig) -> frozenset[str]:
    """Return the parameters that keep their values: zero gradients, and no decay."""
    is_frozen = config.quantization is not None and config.quantization.freeze_embedding
    return _EMBEDDINGS if is_frozen else frozenset()


def _covers(entry: str, name: str) -> bool:
    in_block = name.split(".", 2)[2]
    return f"{name}.".startswith(f"{entry}.") or f"{in_block}.".startswith(f"{entry}.")


def scale_of(maximum: Array, high: int) -> Array:
    """Return maximum / high in float32; 1 if the maximum is 0."""
    scale: Array = np.asarray(maximum, np.float32) / np.float32(high)
    return np.where(scale == 0, np.float32(1), scale)


def quantize(x: Array, scale: Array, levels: Levels) -> NDArray[np.int8]:
    """Return the integers of x."""
    inverse = np.float32(1) / np.asarray(scale, np.float32)
    steps = np.rint(np.asarray(x, np.float32) * inverse)
    return np.clip(steps, *levels).astype(np.int8)


class ActivationScales:
    """Moving averages of the largest absolute input of each layer.

    A step with the maximum m of the global batch updates them with rate r, as in Paddle's
    moving_average_abs_max: accumulated = r * accumulated + m, weight = r * weight + 1. The average
    is accumulated / weight. A step is quantized by the average of the steps before it. A scale
    therefore does not depend on the micro batches and ranks over which a batch is split.
    """

    def __init__(self, layers: Sequence[str], config: QuantizationConfig) -> None:
        self.layers = tuple(layers)
        self._config = config
        self._weight = 0.0
        self._accumulated = dict.fromkeys(self.layers, 0.0)

    @property
    def is_known(self) -> bool:
        """Tell whether there is a maximum yet."""
        return self._weight > 0

    def update(self, maxima: Sequence[float]) -> None:
        """Update the averages with the maxima of a step, in the order of the layers."""
        rate = self._config.moving_rate
        self._weight = rate * self._weight + 1
        for name, maximum in zip(self.layers, maxima, strict=True):
            self._accumulated[name] = rate * self._accumulated[name] + float(maximum)

    def scale(self, layer: str) -> np.float32:
        """Return the scale of the inputs of a layer; 0 if not known yet."""
        if not self.is_known:
            return np.float32(0)
        maximum = np.array(self._accumulated[layer] / self._weight, np.float32)
        high = activation_levels(self._config.activation_bits).high
        return np.float32(scale_of(maximum, high))

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint's manifest."""
        if not self.is_known:
            return {}
        return {"weight": self._weight, "accumulated": dict(self._accumulated)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint.

        An empty state, and one that lacks a layer, is ignored; the scales are then measured again.
        """
        if state and set(self.layers) <= state["accumulated"].keys():
            self._weight = float(state["weight"])
            self._accumulated = {name: float(state["accumulated"][name]) for name in self.layers}


_BITS = 8
_STORED = weight_levels(_BITS)
_ROWS = 4096
"""Rows quantized at once, so that a large table needs little memory."""


def trained_scheme(where: Path, config: QuantizationConfig, num_layers: int, state: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a checkpoint that was trained with ``config``, at ``where``. state: of ``ActivationScales``.

    Inputs of one micro batch that shared a scale get one for each token. Raises ConfigError for
    settings that 8-bit integers cannot compute, and CheckpointError if there are no scales yet.
    """
    scales = ActivationScales(quantized_layers(config, num_layers), config)
    scales.load(state)
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
        for layer in scales.layers
    }


def to_integers(name: str, weight: Array, scheme: LayerScheme) -> tuple[NDArray[np.int8], Array]:
    """Quantize a weight into integers (out, in) and scales (out,).

    Raises CheckpointError for a number that is not finite.
    """
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
    return integers, scales


def in_integers(
    shapes: Mapping[str, tuple[int, ...]], values: Iterable[tuple[str, Array]], scheme: Scheme | None
) -> tuple[dict[str, TensorKind], Iterator[NDArray[Any]]]:
    """Return the tensors of a file for parameters in float32, and their arrays in the same order.

    scheme: None for weights that were trained in float. Their matrices and table of tokens become integers. Positions,
    biases and norms are a hundredth of the model and stay in float. Reading the arrays raises CheckpointError for a
    number that is not finite.
    """
    scheme = scheme or {name: LayerScheme() for name in shapes if decays(name) and name != POSITIONS}
    kinds = {}
    for name, shape in shapes.items():
        layer = scheme.get(name)
        kinds[name] = TensorKind(dtype="int8" if layer else "float32", shape=shape)
        if layer:
            kinds[name + WEIGHT_SCALE] = TensorKind(dtype="float32", shape=shape[:1])
        if layer and layer.input_scale is not None:
            kinds[input_scale_name(name)] = TensorKind(dtype="float32", shape=(1,))

    def arrays() -> Iterator[NDArray[Any]]:
        for name, array in values:
            layer = scheme.get(name)
            yield from to_integers(name, array, layer) if layer else [array]
            if layer and layer.input_scale is not None:
                yield np.array([layer.input_scale], np.float32)

    return kinds, arrays()
