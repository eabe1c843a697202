"""Folders that transformers opens, written: config.json and safetensors, in shards where they are large."""

from __future__ import annotations

from pathlib import Path

from common.systems.hugging_face.config import CONFIG, write_config
from common.systems.hugging_face.names import NAME_MAPS
from common.systems.hugging_face.tokenizer import end_of_text
from common.systems.weights import Weights, export_names
from common.tensor_files.arrays import prefetch_arrays
from common.tensor_files.safetensors_file import stream_shards

_SHARD_BYTES = 5 * 10**9


def write_hugging_face(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
    """Write into an empty folder; returns the CRC-32 of each file of weights. OSError is left to the caller."""
    entries = list(export_names(NAME_MAPS[0], weights.tensors, weights.model, dtype))
    kinds = {name: kind for name, kind, _ in entries}
    sums = stream_shards(folder, kinds, prefetch_arrays(make for _, _, make in entries), limit=_SHARD_BYTES)
    write_config(folder / CONFIG, weights.model, next(iter(kinds.values())).dtype, end_of_text(weights))
    return sums
