"""Content of an engine's checkpoint, equal for both backends, so that either opens the other's.

Files hold float32 and the true vocabulary. Rows that pad the embedding are cut off when saving, and
restored as zeros when loading.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.checkpoint.state import TrainState
from common.checkpoint.writer import Part, Snapshot
from common.config.resolved import ResolvedModel
from common.parallel.run import Run
from common.tensor_files.safetensors_file import Tensors
from common.weights.names import EMBEDDING
from common.weights.pieces import TensorSlice

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
SETTINGS_FILE = "model.yaml"
"""Settings with which an export generates."""

Array = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """State of an engine without its tensors."""

    optimizer_steps: int
    """Number of updates made, which Adam's bias correction needs. Skipped steps do not count."""
    loss_scale: dict[str, Any]
    rng: dict[str, Any]
    """Generator states by backend. A run that changes the framework starts new dropout masks."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """Scales of activations, see ``common.quantization.scheme.ActivationScales``."""


def make_snapshot(
    config: Run,
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

    Both are on the host, cut to the true vocabulary, and copied or lent. extra: further entries of
    the manifest. part: the rectangles of these tensors, if several ranks write.
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
    return Snapshot(files={MODEL_FILE: weights, OPTIMIZER_FILE: moments}, manifest=manifest, part=part)


def true_slice(name: str, piece: TensorSlice, model: ResolvedModel) -> TensorSlice:
    """Cut off the rows that pad the vocabulary, in a slice of a parameter."""
    return (
        replace(piece, rows=(min(piece.rows[0], model.vocab_size), min(piece.rows[1], model.vocab_size)))
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
