"""Writer of MindFormers' ``.ckpt`` as a stream, with a model.yaml for what it cannot hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.systems.mindformers.names import NAME_MAPS
from common.systems.mindformers.read import MOMENTS
from common.systems.model_yaml import write_model_yaml
from common.systems.weights import Weight, Weights, arrays_of, export_names
from common.tensor_files.mindspore_ckpt import stream_mindspore
from common.weights.names import EMBEDDING

FILE = "gpt2.ckpt"


def write_mindformers(
    folder: Path, weights: Weights, dtype: str | None, format: str = "mindformers"
) -> dict[str, int]:
    """Write into an empty folder; returns the CRC-32 of each file of weights. OSError is left to
    the caller.
    """
    checksum = write_file(folder / FILE, weights, dtype, format)
    write_model_yaml(folder, weights)
    return {FILE: checksum}


def write_file(path: Path, weights: Weights, dtype: str | None, format: str = "mindformers") -> int:
    """Write one file; returns its CRC-32. OSError is left to the caller."""
    name_map = NAME_MAPS[format][0]
    tensors = export_names(name_map, weights.tensors, weights.model, dtype)
    for part, prefix in MOMENTS.items():
        if f"{EMBEDDING}.{part}" in weights.moments:
            tensors |= export_names(
                name_map, weights.moments, weights.model, None, prefix=prefix, suffix=f".{part}"
            )
    if weights.run is not None:
        tensors |= counters_of(weights.run)
    return stream_mindspore(path, tensors, arrays_of(tensors))


def counters_of(run: Mapping[str, Any], *, epoch: int | None = None) -> dict[str, Weight]:
    """Return the counters of a run under MindSpore's names. run: in the form of ``Weights.run``."""
    engine = run["engine"]
    counters = {
        "global_step": np.array([engine["optimizer_steps"]], np.int32),
        "step_num": np.array(run["state"]["step"]),
    }
    if epoch is not None:
        counters["epoch_num"] = np.array(epoch)
    if "value" in engine["loss_scale"]:
        counters["loss_scale"] = np.array(engine["loss_scale"]["value"], np.float32)
    return {
        name: Weight(dtype=str(array.dtype), shape=array.shape, load=array.copy)
        for name, array in counters.items()
    }
