"""A checkpoint that is found and whose manifest is read once, whichever backend, layout or other
system wrote it; agreement of all ranks on one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.checkpoint.folders import find_checkpoint, read_or_name_older, require_checkpoint
from common.checkpoint.manifest import MANIFEST, read_manifest
from common.checkpoint.snapshot import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    EngineState,
    TrainState,
    open_integers,
    scheme_of,
)
from common.config.resolved import ResolvedModel
from common.errors import CheckpointError, GPT2Error
from common.parallel.run import Run
from common.parallel.sharding import slice_of
from common.parallel.updates import LossScale
from common.parallel.world import WorldBase
from common.quantization import ActivationScales
from common.systems.direct import ForeignTensors, foreign_format, open_foreign
from common.tensor_files.checksummed import file_checksum
from common.tensor_files.safetensors_file import shapes_of
from common.weights.names import check_tensors, parameter_shapes
from common.weights.pieces import Array, LayerScheme, Scheme, ShardedReader, TensorSlice, open_stored

Pieces = Mapping[str, TensorSlice]


class Checkpoint:
    """A checkpoint of ours, or weights of another system. Tensors are read one at a time.

    A pickled one takes its manifest to other ranks. Every method raises CheckpointError if the
    checkpoint lacks the requested data.
    """

    def __init__(self, path: Path, format: str | None = None) -> None:
        """format: key of ``FORMATS``; None for a folder of ours."""
        self.path = path
        self._format = format
        self._own: dict[str, Any] = {}
        self._foreign: dict[int, dict[str, Any]] = {}

    def __str__(self) -> str:
        return str(self.path)

    @property
    def is_foreign(self) -> bool:
        return self._format is not None

    def manifest(self, model: ResolvedModel) -> dict[str, Any]:
        """Return the manifest, or one like it of foreign weights.

        model: the config's, used where foreign files do not record theirs.
        """
        if self._format is None:
            return self._own_manifest()
        if model.vocab_size not in self._foreign:
            self._foreign[model.vocab_size] = open_foreign(self.path, self._format, model)[0]
        return self._foreign[model.vocab_size]

    def _own_manifest(self) -> dict[str, Any]:
        """Return the manifest of ours, and nothing for foreign weights."""
        if self._format is None and not self._own:
            self._own = read_manifest(self.path, checksums=False)
        return self._own

    def verify(self, key: str) -> None:
        """Compare the files of ours with their checksums. Foreign files have none.

        The error names a complete older checkpoint, and ``key``, the override that takes it.
        """
        if self._format is None:
            self._own = read_or_name_older(self.path, key, self._own)

    def holds_integers(self) -> bool:
        """Return whether its weights have 8 bits. A damaged file is reported where it is read."""
        with suppress(GPT2Error, OSError):
            return open_integers(self.path, self._own_manifest()) is not None
        return False

    def _open(self, model: ResolvedModel, file: str) -> ShardedReader | ForeignTensors:
        if self._format is None:
            return open_stored(self.path, file, self._own_manifest())
        return open_foreign(self.path, self._format, model)[1][file]

    def states(self, config: Run, loss_scale: LossScale) -> tuple[TrainState, EngineState]:
        """Return the run's and the engine's state, and load ``loss_scale``.

        Raises CheckpointError for another optimizer than the config's.
        """
        manifest = self.manifest(config.model)
        state, engine = TrainState.from_dict(manifest["state"]), EngineState(**manifest["engine"])
        state.skipped_in_a_row = 0  # a new start gets all of train.max_skipped_steps
        loss_scale.load(engine.loss_scale)
        saved = manifest["config"].get("optimizer", {}).get("name")
        if saved != config.optimizer.name:
            held = f"the state of optimizer.name={saved}, the config says {config.optimizer.name}; keep the former, or"
            raise CheckpointError(
                f"{self.path}: holds {held if saved else 'only weights, not the state of a run;'} start over from these"
                " weights with checkpoint.init_from"
            )
        return state, engine

    def load_scales(self, scales: ActivationScales) -> None:
        """Load the scales of activations of the checkpoint, if any."""
        scales.load(self._own_manifest().get("engine", {}).get("quantization", {}))

    def weights(self, model: ResolvedModel, pieces: Pieces | None = None) -> Iterator[tuple[str, Array]]:
        """Yield names and values of all weights, or of ``pieces`` of them.

        Raises CheckpointError unless every tensor is there with the model's shape.
        """
        shapes = parameter_shapes(model)
        stored = self._open(model, MODEL_FILE)
        stored.require(shapes)
        for name, piece in (pieces or _whole(shapes)).items():
            yield name, stored.read(name, piece)

    def quantized(self, model: ResolvedModel) -> Iterator[tuple[str, NDArray[np.int8], LayerScheme]]:
        """Yield the 8-bit weights as they are stored; nothing if all weights are float.

        Raises CheckpointError unless every tensor is there with the model's shape.
        """
        if (reader := open_integers(self.path, self._own_manifest())) is not None:
            check_tensors(self.path, shapes_of(reader), parameter_shapes(model))
            yield from reader.quantized()

    def scheme(self) -> Scheme | None:
        """Return how its weights are, or were trained to become, integers; None if unknown.

        Raises CheckpointError and ConfigError.
        """
        return scheme_of(self.path, self._own_manifest())

    def moments(
        self, config: Run, optimizer_steps: int, pieces: Pieces | None = None
    ) -> Iterator[tuple[str, str, Array]]:
        """Yield parameter names, parts of the optimizer's state and values.

        There are none before the first step, and for a rule with momentum where that is 0. Such a rule may also start
        or stop to use it: an empty file is then valid, and a full one is not read.
        """
        shapes = parameter_shapes(config.model)
        parts = config.optimizer.state_parts
        if not parts:
            return
        if optimizer_steps and self._own_manifest().get("files", {}).keys() == {MODEL_FILE}:
            raise CheckpointError(
                f"{self.path}: an export, without the state of the optimizer; resume the run it"
                f" was made from, or start over from its weights with checkpoint.init_from={self.path}"
            )
        stored = self._open(config.model, OPTIMIZER_FILE)
        if not stored and (config.optimizer.rule.takes_momentum or not optimizer_steps):
            return
        stored.require({f"{name}.{part}": shape for name, shape in shapes.items() for part in parts})
        for name, piece in (pieces or _whole(shapes)).items():
            for part in parts:
                yield name, part, stored.read(f"{name}.{part}", piece)


def open_checkpoint(where: Path, why: str) -> Checkpoint:
    """Return the checkpoint at ``where``, or other weights there. why: the key that names it.

    Raises NoCheckpointError if there is neither.
    """
    if found := newest_checkpoint(where):
        return found
    format = foreign_format(where)
    return Checkpoint(where, format) if format else Checkpoint(require_checkpoint(where, why))


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a run folder, if it holds any. Raises CheckpointError."""
    found = find_checkpoint(folder)
    return None if found is None else Checkpoint(found)


