"""What an engine puts into a checkpoint, the same for both backends, so that either opens the
other's.

Files hold float32 and the true vocabulary. Rows that pad the embedding are cut off before, and put
back as zeros after.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.parallel.resolved_run import ResolvedRun
from common.tensor_files.safetensors_file import Tensors
from common.training.checkpoint_writer import Part, Snapshot
from common.training.state import TrainState
from common.weights.names import EMBEDDING
from common.weights.pieces import TensorSlice

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_NAMES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}

Array = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """An engine's state apart from its tensors."""

    optimizer_steps: int
    """Updates made: Adam's bias correction counts them, skipped steps not."""
    loss_scale: dict[str, Any]
    rng: dict[str, Any]
    """Generator states by backend; a run from the other framework begins new dropout masks."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """Scales of activations, see ``common.quantization.scheme.ActivationScales``."""


def make_snapshot(
    config: ResolvedRun,
    state: TrainState,
    *,
    weights: Tensors,
    moments: Tensors,
    engine: EngineState,
    versions: dict[str, str],
    extra: dict[str, Any],
    part: Part | None = None,
) -> Snapshot:
    """Return a snapshot of weights by name and moments by NAME.exp_avg and so on.

    Both are on the host, cut to the true vocabulary, copied or lent. extra: more of the manifest.
    part: which rectangles of the tensors these are, where several ranks write.
    """
    manifest = {
        "state": state.to_dict(),
        "engine": {
            "optimizer_steps": engine.optimizer_steps,
            "loss_scale": engine.loss_scale,
            "rng": engine.rng,
            **({"quantization": engine.quantization} if engine.quantization else {}),
        },
        **extra,
        "config": config.model_dump(),
        "versions": {**versions, "numpy": np.__version__},
    }
    return Snapshot(
        files={MODEL_FILE: weights, OPTIMIZER_FILE: moments}, manifest=manifest, part=part
    )


def true_rows(name: str, values: Array, model: ResolvedModel) -> Array:
    """Cut off the rows that pad the vocabulary."""
    return values[: model.vocab_size] if name == EMBEDDING else values


def true_slice(name: str, piece: TensorSlice, model: ResolvedModel) -> TensorSlice:
    """Cut them off a part of a parameter."""
    return (
        replace(
            piece, rows=(min(piece.rows[0], model.vocab_size), min(piece.rows[1], model.vocab_size))
        )
        if name == EMBEDDING
        else piece
    )


def padded_rows(values: Array, rows: int) -> Array:
    """Add rows of zeros up to ``rows``."""
    if len(values) == rows:
        return values
    padded = np.zeros((rows, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded
