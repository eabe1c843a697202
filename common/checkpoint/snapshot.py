"""The position of a run, and the content of an engine's checkpoint, equal for both backends, so that
either opens the other's.

Files hold float32 and the true vocabulary. Rows that pad the embedding are cut off when saving, and
restored as zeros when loading. A folder may hold 8-bit integers, or be trained to become some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from common.checkpoint.manifest import MANIFEST
from common.checkpoint.writer import Part, Snapshot
from common.config.resolved import ResolvedModel
from common.config.schema import QuantizationConfig
from common.errors import CheckpointError
from common.parallel.run import Run
from common.quantization import trained_scheme
from common.tensor_files.safetensors_file import Tensors
from common.weights.names import EMBEDDING
from common.weights.pieces import Array, QuantizedReader, Scheme, TensorSlice, open_parameters


@dataclass
class TrainState:
    """State saved with every checkpoint. The next samples follow only from ``consumed_samples``."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    consumed_samples: int = 0
    """Position in the order of samples."""
    sample_hash: str = ""
    """Running hash of the samples read, equal under every layout and on both frameworks."""
    updated_samples: int = 0
    """Samples of the steps that were not skipped."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    """Losses of the last finite steps, oldest first, at most logging.outlier_window.

    Empty if outliers are not looked for.
    """
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norms of these steps."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Create a state. Other entries, of an older or newer version, are left out."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
SETTINGS_FILE = "model.yaml"
"""Settings with which an export generates."""


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """State of an engine without its tensors."""

    optimizer_steps: int
    """Number of updates made, which Adam's bias correction needs. Skipped steps do not count."""
    loss_scale: dict[str, Any]
    rng: dict[str, Any]
    """Generator states by backend. A run that changes the framework starts new dropout masks."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """Scales of activations, see ``common.quantization.ActivationScales``."""


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
        "engine": {name: value for name, value in vars(engine).items() if value or name != "quantization"},
        **extra,
        "config": config.model_dump(),
        "versions": {**versions, "numpy": np.__version__},
    }
    return Snapshot(files={MODEL_FILE: weights, OPTIMIZER_FILE: moments}, manifest=manifest, part=part)


def owned_pieces(
    pieces: Mapping[str, TensorSlice], owns: Callable[[str], bool], model: ResolvedModel
) -> dict[str, TensorSlice]:
    """Return the pieces of parameters that a rank writes, without the rows that pad the vocabulary."""
    owned = {name: piece for name, piece in pieces.items() if owns(name)}
    if (table := owned.get(EMBEDDING)) is not None:
        (first, end), *columns = table
        owned[EMBEDDING] = ((min(first, model.vocab_size), min(end, model.vocab_size)), *columns)
    return owned


def padded_rows(values: Array, rows: int) -> Array:
    """Add rows of zeros up to ``rows``."""
    if len(values) == rows:
        return values
    padded = np.zeros((rows, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded


def open_integers(folder: Path, manifest: Mapping[str, Any]) -> QuantizedReader | None:
    """Open the file of a folder with 8-bit weights; None if they are float."""
    reader = open_parameters(folder / MODEL_FILE) if MODEL_FILE in manifest.get("files", {}) else None
    return reader if isinstance(reader, QuantizedReader) else None


def scheme_of(folder: Path, manifest: Mapping[str, Any]) -> Scheme | None:
    """Return how the weights of a checkpoint are, or were trained to become, integers; None if
    unknown. Raises CheckpointError and ConfigError.
    """
    if (reader := open_integers(folder, manifest)) is not None:
        return reader.scheme
    config = manifest.get("config", {})
    if not config.get("quantization"):
        return None
    try:
        settings = QuantizationConfig.model_validate(config["quantization"])
        blocks = config["model"]["num_layers"]
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: broken manifest ({error!r}); use another checkpoint") from None
    return trained_scheme(folder, settings, blocks, manifest["engine"].get("quantization", {}))
