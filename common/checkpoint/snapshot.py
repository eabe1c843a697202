"""The position of a run, and the content of an engine's checkpoint, equal for both backends, so that
either opens the other's.

Files hold float32 and the true vocabulary. Rows that pad the embedding are cut off when saving, and
restored as zeros when loading. A folder may hold 8-bit integers, or be trained to become some.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from common.checkpoint.manifest import MANIFEST
from common.checkpoint.writer import Part, Snapshot
from common.config.resolved import ResolvedModel
from common.config.schema import QuantizationConfig
from common.errors import CheckpointError, GPT2Error
from common.parallel.run import Run
from common.quantization import ActivationScales, quantized_layers, trained_scheme
from common.tensor_files.safetensors_file import Tensors
from common.weights.names import EMBEDDING
from common.weights.pieces import QuantizedReader, Scheme, TensorSlice, open_parameters

_COUNTS = {*("step", "consumed_samples", "sample_hash", "updated_samples"), *("skipped_steps", "skipped_in_a_row")}
"""What every state says."""


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
        """Create a state. Raises KeyError, TypeError or ValueError for an invalid one."""
        if missing := sorted(_COUNTS - values.keys()):
            raise KeyError(missing[0])
        names = {field.name for field in fields(cls)}
        state = cls(**{name: value for name, value in values.items() if name in names})
        if not 0 <= state.skipped_in_a_row <= state.skipped_steps <= state.step:
            raise ValueError(
                f"skipped_in_a_row={state.skipped_in_a_row}, skipped_steps={state.skipped_steps}"
                f" and step={state.step} contradict"
            )
        if len(state.losses) != len(state.grad_norms):
            raise ValueError(f"{len(state.losses)} losses and {len(state.grad_norms)} gradient norms")
        return state


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


def holds_integers(folder: Path) -> bool:
    """Tell whether the weights of a folder of ours have 8 bits.

    The file decides; the manifest is not read. A damaged file is reported by the reader.
    """
    file = folder / MODEL_FILE
    with suppress(GPT2Error, OSError):
        if file.is_file():
            with open_parameters(file) as reader:
                return isinstance(reader, QuantizedReader)
    return False


@contextmanager
def open_integers(folder: Path, manifest: Mapping[str, Any]) -> Iterator[QuantizedReader | None]:
    """Open the file of a folder with 8-bit weights; None if they are float."""
    if MODEL_FILE not in manifest["files"]:
        yield None
        return
    with open_parameters(folder / MODEL_FILE) as reader:
        yield reader if isinstance(reader, QuantizedReader) else None


def load_scales(folder: Path, manifest: Mapping[str, Any], scales: ActivationScales) -> None:
    """Load the scales of activations of a checkpoint, if any. Raises CheckpointError for broken ones."""
    try:
        scales.load(manifest.get("engine", {}).get("quantization", {}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST}: broken scales of activations ({error}); use another checkpoint"
        ) from None


def scheme_of(folder: Path, manifest: Mapping[str, Any]) -> Scheme | None:
    """Return how the weights of a checkpoint are, or were trained to become, integers; None if
    unknown. Raises CheckpointError and ConfigError.
    """
    with open_integers(folder, manifest) as reader:
        if reader is not None:
            return reader.scheme
    config = manifest.get("config", {})
    if not config.get("quantization"):
        return None
    try:
        settings = QuantizationConfig.model_validate(config["quantization"])
        blocks = config["model"]["num_layers"]
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: broken manifest ({error!r}); use another checkpoint") from None
    scales = ActivationScales(quantized_layers(settings, blocks), settings)
    load_scales(folder, manifest, scales)
    return trained_scheme(folder, settings, blocks, scales)
