"""Writer of OneFlow-Benchmark's snapshot, with a model.yaml for values without a place in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.files import atomic_write, fsync_folder
from common.systems.model_yaml import write_model_yaml
from common.systems.oneflow.names import JOB, MOMENTS, NAME_MAP, SCALE, STEP, moment_map
from common.systems.oneflow.snapshot import DATA, META, meta_of
from common.systems.weights import Weight, Weights, arrays_of, export_names
from common.tensor_files.checksummed import ChecksummedFile
from common.weights.names import EMBEDDING


def write_oneflow(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
    """Write iterN_snapshot into an empty folder; return the CRC-32 of each variable's file.

    The vocabulary is written without padding: give OneFlow's flags a multiple of 1. OSError is left
    to the caller.
    """
    tensors = export_names(NAME_MAP, weights.tensors, weights.model, dtype)
    for part in MOMENTS:
        if f"{EMBEDDING}.{part}" in weights.moments:
            names = moment_map(part)
            tensors |= export_names(names, weights.moments, weights.model, None, suffix=f".{part}")
    step = 0 if weights.run is None else weights.run["state"]["step"]
    numbers = {f"{STEP}{JOB}": np.array([step], np.int64)}
    scale = {} if weights.run is None else weights.run["engine"]["loss_scale"]
    if scale.get("mode") == "dynamic":
        numbers |= {
            f"{SCALE}{JOB}-LossScale": np.array([scale["value"]], np.float32),
            f"{SCALE}{JOB}-GoodStepCounter": np.array([scale["finite_steps"]], np.int64),
        }
    tensors |= {
        name: Weight(dtype=str(array.dtype), shape=array.shape, load=array.copy)
        for name, array in numbers.items()
    }
    snapshot = folder / f"iter{step}_snapshot"
    snapshot.mkdir()
    sums = {}
    for (name, tensor), array in zip(tensors.items(), arrays_of(tensors), strict=True):
        (snapshot / name).mkdir()
        with ChecksummedFile(snapshot / name / DATA) as file:
            file.write_array(array)
        sums[f"{snapshot.name}/{name}/{DATA}"] = file.checksum
        with atomic_write(snapshot / name / META, "w") as meta:
            meta.write(meta_of(tensor))
        fsync_folder(snapshot / name)
    (snapshot / "snapshot_done").touch()
    fsync_folder(snapshot)
    write_model_yaml(folder, weights)
    return sums
