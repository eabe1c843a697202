"""Reader of OpenAI's own folders of GPT-2: hparams.json, a TensorFlow checkpoint, encoder.json and
vocab.bpe. Folders of gpt-2-simple have the same form.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from common.config.resolved import ResolvedModel
from common.errors import CheckpointError, ConfigError
from common.structured_files import MAX_JSON_BYTES, read_bytes, read_json_mapping
from common.systems.name_map import LINEAR, POSITIONS, match_name_map, name_map
from common.systems.weights import Weights, checked_model, weights_from
from common.tensor_files.arrays import FileTensor
from common.tensor_files.containers import open_tensors
from common.weights.names import EMBEDDING

NAME_MAPS = (
    name_map(
        {
            EMBEDDING: "model/wte",
            POSITIONS: "model/wpe",
            "ln_f": "model/ln_f/g|b",
            "ln_1": "model/h{layer}/ln_1/g|b",
            "attn.qkv_proj": "model/h{layer}/attn/c_attn/w|b",
            "attn.c_proj": "model/h{layer}/attn/c_proj/w|b",
            "ln_2": "model/h{layer}/ln_2/g|b",
            "mlp.c_fc": "model/h{layer}/mlp/c_fc/w|b",
            "mlp.c_proj": "model/h{layer}/mlp/c_proj/w|b",
        },
        transposed=LINEAR,
    ),
)
"""OpenAI's names. Weights are those of convolutions of width 1, (1, in, out)."""
CONFIG = "hparams.json"
_SIZES = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "seq_length": "n_ctx",
    "vocab_size": "n_vocab",
}
_STATE = re.compile(r"(?!model/).*|.*/Adam(_\d+)?")
"""Counters, powers of beta and slots of an optimizer, which training writes beside the model."""


def detects(path: Path) -> bool:
    return path.suffix == ".index" or ((path / CONFIG).is_file() and any(path.glob("*.index")))


@contextmanager
def open_openai(path: Path) -> Iterator[Weights]:
    """Open a folder.

    path: the folder, or the .index file in it. Raises CheckpointError and ConfigError.
    """
    file = path if path.is_file() else _find(path)
    model = read_config(file.parent / CONFIG)
    with open_tensors(file) as stored:
        names = match_name_map(file, "openai", NAME_MAPS, stored)
        ignored = {
            name: "state of the training"
            for name in [*stored, *stored.plain]
            if _STATE.fullmatch(name)
        }
        tensors = {
            name: _without_width(tensor) for name, tensor in stored.items() if name not in ignored
        }
        yield weights_from(file, names, tensors, model, format="openai", path=path, ignored=ignored)


def _find(folder: Path) -> Path:
    """Return the checkpoint of the folder. Of several, the file ``checkpoint`` names the latest."""
    found = sorted(folder.glob("*.index"))
    if len(found) > 1 and (folder / "checkpoint").is_file():
        text = read_bytes(
            folder / "checkpoint", limit=MAX_JSON_BYTES, error=CheckpointError
        ).decode("utf-8", "replace")
        latest = re.search(r'^model_checkpoint_path: "(?:.*/)?(.*)"', text, re.MULTILINE)
        found = [file for file in found if latest and file.name == f"{latest[1]}.index"] or found
    if len(found) != 1:
        raise CheckpointError(
            f"{folder}: holds {len(found)} checkpoints (files .index); give the path of one"
        )
    return found[0]


def _without_width(tensor: FileTensor) -> FileTensor:
    """Return a convolution of width 1 as a matrix."""
    return (
        replace(tensor, shape=tensor.shape[1:])
        if len(tensor.shape) == 3 and tensor.shape[0] == 1
        else tensor
    )


def read_config(path: Path) -> ResolvedModel:
    """Return the sizes in hparams.json. Raises ConfigError."""
    if not os.path.lexists(path):
        raise ConfigError(
            f"{path}: no such file; heads cannot be read off shapes: put OpenAI's hparams.json"
            " beside the weights"
        )
    fields = read_json_mapping(path)
    if missing := [name for name in _SIZES.values() if fields.get(name) is None]:
        raise ConfigError(
            f"{path}: no sizes of a GPT-2: {', '.join(missing)} missing; expected"
            f" {', '.join(_SIZES.values())}"
        )
    return checked_model(path, {ours: fields[theirs] for ours, theirs in _SIZES.items()})
