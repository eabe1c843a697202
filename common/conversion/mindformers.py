"""MindFormers' ``.ckpt`` with a YAML beside it that says heads and vocabulary; its names before release 0.6 were others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.conversion.model_yaml import MODEL_YAML, read_model_yaml, write_model_yaml
from common.conversion.weights import (
    NO_SCALE,
    Weight,
    Weights,
    export_names,
    import_names,
    match_name_map,
    padding_of,
    require_moments,
)
from common.errors import CheckpointError
from common.tensor_files.arrays import TensorKind, prefetch_arrays
from common.tensor_files.containers import open_tensors
from common.tensor_files.mindspore_ckpt import stream_mindspore
from common.training.snapshot import EngineState
from common.training.state import TrainState
from common.weights.names import EMBEDDING, NAME_MAPS

FILE = "gpt2.ckpt"
_MOMENTS = {"exp_avg": "adam_m.", "exp_avg_sq": "adam_v.", "momentum_buffer": "moments."}
"""The optimizer's state by our names: what MindSpore's optimizers put before a parameter's name."""
_COUNTERS = (
    "step_num", "epoch_num", "global_step", "loss_scale", "scale_sense", "current_iterator_step", "last_overflow_iterator_step",
    "learning_rate",
)  # fmt: skip
"""What MindSpore writes beside the parameters: the trainer's numbers, and those of its optimizers and loss scale."""


def is_here(path: Path, format: str = "mindformers") -> bool:
    files = files_of(path)
    if not files:
        return False
    try:
        with open_tensors(files[0]) as stored:
            return any(name.startswith("gpt2.") for name in stored) == (format == "mindformers_r0.3")
    except CheckpointError:  # told when it is opened to be read
        return format == "mindformers"


def files_of(path: Path) -> list[Path]:
    """The .ckpt files that a path means: the file, or those of a folder."""
    return ([path] if path.suffix == ".ckpt" else []) if path.is_file() else sorted(file for file in path.glob("*.ckpt") if file.is_file())


@contextmanager
def open_mindformers(path: Path, format: str = "mindformers") -> Iterator[Weights]:
    """path: the file, or a folder of one. Raises CheckpointError and ConfigError."""
    files = [path] if path.is_file() else files_of(path)
    if len(files) != 1:
        raise CheckpointError(f"{path}: holds {len(files)} .ckpt files; give the path of one")
    file = files[0]
    model, run = read_model_yaml(file.parent / MODEL_YAML)
    with open_tensors(file) as stored:
        name_map = match_name_map(file, format, stored)
        ignored = {name: "causal mask" for name in stored if name_map.ignores(name)}
        counters = {name: float(stored[name].read().reshape(-1)[0]) for name in _COUNTERS if name in stored and stored[name].nbytes}
        rest = {name: tensor for name, tensor in stored.items() if name not in ignored and name not in _COUNTERS}
        groups = {part: {name: rest.pop(name) for name in [*rest] if name.startswith(prefix)} for part, prefix in _MOMENTS.items()}
        ignored |= padding_of(name_map, rest, model)
        weights = import_names(file, name_map, rest, model)
        moments: dict[str, Weight] = {}
        for part, tensors in groups.items():
            if tensors:
                moments |= import_names(file, name_map, tensors, model, prefix=_MOMENTS[part], suffix=f".{part}")
        if run is not None and counters.get("global_step") != run["engine"]["optimizer_steps"]:
            raise CheckpointError(
                f"{file}: global_step is {counters.get('global_step')}, and {MODEL_YAML} says {run['engine']['optimizer_steps']} updates:"
                f" they are of two runs; take the section run out of {MODEL_YAML}, or copy both again"
            )
        if run is None and moments:
            run = _run_of(file, counters, "sgd" if groups["momentum_buffer"] else "adamw")
            ignored["position in the data"] = "not in the file: who goes on from here reads from the first sample"
        elif run is None:
            ignored |= dict.fromkeys(counters, "where training stood, without the state of the optimizer")
        moments = {} if run is None else require_moments(file, moments, run, model)
        yield Weights(path=path, format=format, model=model, tensors=weights, moments=moments, run=run, ignored=ignored)


def _run_of(file: Path, counters: Mapping[str, float], optimizer: str) -> dict[str, Any]:
    """As far as MindSpore's own counters tell."""
    if wrong := [f"{name}={value:g}" for name, value in counters.items() if not 0 <= value < 2**53]:
        raise CheckpointError(f"{file}: {', '.join(wrong)}, where no run stands; copy it again")
    updates = int(counters.get("global_step", counters.get("step_num", 0)))
    value = counters.get("scale_sense", counters.get("loss_scale"))
    scale = NO_SCALE if value is None else {"mode": "dynamic", "value": value, "finite_steps": 0, "overflows": 0}
    return {
        "state": TrainState(step=int(counters.get("step_num", updates))).to_dict(),
        "engine": vars(EngineState(optimizer_steps=updates, loss_scale=scale, rng={})),
        "config": {"optimizer": {"name": optimizer}},
    }


def write_mindformers(folder: Path, weights: Weights, dtype: str | None, format: str = "mindformers") -> dict[str, int]:
    """Into an empty folder; returns the CRC-32 of each file of weights. OSError is left to the caller."""
    checksum = write_file(folder / FILE, weights, dtype, format)
    write_model_yaml(folder, weights)
    return {FILE: checksum}


def write_file(path: Path, weights: Weights, dtype: str | None, format: str = "mindformers") -> int:
    name_map = NAME_MAPS[format][0]
    entries = [*export_names(name_map, weights.tensors, weights.model, dtype)]
    for part, prefix in _MOMENTS.items():
        if f"{EMBEDDING}.{part}" in weights.moments:
            entries += export_names(name_map, weights.moments, weights.model, None, prefix=prefix, suffix=f".{part}")
    if weights.run is not None:
        engine = weights.run["engine"]
        counters = {"global_step": np.array([engine["optimizer_steps"]], np.int32), "step_num": np.array(weights.run["state"]["step"])}
        if "value" in engine["loss_scale"]:
            counters["loss_scale"] = np.array(engine["loss_scale"]["value"], np.float32)
        entries += [(name, TensorKind(dtype=str(array.dtype), shape=array.shape), partial(array.copy)) for name, array in counters.items()]
    return stream_mindspore(path, {name: kind for name, kind, _ in entries}, prefetch_arrays(make for _, _, make in entries))
