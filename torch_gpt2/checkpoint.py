"""Between a torch engine and the checkpoint folders of ``common.training.checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.config.schema import ModelConfig
from common.errors import CheckpointError
from common.training.checkpoint import Snapshot
from common.training.lent import LentArrays
from common.training.snapshot import (
    STATE_NAMES,
    EngineState,
    make_snapshot,
    padded_rows,
    read_moments,
    read_states,
    read_weights,
    true_rows,
)
from common.training.state import TrainState

if TYPE_CHECKING:
    from torch_gpt2.engine import Engine


def take_snapshot(engine: Engine, state: TrainState, generators: list[dict[str, Any]]) -> Snapshot:
    """Weights and optimizer state, lent by a CPU and copied from other devices; counters, and the random generators of all ranks."""
    model = engine.config.model
    weights = {name: true_rows(name, _to_numpy(tensor), model) for name, tensor in engine.master.tensors.items()}
    moments: dict[str, Any] = {}
    steps = 0
    for name, tensor in engine.master.tensors.items():
        values = engine.optimizer.state.get(tensor, {})
        steps = int(values.get("step", 0))
        for part in STATE_NAMES[engine.config.optimizer.name]:
            if values.get(part) is not None:
                moments[f"{name}.{part}"] = true_rows(name, _to_numpy(values[part]), model)
    return make_snapshot(
        engine.config,
        state,
        weights=LentArrays(weights),
        moments=LentArrays(moments),
        engine=EngineState(optimizer_steps=steps, loss_scale=engine.loss_scale.state(), rng={"torch": generators}),
        versions={"backend": "torch", "torch": torch.__version__},
        record=engine.record,
    )


@torch.no_grad()
def load_weights(tensors: Mapping[str, Tensor], model: ModelConfig, checkpoint: Path) -> None:
    """Fill parameters by name from ``checkpoint``. Raises CheckpointError unless every tensor is there with the model's shape."""
    for name, values in read_weights(checkpoint, model):
        tensors[name].copy_(torch.from_numpy(padded_rows(values, len(tensors[name]))))


def restore(engine: Engine, checkpoint: Path) -> TrainState:
    """Put the engine where the checkpoint was taken and return where that is."""
    state, saved = read_states(checkpoint, engine.config, engine.loss_scale)
    load_weights(engine.master.tensors, engine.config.model, checkpoint)
    engine.master.write_back()
    for name, part, values in read_moments(checkpoint, engine.config, saved.optimizer_steps):
        tensor = engine.master.tensors[name]
        moments = engine.optimizer.state[tensor]
        moments[part] = torch.from_numpy(padded_rows(values, len(tensor))).to(tensor.device)
        if engine.config.optimizer.name != "sgd":
            on = tensor.device if engine.device.fused_optimizer else "cpu"
            moments["step"] = torch.tensor(float(saved.optimizer_steps), dtype=torch.float32, device=on)
    try:
        generators = saved.rng.get("torch", [])
        if len(generators) == engine.world.size:  # other ranks would draw other masks whatever is done
            engine.device.set_rng_state(generators[engine.world.rank])
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint}: the state of the random generators is broken ({error}); use another checkpoint") from None
    engine.step = state.step
    return state


def _to_numpy(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float32).numpy()
