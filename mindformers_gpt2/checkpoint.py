"""Between a MindSpore engine and the checkpoint folders of ``common.training.checkpoint``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from common.config.resolved import ResolvedModel
from common.errors import StorageError
from common.training.checkpoint_writer import Part, Snapshot
from common.training.snapshot import EngineState, make_snapshot, padded_rows, read_moments, read_states, read_weights, true_slice
from common.training.state import TrainState
from common.weights.pieces import TensorSlice, to_rectangle

if TYPE_CHECKING:
    from mindformers_gpt2.engine import Engine


def take_snapshot(engine: Engine, state: TrainState) -> Snapshot:
    """Copy weights, optimizer state and counters to the host: all, or this rank's part where ranks hold different ones."""
    names = [name for name in engine.master.tensors if engine.writes(name)]
    pieces = {name: true_slice(name, engine.pieces[name], engine.config.model) for name in names}
    names = [name for name in names if pieces[name].rows[0] < pieces[name].rows[1]]  # padding is not kept

    def cut(name: str, tensor: Parameter) -> Any:
        first, end = pieces[name].rows
        return _to_numpy(tensor)[: end - first]

    weights: dict[str, Any] = {name: cut(name, engine.master.tensors[name]) for name in names}
    steps = int(engine.optimizer.steps.asnumpy())
    moments = {f"{name}.{part}": cut(name, tensors[name]) for part, tensors in engine.optimizer.state.items() for name in names if steps}
    rank, rectangles = engine.world.rank, {name: to_rectangle(pieces[name]) for name in names}
    snapshot = make_snapshot(
        engine.config,
        state,
        weights=weights,
        moments=moments,
        engine=EngineState(
            optimizer_steps=steps, loss_scale=engine.loss_scale.read().state(), rng={"mindspore": engine.device.rng_state()}
        ),
        versions={"backend": "mindspore", "mindspore": ms.__version__},
        record=engine.record,
        part=Part(rank=rank, ranks=engine.world.size, rectangles=rectangles) if engine.is_sharded else None,
    )
    prefix = engine.config.checkpoint.ckpt_prefix
    if prefix is None:
        return snapshot
    epoch, step = _epoch_and_step(engine, state)
    tensors = weights | moments | {"epoch_num": np.int32(epoch), "step_num": np.int32(state.step)}
    return replace(snapshot, beside=partial(_write_ckpt, tensors, rank, prefix, f"{epoch}_{step}", engine.config.checkpoint.keep))


def _write_ckpt(tensors: Mapping[str, Any], rank: int, prefix: str, number: str, keep: int, folder: Path) -> None:
    """Write ``folder/rank_R/PREFIX_rank_R-EPOCH_STEP.ckpt``, whole or not at all, and keep the newest ``keep`` of this name (0: all)."""
    rank_folder, name = folder / f"rank_{rank}", f"{prefix}_rank_{rank}"
    target = rank_folder / f"{name}-{number}.ckpt"
    temporary = rank_folder / f".{name}-{number}.tmp.ckpt"
    leftover = rf"\.{re.escape(name)}-(\d+)_(\d+)\.tmp\.ckpt.*"  # MindSpore adds endings of its own
    try:
        rank_folder.mkdir(parents=True, exist_ok=True)
        _remove(_of_name(rank_folder, leftover))
        ms.save_checkpoint([{"name": key, "data": Tensor(value)} for key, value in tensors.items()], str(temporary))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except (OSError, RuntimeError) as error:  # MindSpore raises either on a full disk
        _remove(_of_name(rank_folder, leftover))
        reason = error.strerror if isinstance(error, OSError) else str(error).strip().splitlines()[0]
        raise StorageError(
            f"{target}: cannot be written: {reason}; the checkpoint beside it is whole, checkpoint.resume=auto goes on"
        ) from None
    numbers = _of_name(rank_folder, rf"{re.escape(name)}-(\d+)_(\d+)\.ckpt")
    others = sorted((path for path in numbers if path != target), key=lambda path: numbers[path])
    future = [path for path in others if numbers[path] > numbers[target]]  # of a run that was taken up before it
    _remove([*future, *(path for path in others if path not in future)][: max(0, len(numbers) - keep)] if keep else [])


def _of_name(folder: Path, pattern: str) -> dict[Path, tuple[int, int]]:
    """The files whose whole name matches, with the epoch and the step in it."""
    matches = ((path, re.fullmatch(pattern, path.name)) for path in folder.glob("*"))
    return {path: (int(match[1]), int(match[2])) for path, match in matches if match}


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _epoch_and_step(engine: Engine, state: TrainState) -> tuple[int, int]:
    """Epoch and step in it, both from 1, as MindSpore counts them."""
    batch = engine.config.train.global_batch_size
    steps = max(1, int(engine.record.get("samples_per_epoch", 0)) // batch)
    return (state.step - 1) // steps + 1, (state.step - 1) % steps + 1


def load_weights(
    tensors: Mapping[str, Parameter], model: ResolvedModel, checkpoint: Path, pieces: Mapping[str, TensorSlice] | None = None
) -> None:
    """Fill parameters by name from ``checkpoint``; ``pieces``: which part each of them is, if not whole. Raises CheckpointError unless
    every tensor is there with the model's shape."""
    for name, values in read_weights(checkpoint, model, pieces):
        _fill(tensors[name], values)


def restore(engine: Engine, checkpoint: Path) -> TrainState:
    """Put the engine where the checkpoint was taken and return where that is."""
    loss_scale = engine.loss_scale.read()
    state, saved = read_states(checkpoint, engine.config, loss_scale)
    engine.loss_scale.write(loss_scale)
    load_weights(engine.master.tensors, engine.config.model, checkpoint, engine.pieces)
    engine.world.meet()
    engine.master.write_back()
    steps = saved.optimizer_steps
    for name, part, values in read_moments(checkpoint, engine.config, saved.optimizer_steps, engine.pieces):
        _fill(engine.optimizer.state[part][name], values)
        steps = max(saved.optimizer_steps, 1)  # torch's sgd counts none, and has a momentum all the same
    ops.assign(engine.optimizer.steps, Tensor(steps, ms.int32))
    engine.step = state.step
    return state


def _fill(tensor: Parameter, values: Any) -> None:
    # set_data between compiled steps gives a silently wrong trajectory; assign does not
    ops.assign(tensor, ops.cast(Tensor(padded_rows(values, tensor.shape[0])), tensor.dtype))


def _to_numpy(tensor: Parameter) -> Any:
    return tensor.asnumpy().astype("float32", copy=True)
