"""Reader and writer of our own folders: a run, a checkpoint in the parts of any layout, or a folder
of weights. Both backends share them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.checkpoint.folders import require_checkpoint
from common.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from common.checkpoint.snapshot import MODEL_FILE, OPTIMIZER_FILE, EngineState, TrainState, scheme_of
from common.errors import ConfigError
from common.parallel.sharding import slice_of
from common.quantization import in_integers
from common.systems.run_state import checked_run, moment_shapes, require_moments
from common.systems.weights import Weight, Weights, arrays_of, checked_model
from common.tensor_files.safetensors_file import stream_safetensors
from common.weights.names import parameter_of, parameter_shapes
from common.weights.pieces import ShardedReader, open_stored


def open_project(path: Path, *, checksums: bool = True) -> Weights:
    """Open a folder. Raises CheckpointError that names every tensor that is missing, unexpected or
    incomplete. Without ``checksums`` only the sizes of its files are compared.
    """
    checkpoint = require_checkpoint(path, "weights to convert")
    manifest = read_manifest(checkpoint, checksums=checksums)
    model = checked_model(checkpoint / MANIFEST, manifest["config"].get("model", {}))
    shapes = parameter_shapes(model)
    stored, optimizer = (open_stored(checkpoint, file, manifest) for file in (MODEL_FILE, OPTIMIZER_FILE))
    stored.require(shapes)
    data = manifest["config"].get("data")
    records = (data.get("tokenizer") if isinstance(data, dict) else None, manifest.get("tokenizer"))
    weights = Weights(
        path=checkpoint,
        format="torch_gpt2",
        model=model,
        tensors={name: _weight(stored, name, shape) for name, shape in shapes.items()},
        tokenizer={key: value for each in records if isinstance(each, dict) for key, value in each.items()} or None,
        scheme=scheme_of(checkpoint, manifest),
    )
    if manifest["files"].keys() == {MODEL_FILE}:  # an export, or weights without a run
        return weights
    of_the_folder = ("format_version", "converted_from", "files")
    record = {key: value for key, value in manifest.items() if key not in of_the_folder}
    run = checked_run(checkpoint / MANIFEST, record)
    run["config"] = {key: value for key, value in run["config"].items() if key != "model"}
    of_moments = moment_shapes(model, run["config"]["optimizer"]["name"]) if optimizer else {}
    optimizer.require(of_moments)
    moments = {name: _weight(optimizer, name, shape) for name, shape in of_moments.items()}
    moments = require_moments(checkpoint / OPTIMIZER_FILE, moments, run, model)
    return replace(weights, moments=moments, run=run)


def _weight(stored: ShardedReader, name: str, shape: tuple[int, ...]) -> Weight:
    return Weight(dtype="float32", shape=shape, load=lambda: stored.read(name, slice_of(parameter_of(name), shape)))


def write_project(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
    """Write a float32 folder for checkpoint.init_from, or for checkpoint.resume where the source
    was a run. With int8, write one for checkpoint.load. Returns the CRC-32 of its files.
    """
    if dtype not in (None, "float32", "int8"):
        raise ConfigError(
            f"--dtype {dtype}: our own folders hold float32, or int8 to generate with; leave it"
            f" out, and say precision.parameters={dtype} when you train"
        )
    if dtype == "int8":
        weights = weights.without_run()
        shapes = {name: each.shape for name, each in weights.tensors.items()}
        values = ((name, weight.load_as("float32")) for name, weight in weights.tensors.items())
        sums = {MODEL_FILE: stream_safetensors(folder / MODEL_FILE, *in_integers(shapes, values, weights.scheme))}
    else:
        files = {MODEL_FILE: weights.tensors} | ({} if weights.run is None else {OPTIMIZER_FILE: weights.moments})
        sums = {}
        for name, tensors in files.items():
            whole = {
                key: replace(weight, dtype="float32", load=partial(weight.load_as, "float32"))
                for key, weight in tensors.items()
            }
            sums[name] = stream_safetensors(folder / name, whole, arrays_of(whole))
    manifest = {
        **manifest_of(weights),
        "converted_from": {"format": weights.format, "path": str(weights.path.resolve())},
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "crc32": checksum} for name, checksum in sums.items()
        },
    }
    write_manifest(folder, manifest)
    return sums


def manifest_of(weights: Weights) -> dict[str, Any]:
    """Return the manifest of a model and a run, without the list of files."""
    run: dict[str, Any] = {
        "state": TrainState().to_dict(),
        "engine": vars(EngineState(optimizer_steps=0, loss_scale={}, rng={})),
    }
    run |= weights.run or {}
    return {**run, "config": {**run.get("config", {}), "model": weights.model.model_dump()}}
