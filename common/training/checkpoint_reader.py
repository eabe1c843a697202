"""Reader of a checkpoint for an engine, whichever backend and layout wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.checkpoint.integers import load_scales, open_integers, scheme_of
from common.checkpoint.manifest import MANIFEST, read_manifest
from common.checkpoint.snapshot import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    EngineState,
)
from common.checkpoint.state import TrainState
from common.config.resolved import ResolvedModel
from common.errors import CheckpointError
from common.parallel.resolved_run import ResolvedRun
from common.parallel.sharding import slice_of
from common.quantization.scheme import ActivationScales
from common.systems.direct import StoredTensors, is_foreign, manifest_of, open_foreign
from common.tensor_files.safetensors_file import shapes_of
from common.training.loss_scale import LossScale
from common.weights.names import check_tensors, parameter_shapes
from common.weights.pieces import TensorSlice, open_stored
from common.weights.quantized import (
    QuantizedWeight,
    Scheme,
)

Array = NDArray[np.float32]
Pieces = Mapping[str, TensorSlice]


class CheckpointReader:
    """A checkpoint, or foreign weights, whose tensors are read one at a time.

    Checksums are compared where the checkpoint is chosen. Every method raises CheckpointError if
    the checkpoint lacks the requested data.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = None if is_foreign(folder) else read_manifest(folder, checksums=False)

    @contextmanager
    def _open(self, model: ResolvedModel, file: str) -> Iterator[StoredTensors]:
        if self._own is not None:
            with open_stored(self.folder, file, self._own) as stored:
                yield stored
        else:
            with open_foreign(self.folder, model) as found:
                yield found.files[file]

    def states(self, config: ResolvedRun, loss_scale: LossScale) -> tuple[TrainState, EngineState]:
        """Return the run's and the engine's state, and load ``loss_scale``.

        Raises CheckpointError for another optimizer than the config's.
        """
        try:
            manifest = self._own or manifest_of(self.folder, config.model)
            saved = manifest["config"]["optimizer"]["name"]
            state = TrainState.from_dict(manifest["state"])
            engine = EngineState(**manifest["engine"])
            loss_scale.load(engine.loss_scale)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / MANIFEST}: broken manifest ({error!r}); use another checkpoint"
            ) from None
        state.skipped_in_a_row = 0  # a new start gets all of train.max_skipped_steps
        if saved != config.optimizer.name:
            raise CheckpointError(
                f"{self.folder}: holds the state of optimizer.name={saved}, the config says"
                f" {config.optimizer.name}; keep the former, or start over from these weights"
                " with checkpoint.init_from"
            )
        return state, engine

    def load_scales(self, scales: ActivationScales) -> None:
        """Load the scales of activations of the checkpoint, if any. Raises CheckpointError for
        broken ones.
        """
        load_scales(self.folder, self._own or {}, scales)

    def weights(
        self, model: ResolvedModel, pieces: Pieces | None = None
    ) -> Iterator[tuple[str, Array]]:
        """Yield names and values of all weights, or of ``pieces`` of them.

        Raises CheckpointError unless every tensor is there with the model's shape.
        """
        shapes = parameter_shapes(model)
        with self._open(model, MODEL_FILE) as stored:
            stored.require(shapes)
            for name, piece in (pieces or _whole(shapes)).items():
                yield name, stored.read(name, piece)

    def quantized(self, model: ResolvedModel) -> Iterator[tuple[str, QuantizedWeight]]:
        """Yield the 8-bit weights as they are stored; nothing if all weights are float.

        Raises CheckpointError unless every tensor is there with the model's shape.
        """
        if self._own is None:
            return
        with open_integers(self.folder, self._own) as reader:
            if reader is not None:
                check_tensors(self.folder, shapes_of(reader), parameter_shapes(model))
                yield from reader.quantized()

    def scheme(self) -> Scheme | None:
        """Return how its weights are, or were trained to become, integers; None if unknown.

        Raises CheckpointError and ConfigError.
        """
        return None if self._own is None else scheme_of(self.folder, self._own)

    def moments(
        self, config: ResolvedRun, optimizer_steps: int, pieces: Pieces | None = None
    ) -> Iterator[tuple[str, str, Array]]:
        """Yield parameter names, parts of the optimizer's state and values.

        There are none before the first step, and for a rule with momentum where that is 0. Such a
        rule may also start or stop to use it: an empty file is then valid, and a full one is not
        read.
        """
        shapes = parameter_shapes(config.model)
        parts = config.optimizer.state_parts
        if not parts:
            return
        if optimizer_steps and self._own and self._own["files"].keys() == {MODEL_FILE}:
            raise CheckpointError(
                f"{self.folder}: an export, without the state of the optimizer; resume the run it"
                " was made from, or start over from its weights with"
                f" checkpoint.init_from={self.folder}"
            )
        with self._open(config.model, OPTIMIZER_FILE) as stored:
            if not stored and (config.optimizer.rule.takes_momentum or not optimizer_steps):
                return
            stored.require(
                {f"{name}.{part}": shape for name, shape in shapes.items() for part in parts}
            )
            for name, piece in (pieces or _whole(shapes)).items():
                for part in parts:
                    yield name, part, stored.read(f"{name}.{part}", piece)


def _whole(shapes: Mapping[str, tuple[int, ...]]) -> Pieces:
    return {name: slice_of(name, shape) for name, shape in shapes.items()}
