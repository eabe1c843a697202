"""Between a torch engine and the checkpoint folders of ``common.training.checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.config.resolved import ResolvedModel
from common.errors import CheckpointError
from common.training.checkpoint_writer import Part, Snapshot
from common.training.copy_on_write import CopyOnWriteArrays
from common.training.snapshot import (
    STATE_NAMES,
    EngineState,
    make_snapshot,
    padded_rows,
    read_moments,
    read_states,
    read_weights,
    true_slice,
)
from common.training.state import TrainState
from common.weights.pieces import TensorSlice, to_rectangle
from torch_gpt2.device import TorchDevice
from torch_gpt2.optimizer import local_shard

if TYPE_CHECKING:
    from torch_gpt2.engine import Engine
    from torch_gpt2.parallel.world import World


def take_snapshot(engine: Engine, state: TrainState, generators: list[dict[str, Any]]) -> Snapshot:
    """Weights and optimizer state, lent by a CPU and copied from other devices; counters, and the random generators of all ranks."""
    weights: dict[str, Any] = {}
    moments: dict[str, Any] = {}
    steps = 0
    for name, tensor in engine.master.tensors.items():
        values = engine.optimizer.state.get(tensor, {})
        steps = int(values.get("step", steps))
        if not engine.writes(name):
            continue
        weights[name] = _cut(engine, name, tensor)
        for part in STATE_NAMES[engine.config.optimizer.name]:
            if values.get(part) is not None:
                moments[f"{name}.{part}"] = _cut(engine, name, values[part])
    rectangles = {name: to_rectangle(true_slice(name, engine.pieces[name], engine.config.model)) for name in weights}
    several = Part(rank=engine.world.rank, ranks=engine.world.size, rectangles=rectangles) if engine.is_sharded else None
    return make_snapshot(
        engine.config,
        state,
        weights=CopyOnWriteArrays(weights),
        moments=CopyOnWriteArrays(moments),
        engine=EngineState(optimizer_steps=steps, loss_scale=engine.loss_scale.state(), rng={"torch": generators}),
        versions={"backend": "torch", "torch": torch.__version__},
        record=engine.record,
        part=several,
    )


def _cut(engine: Engine, name: str, tensor: Tensor) -> Any:
    """This rank's part of a tensor, without the rows that pad the vocabulary."""
    piece = true_slice(name, engine.pieces[name], engine.config.model)
    return _to_numpy(local_shard(tensor.detach()))[: piece.rows[1] - piece.rows[0]]


@torch.no_grad()
def load_weights(
    tensors: Mapping[str, Tensor], model: ResolvedModel, checkpoint: Path, pieces: Mapping[str, TensorSlice] | None = None
) -> None:
    """Fill parameters by name from ``checkpoint``; ``pieces``: which part each of them is, if not whole. Raises CheckpointError unless
    every tensor is there with the model's shape."""
    for name, values in read_weights(checkpoint, model, pieces):
        tensor = local_shard(tensors[name])
        tensor.copy_(torch.from_numpy(padded_rows(values, len(tensor))))


def restore(engine: Engine, checkpoint: Path) -> TrainState:
    """Put the engine where the checkpoint was taken and return where that is."""
    state, saved = read_states(checkpoint, engine.config, engine.loss_scale)
    load_weights(engine.master.tensors, engine.config.model, checkpoint, engine.pieces)
    engine.master.write_back()
    for name, part, values in read_moments(checkpoint, engine.config, saved.optimizer_steps, engine.pieces):
        tensor = engine.master.tensors[name]
        moments = engine.optimizer.state[tensor]
        moments[part] = torch.zeros_like(tensor)
        local_shard(moments[part]).copy_(torch.from_numpy(values))
        if engine.config.optimizer.name != "sgd":
            on = tensor.device if engine.device.fused_optimizer else "cpu"
            moments["step"] = torch.tensor(float(saved.optimizer_steps), dtype=torch.float32, device=on)
    restore_generators(engine.device, engine.world, saved, checkpoint)
    engine.step = state.step
    return state


def restore_generators(device: TorchDevice, world: World, saved: EngineState, checkpoint: Path) -> None:
    """Go on with the saved dropout masks, where the number of ranks is the same. Raises CheckpointError for what is no state."""
    try:
        generators = saved.rng.get("torch", [])
        if len(generators) == world.size:  # other ranks would draw other masks whatever is done
            device.set_rng_state(generators[world.rank])
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint}: the state of the random generators is broken ({error}); use another checkpoint") from None


def _to_numpy(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float32).numpy()
