"""Our own folders: a run, a checkpoint in the parts of any layout, or a folder of weights; both backends share them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from common.conversion.weights import Weight, Weights, checked_model, to_type
from common.errors import ConfigError
from common.files import atomic_write
from common.parallel.sharding import own_piece
from common.training.checkpoint import FORMAT_VERSION, MANIFEST, find_checkpoint, read_manifest, require_checkpoint
from common.training.snapshot import MODEL_FILE, EngineState
from common.training.state import TrainState
from common.weights.arrays import TensorKind
from common.weights.files import stream_safetensors
from common.weights.names import parameter_shapes
from common.weights.pieces import StoredTensors, open_stored


def is_here(path: Path) -> bool:
    return find_checkpoint(path) is not None


@contextmanager
def open_project(path: Path) -> Iterator[Weights]:
    """Raises CheckpointError naming every tensor that is missing, unexpected or not whole."""
    checkpoint = require_checkpoint(path, "weights to convert")
    manifest = read_manifest(checkpoint)
    model = checked_model(checkpoint / MANIFEST, manifest["config"].get("model", {}))
    shapes = parameter_shapes(model)
    with open_stored(checkpoint, MODEL_FILE, manifest) as stored:
        stored.require(shapes)
        tensors = {name: Weight(dtype="float32", shape=shape, load=_loader(stored, name, shape)) for name, shape in shapes.items()}
        yield Weights(path=checkpoint, format="torch_gpt2", model=model, tensors=tensors)


def _loader(stored: StoredTensors, name: str, shape: tuple[int, ...]) -> Callable[[], NDArray[Any]]:
    return lambda: stored.read(name, own_piece(name, shape))


def write_project(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
    """A folder for checkpoint.init_from and checkpoint.load: float32, and no state of a run. Returns the CRC-32 of its file."""
    if dtype not in (None, "float32"):
        raise ConfigError(
            f"--dtype {dtype}: our own folders hold float32; leave it out, and say precision.parameters={dtype} when you train"
        )
    tensors = [(name, weights.tensors[name]) for name in parameter_shapes(weights.model)]
    kinds = {name: TensorKind(dtype="float32", shape=weight.shape) for name, weight in tensors}
    checksum = stream_safetensors(folder / MODEL_FILE, kinds, (to_type(weight.load(), weight.dtype, "float32") for _, weight in tensors))
    manifest = {
        "format_version": FORMAT_VERSION,
        "state": TrainState().to_dict(),
        "engine": vars(EngineState(optimizer_steps=0, loss_scale={}, rng={})),
        "config": {"model": weights.model.model_dump()},
        "converted_from": {"format": weights.format, "path": str(weights.path.resolve())},
        "files": {MODEL_FILE: {"bytes": (folder / MODEL_FILE).stat().st_size, "crc32": checksum}},
    }
    with atomic_write(folder / MANIFEST, "w") as file:
        json.dump(manifest, file, indent=1)
    return {MODEL_FILE: checksum}
