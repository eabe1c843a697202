"""Conversion by name between MindSpore's tensors and arrays: of checkpoint folders, and of the record of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from common.checkpoint.snapshot import padded_rows
from common.errors import ConfigError
from common.parallel.run import Run
from common.training.opened_checkpoint import Checkpoint
from common.training.recording import LAST_NORM, VARIABLE, RecorderBase
from common.weights.pieces import Array, TensorSlice, shape_of
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.model import GPT2, LayerNorm, build_model
from mindformers_gpt2.optimizer import Optimizer

Pieces = Mapping[str, TensorSlice]


def weights_on_host(tensors: Mapping[str, Parameter], pieces: Pieces) -> dict[str, Array]:
    """Return copies of ``pieces`` of parameters."""
    return {name: _cut(tensors[name], piece) for name, piece in pieces.items()}


def moments_on_host(optimizer: Optimizer, pieces: Pieces) -> dict[str, Array]:
    """Return copies of ``pieces`` of the optimizer's state by NAME.PART."""
    return {
        f"{name}.{part}": _cut(tensors[name], piece)
        for part, tensors in optimizer.state.items()
        for name, piece in pieces.items()
    }


def load_model(config: Run, device: MindSporeDevice, checkpoint: Checkpoint) -> GPT2:
    """Return the model with the weights of a checkpoint. Raises CheckpointError."""
    model = build_model(config, device)
    parameters = {parameter.name: parameter for parameter in model.get_parameters()}
    fill_weights(parameters, checkpoint.weights(config.model))
    return model


def fill_weights(tensors: Mapping[str, Parameter], values: Iterable[tuple[str, Array]]) -> None:
    """Fill this rank's part of parameters by name."""
    for name, array in values:
        _fill(tensors[name], array)


def fill_moments(optimizer: Optimizer, values: Iterable[tuple[str, str, Array]]) -> bool:
    """Fill the optimizer's state except its count of steps. Returns whether there is any."""
    found = False
    for name, part, array in values:
        _fill(optimizer.state[part][name], array)
        found = True
    return found


def _cut(tensor: Parameter, piece: TensorSlice) -> Array:
    """Return this rank's part of a tensor, without the rows that pad the vocabulary."""
    values: Array = tensor.asnumpy().astype("float32", copy=True)
    return values[: shape_of(piece)[0]]


def _fill(tensor: Parameter, values: Array) -> None:
    # set_data between compiled steps gives a silently wrong trajectory; assign does not
    ops.assign(tensor, ops.cast(Tensor(padded_rows(values, tensor.shape[0])), tensor.dtype))


class Recorder(RecorderBase):
    """Record of a step for tools/compare_runs.py --layers, by hooks on the Cells. Outside of the step the
    model is as it was. Hooks run in PyNative mode, where Python computes every layer.
    """

    pieces_on_host = staticmethod(weights_on_host)

    def __init__(self, *given: Any, **request: Any) -> None:
        """Raises ConfigError outside of PyNative mode."""
        if ms.get_context("mode") != ms.PYNATIVE_MODE:
            raise ConfigError(
                f"{VARIABLE}: a step can be recorded with context.mode=pynative, where Python"
                " computes every layer; set it"
            )
        super().__init__(*given, **request)

    def layers(self, part: GPT2) -> Iterator[tuple[str, nn.Cell]]:
        for block in part.h:  # parameters keep the number of the layer in the whole model
            yield block.ln_1.weight.name.removesuffix(".ln_1.weight"), block
        if isinstance(part.ln_f, LayerNorm):
            yield LAST_NORM, part.ln_f

    @staticmethod
    def on_host(values: Tensor) -> Array:
        found: Array = values.astype(ms.float32).asnumpy()
        return found
