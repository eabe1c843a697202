"""What an engine puts into a checkpoint and takes out of it, the same for both backends, so that either opens the other's.

Files hold float32 and the true vocabulary; rows that pad the embedding are cut off before and put back as zeros after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.schema import ModelConfig, RunConfig
from common.errors import CheckpointError
from common.parallel.sharding import slice_of
from common.tensor_files.safetensors_file import Tensors
from common.training.checkpoint_writer import Part, Snapshot
from common.training.loss_scale import LossScale
from common.training.manifest import MANIFEST, read_manifest
from common.training.state import TrainState
from common.weights.names import EMBEDDING, parameter_shapes
from common.weights.pieces import TensorSlice, open_stored

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_NAMES = {"adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}

Array = NDArray[np.float32]
Pieces = Mapping[str, TensorSlice]


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """An engine's state apart from its tensors."""

    optimizer_steps: int
    """Updates made: Adam's bias correction counts them, skipped steps not."""
    loss_scale: dict[str, Any]
    rng: dict[str, Any]
    """Generator states by backend; a run that comes from the other framework begins new dropout masks."""


def make_snapshot(
    config: RunConfig,
    state: TrainState,
    *,
    weights: Tensors,
    moments: Tensors,
    engine: EngineState,
    versions: dict[str, str],
    record: dict[str, Any],
    part: Part | None = None,
) -> Snapshot:
    """Weights by name; moments by NAME.exp_avg and so on; both on the host, cut to the true vocabulary, copied or lent.

    part: which rectangles of them these are, where several ranks write.
    """
    manifest = {
        "state": state.to_dict(),
        "engine": {"optimizer_steps": engine.optimizer_steps, "loss_scale": engine.loss_scale, "rng": engine.rng},
        **record,
        "config": config.model_dump(),
        "versions": {**versions, "numpy": np.__version__},
    }
    return Snapshot(files={MODEL_FILE: weights, OPTIMIZER_FILE: moments}, manifest=manifest, part=part)


def read_states(checkpoint: Path, config: RunConfig, loss_scale: LossScale) -> tuple[TrainState, EngineState]:
    """The run's and the engine's state; ``loss_scale`` takes over its part. Raises CheckpointError for another optimizer."""
    manifest = read_manifest(checkpoint, checksums=False)  # whoever chose this checkpoint has compared them
    try:
        saved = manifest["config"]["optimizer"]["name"]
        state, engine = TrainState.from_dict(manifest["state"]), EngineState(**manifest["engine"])
        loss_scale.load(engine.loss_scale)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / MANIFEST}: broken manifest ({error!r}); use another checkpoint") from None
    state.skipped_in_a_row = 0  # whoever starts again, perhaps with a lower rate, gets all of train.max_skipped_steps
    if saved != config.optimizer.name:
        raise CheckpointError(
            f"{checkpoint}: holds the state of optimizer.name={saved}, the config says {config.optimizer.name};"
            " go on with the former, or start anew from these weights with checkpoint.init_from"
        )
    return state, engine


def read_weights(checkpoint: Path, model: ModelConfig, pieces: Pieces | None = None) -> Iterator[tuple[str, Array]]:
    """Names and values of all weights, or of the ``pieces`` asked for, one at a time. Raises CheckpointError unless every tensor is there
    with the model's shape."""
    shapes = parameter_shapes(model)
    with open_stored(checkpoint, MODEL_FILE, read_manifest(checkpoint, checksums=False)) as stored:
        stored.require(shapes)
        for name, piece in (pieces or _whole(shapes)).items():
            yield name, stored.read(name, piece)


def read_moments(
    checkpoint: Path, config: RunConfig, optimizer_steps: int, pieces: Pieces | None = None
) -> Iterator[tuple[str, str, Array]]:
    """Parameter names, parts of the optimizer's state and values; nothing before the first step and for sgd without momentum.

    sgd may also begin or end to use momentum: an empty file is then no fault, and a full one is left unread.
    """
    shapes = parameter_shapes(config.model)
    parts = STATE_NAMES[config.optimizer.name]
    is_sgd = config.optimizer.name == "sgd"
    if is_sgd and not config.optimizer.momentum:
        return
    manifest = read_manifest(checkpoint, checksums=False)
    if optimizer_steps and manifest["files"].keys() == {MODEL_FILE}:
        raise CheckpointError(
            f"{checkpoint}: an export, without the state of the optimizer; resume what it was made of, or start anew from its weights with"
            f" checkpoint.init_from={checkpoint}"
        )
    with open_stored(checkpoint, OPTIMIZER_FILE, manifest) as stored:
        if not stored and (is_sgd or not optimizer_steps):
            return
        stored.require({f"{name}.{part}": shape for name, shape in shapes.items() for part in parts})
        for name, piece in (pieces or _whole(shapes)).items():
            for part in parts:
                yield name, part, stored.read(f"{name}.{part}", piece)


def _whole(shapes: Mapping[str, tuple[int, ...]]) -> Pieces:
    return {name: slice_of(name, shape) for name, shape in shapes.items()}


def true_rows(name: str, values: Array, model: ModelConfig) -> Array:
    """Without the rows that pad the vocabulary."""
    return values[: model.vocab_size] if name == EMBEDDING else values


def true_slice(name: str, piece: TensorSlice, model: ModelConfig) -> TensorSlice:
    """The same for a part of it."""
    return replace(piece, rows=(min(piece.rows[0], model.vocab_size), min(piece.rows[1], model.vocab_size))) if name == EMBEDDING else piece


def padded_rows(values: Array, rows: int) -> Array:
    """``values`` with rows of zeros added up to ``rows``."""
    if len(values) == rows:
        return values
    padded = np.zeros((rows, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded
