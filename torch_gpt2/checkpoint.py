"""Between a torch engine and the checkpoint folders of ``common.training.checkpoint``.

Files hold float32 and the true vocabulary: the rows that pad the embedding are cut off here and put back as zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from common.config.schema import ModelConfig
from common.errors import CheckpointError
from common.training.checkpoint import MANIFEST, Snapshot, read_manifest
from common.training.state import TrainState
from common.weights.files import check_tensors, open_safetensors, shapes_of
from common.weights.names import EMBEDDING, parameter_shapes
from torch_gpt2.optimizer import STATE_NAMES

if TYPE_CHECKING:
    from torch_gpt2.engine import Engine

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


def take_snapshot(engine: Engine, state: TrainState) -> Snapshot:
    """Copy weights, optimizer state, generators and counters to the host."""
    rows = engine.model.config.vocab_size
    weights = {name: _to_numpy(tensor, name, rows) for name, tensor in engine.master.tensors.items()}
    moments: dict[str, Any] = {}
    optimizer_steps = 0
    for name, tensor in engine.master.tensors.items():
        values = engine.optimizer.state.get(tensor, {})
        optimizer_steps = int(values.get("step", 0))
        for part in STATE_NAMES[engine.config.optimizer.name]:
            if values.get(part) is not None:
                moments[f"{name}.{part}"] = _to_numpy(values[part], name, rows)
    manifest = {
        "state": state.to_dict(),
        "engine": {
            "optimizer_steps": optimizer_steps,
            "loss_scale": engine.loss_scale.state(),
            "rng": {"torch": engine.device.rng_state()},
        },
        **engine.record,
        "config": engine.config.model_dump(),
        "versions": {"backend": "torch", "torch": torch.__version__, "numpy": np.__version__},
    }
    return Snapshot(files={MODEL_FILE: weights, OPTIMIZER_FILE: moments}, manifest=manifest)


def load_weights(tensors: Mapping[str, Tensor], model: ModelConfig, checkpoint: Path) -> None:
    """Fill parameters by name from ``checkpoint``. Raises CheckpointError unless every tensor is there with the model's shape."""
    path = checkpoint / MODEL_FILE
    with open_safetensors(path) as reader, torch.no_grad():
        check_tensors(path, shapes_of(reader), parameter_shapes(model))
        for name, tensor in tensors.items():
            _fill(tensor, reader.get_tensor(name))


def restore(engine: Engine, checkpoint: Path) -> TrainState:
    """Put the engine where the checkpoint was taken and return where that is."""
    manifest = read_manifest(checkpoint)
    try:
        saved, saved_engine = manifest["config"]["optimizer"]["name"], manifest["engine"]
        steps, scale, rng = saved_engine["optimizer_steps"], saved_engine["loss_scale"], saved_engine["rng"]
        state = TrainState.from_dict(manifest["state"])
        engine.loss_scale.load(scale)
        if "torch" in rng:  # a run that comes from the other framework begins new dropout masks
            engine.device.set_rng_state(rng["torch"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint / MANIFEST}: broken manifest ({error!r}); use another checkpoint") from None
    wanted = engine.config.optimizer.name
    if saved != wanted:
        raise CheckpointError(
            f"{checkpoint}: holds the state of optimizer.name={saved}, the config says {wanted};"
            " go on with the former, or start anew from these weights with checkpoint.init_from"
        )
    load_weights(engine.master.tensors, engine.config.model, checkpoint)
    engine.master.write_back()
    _restore_optimizer(engine, checkpoint / OPTIMIZER_FILE, steps)
    engine.step = state.step
    return state


def _restore_optimizer(engine: Engine, path: Path, steps: int) -> None:
    shapes = parameter_shapes(engine.model.config)
    parts = STATE_NAMES[engine.config.optimizer.name]
    with open_safetensors(path) as reader:
        found = shapes_of(reader)
        if found or steps:  # empty before the first step, and for sgd, which counts none, without momentum
            check_tensors(path, found, {f"{name}.{part}": shape for name, shape in shapes.items() for part in parts})
        for name, tensor in engine.master.tensors.items():
            state: dict[str, Any] = {}
            for part in parts if found else ():
                state[part] = torch.zeros_like(tensor, requires_grad=False)
                _fill(state[part], reader.get_tensor(f"{name}.{part}"))
            if state and engine.config.optimizer.name != "sgd":
                on = tensor.device if engine.device.fused_optimizer else "cpu"
                state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=on)
            if state:
                engine.optimizer.state[tensor] = state


def _to_numpy(tensor: Tensor, name: str, rows: int) -> Any:
    tensor = tensor.detach()[:rows] if name == EMBEDDING else tensor.detach()
    return tensor.to("cpu", torch.float32, copy=True).numpy()


def _fill(tensor: Tensor, values: Any) -> None:
    """Copy ``values`` into the first rows of ``tensor``; rows beyond them, which pad the vocabulary, become zero."""
    tensor[: len(values)].copy_(torch.from_numpy(values))
    tensor[len(values) :] = 0
