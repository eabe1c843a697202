"""Between a MindSpore engine and the checkpoint folders of ``common.training.checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from common.config.schema import ModelConfig
from common.training.checkpoint import Snapshot
from common.training.snapshot import EngineState, make_snapshot, padded_rows, read_moments, read_states, read_weights, true_rows
from common.training.state import TrainState

if TYPE_CHECKING:
    from mindformers_gpt2.engine import Engine


def take_snapshot(engine: Engine, state: TrainState) -> Snapshot:
    """Copy weights, optimizer state, generators and counters to the host."""
    model = engine.config.model
    weights = {name: true_rows(name, _to_numpy(tensor), model) for name, tensor in engine.tensors.items()}
    moments = {
        f"{name}.{part}": true_rows(name, _to_numpy(tensor), model)
        for part, tensors in engine.optimizer.state.items()
        for name, tensor in tensors.items()
        if engine.optimizer.steps
    }
    return make_snapshot(
        engine.config,
        state,
        weights=weights,
        moments=moments,
        engine=EngineState(
            optimizer_steps=engine.optimizer.steps, loss_scale=engine.loss_scale.state(), rng={"mindspore": engine.device.rng_state()}
        ),
        versions={"backend": "mindspore", "mindspore": ms.__version__},
        record=engine.record,
    )


def load_weights(tensors: Mapping[str, Parameter], model: ModelConfig, checkpoint: Path) -> None:
    """Fill parameters by name from ``checkpoint``. Raises CheckpointError unless every tensor is there with the model's shape."""
    for name, values in read_weights(checkpoint, model):
        _fill(tensors[name], values)


def restore(engine: Engine, checkpoint: Path) -> TrainState:
    """Put the engine where the checkpoint was taken and return where that is."""
    state, saved = read_states(checkpoint, engine.config, engine.loss_scale)
    load_weights(engine.tensors, engine.config.model, checkpoint)
    engine.optimizer.steps = saved.optimizer_steps
    for name, part, values in read_moments(checkpoint, engine.config, saved.optimizer_steps):
        _fill(engine.optimizer.state[part][name], values)
        engine.optimizer.steps = max(saved.optimizer_steps, 1)  # torch's sgd counts none, and has a momentum all the same
    engine.step = state.step
    return state


def _fill(tensor: Parameter, values: Any) -> None:
    # set_data between compiled steps gives a silently wrong trajectory; assign does not
    ops.assign(tensor, Tensor(padded_rows(values, tensor.shape[0])))


def _to_numpy(tensor: Parameter) -> Any:
    return tensor.asnumpy().astype("float32", copy=True)
