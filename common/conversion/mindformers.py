"""MindFormers' ``.ckpt`` with a YAML beside it that says heads and vocabulary; its names before release 0.6 were others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from common.config.schema import ModelConfig
from common.conversion.weights import Weights, by_our_names, checked_model, find_map, in_their_names, padding_of
from common.errors import CheckpointError, ConfigError
from common.files import atomic_write
from common.weights.formats import open_tensors
from common.weights.mindspore_files import stream_mindspore
from common.weights.names import NAME_MAPS

CONFIG = "model.yaml"
FILE = "gpt2.ckpt"
_STATE = {"step_num": "number of steps", "epoch_num": "number of epochs", "global_step": "number of steps", "loss_scale": "loss scale"}
"""What MindSpore writes beside the parameters."""


def is_here(path: Path) -> bool:
    return path.suffix == ".ckpt" or (path.is_dir() and any(path.glob("*.ckpt")))


@contextmanager
def open_mindformers(path: Path, format: str = "mindformers") -> Iterator[Weights]:
    """path: the file, or a folder of one. Raises CheckpointError and ConfigError."""
    files = [path] if path.is_file() else sorted(path.glob("*.ckpt"))
    if len(files) != 1:
        raise CheckpointError(f"{path}: holds {len(files)} .ckpt files; give the path of one")
    file = files[0]
    model = read_config(file.parent / CONFIG)
    with open_tensors(file) as stored:
        name_map = find_map(file, format, stored)
        ignored = {name: "causal mask" for name in stored if name_map.ignores(name)}
        ignored |= {name: why for name, why in _STATE.items() if name in stored}
        ignored |= {name: "state of the optimizer" for name in stored if name.startswith(("adam_m.", "adam_v."))}
        tensors = {name: tensor for name, tensor in stored.items() if name not in ignored}
        ignored |= padding_of(name_map, tensors, model)
        yield Weights(path=path, format=format, model=model, tensors=by_our_names(file, name_map, tensors, model), ignored=ignored)


def read_config(path: Path) -> ModelConfig:
    try:
        words: Any = yaml.safe_load(path.read_bytes())
        section = dict(words["model"])
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; heads and vocabulary cannot be read off shapes: put the section model of the config beside the weights"
        ) from None
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: no section model ({error}); expected num_layers, hidden_size, num_heads, seq_length, vocab_size"
        ) from None
    return checked_model(path, section)


def write_mindformers(folder: Path, weights: Weights, dtype: str | None, format: str = "mindformers") -> dict[str, int]:
    """Into an empty folder; returns the CRC-32 of each file of weights. OSError is left to the caller."""
    checksum = write_file(folder / FILE, weights, dtype, format)
    with atomic_write(folder / CONFIG, "w") as file:
        yaml.safe_dump({"model": weights.model.model_dump(exclude_none=True)}, file, sort_keys=False)
    return {FILE: checksum}


def write_file(path: Path, weights: Weights, dtype: str | None, format: str = "mindformers") -> int:
    entries = list(in_their_names(NAME_MAPS[format][0], weights, dtype))
    return stream_mindspore(path, {name: kind for name, kind, _ in entries}, (make() for _, _, make in entries))
