"""Folders that transformers opens, written: config.json and safetensors, in shards where they are
large.
"""

from __future__ import annotations

from pathlib import Path

from common.systems.hugging_face.config import CONFIG, write_config
from common.systems.hugging_face.names import NAME_MAPS
from common.systems.hugging_face.tokenizer import end_of_text
from common.systems.weights import Weights, arrays_of, export_names
from common.tensor_files.safetensors_file import stream_shards

_SHARD_BYTES = 5 * 10**9


def write_hugging_face(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
    """Write into an empty folder; returns the CRC-32 of each file of weights. OSError is left to
    the caller.
    """
    tensors = export_names(NAME_MAPS[0], weights.tensors, weights.model, dtype)
    sums = stream_shards(folder, tensors, arrays_of(tensors), limit=_SHARD_BYTES)
    write_config(
        folder / CONFIG, weights.model, next(iter(tensors.values())).dtype, end_of_text(weights)
    )
    return sums