def _whole(shapes: Mapping[str, tuple[int, ...]]) -> Pieces:
    return {name: slice_of(name, shape) for name, shape in shapes.items()}


def identity_of(checkpoint: Checkpoint) -> str:
    """Return a fingerprint of a checkpoint, by which hosts compare the files that they see."""
    path = checkpoint.path
    try:
        if checkpoint.is_foreign:
            return fingerprint(path)
        return f"{path} {file_checksum(path / MANIFEST):08x}"
    except OSError:
        return f"{path}, not there"


def fingerprint(path: Path) -> str:
    """Return names and sizes of the files, to compare them between hosts. Raises OSError."""
    if path.parent.name == "snapshots":  # of huggingface_hub, where the name tells the content
        return path.resolve(strict=True).name
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in files if file.is_file()}
    return f"{path} {sizes}"


def check_everywhere(
    world: WorldBase, checkpoint: Checkpoint | None, what: str = "the checkpoint to begin with"
) -> None:
    """Raise on every rank unless all of them read the same complete checkpoint.

    Rank 0 has compared the checksums of its choice. Among ranks that see other files, or files on
    another host, the first one compares them for all.
    """
    if world.size == 1:
        return
    world.require_equal({what: "none" if checkpoint is None else identity_of(checkpoint)})
    if checkpoint is None or checkpoint.is_foreign:
        return  # foreign files have no checksums
    views = world.gather(_view_of(checkpoint.path))
    fault = None
    if world.rank and views.index(views[world.rank]) == world.rank:
        try:
            read_manifest(checkpoint.path)
        except CheckpointError as error:
            fault = f"rank {world.rank}: {error}"
    faults = [found for found in world.gather(fault) if found is not None]
    if faults:
        raise CheckpointError(faults[0])


def _view_of(checkpoint: Path) -> Any:
    """Return a value that is equal for processes that read the same files on the same host."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        files = {path.name: path.stat() for path in checkpoint.iterdir()}
    except OSError:
        return uuid.uuid4().hex  # reads by itself, and fails then
    return host, sorted(
        (name, file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns) for name, file in files.items()
    )
