"""Writer of folders for transformers: config.json and safetensors, in shards where they are large,
or pytorch_model.bin as before its release 4.0.
"""

from __future__ import annotations

from pathlib import Path

from common.systems.hugging_face.config import CONFIG, write_config
from common.systems.hugging_face.names import NAME_MAPS
from common.systems.hugging_face.tokenizer import special_ids
from common.systems.weights import Weights, arrays_of, export_names
from common.tensor_files.safetensors_file import stream_shards
from common.tensor_files.torch_files import TensorLeaf, write_torch

_SHARD_BYTES = 5 * 10**9


def write_hugging_face(folder: Path, weights: Weights, dtype: str | None) -> dict[str, int]:
    """Write into an empty folder; returns the CRC-32 of each file of weights. OSError is left to
    the caller.
    """
    tensors = export_names(NAME_MAPS[0], weights.tensors, weights.model, dtype)
    sums = stream_shards(folder, tensors, arrays_of(tensors), limit=_SHARD_BYTES)
    write_config(
        folder / CONFIG, weights.model, next(iter(tensors.values())).dtype, special_ids(weights)
    )
    return sums


def write_with_pickle(folder: Path, weights: Weights) -> None:
    """Write config.json and pytorch_model.bin into an empty folder, as save_pretrained of
    transformers 2 did. The output layer is written beside the table that it is tied to, and n_ctx
    is the window of training. OSError is left to the caller.
    """
    name_map = NAME_MAPS[0]
    tensors = export_names(name_map, weights.tensors, weights.model, None)
    tree = {
        name: TensorLeaf(dtype=weight.dtype, shape=weight.shape, name=name)
        for name, weight in tensors.items()
    }
    table = name_map.rows(0)[0].theirs
    write_torch(
        folder / "pytorch_model.bin", tree | {name_map.head: tree[table]}, arrays_of(tensors)
    )
    dtype = tensors[table].dtype
    write_config(
        folder / CONFIG, weights.model, dtype, special_ids(weights), weights.model.seq_length
    )
