"""Read and write safetensors files of any source, with bfloat16 and shards: read by memory map, written as a stream.

Format: https://github.com/huggingface/safetensors#format; shards are model-00001-of-00002.safetensors beside an index,
as transformers names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from common.errors import CheckpointError
from common.files import atomic_write, open_input
from common.structured_files import parse_json, shown
from common.tensor_files.arrays import Bytes, FileTensor, TensorFile, TensorKind, TensorSource, joined, prefetch_arrays
from common.tensor_files.checksummed import ChecksummedFile

INDEX = "model.safetensors.index.json"
Tensors = Mapping[str, NDArray[Any]]

SAFETENSORS_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


_WORDS = {code: word for word, code in SAFETENSORS_TYPES.items()}


def read_safetensors(path: Path, content: Bytes) -> TensorFile:
    """Return the tensors. Raises CheckpointError unless the library finds the file whole, and ValueError for a type
    that GPT-2 does not have.
    """
    open_safetensors(path)  # checks the file
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = parse_json(content[8:begin].tobytes())
    header.pop("__metadata__", None)
    if strange := [name for name in header if header[name]["dtype"] not in _WORDS]:
        raise ValueError(
            f"{strange[0]} is of type {shown(header[strange[0]]['dtype'])}, and {', '.join(_WORDS)} are known"
        )
    tensors = {
        name: FileTensor(
            dtype=_WORDS[entry["dtype"]],
            shape=tuple(entry["shape"]),
            load=partial(joined, _WORDS[entry["dtype"]], content[begin:][slice(*entry["data_offsets"])]),
        )
        for name, entry in header.items()
    }
    return TensorFile(path, tensors)


def write_safetensors(path: Path, tensors: Tensors) -> int:
    """Write and fsync ``path``; returns the CRC-32 of its bytes. Peak memory is the copy of one tensor at most.

    OSError is left to the caller, who owns the folder.
    """
    kinds = {name: TensorKind(dtype=array.dtype.name, shape=array.shape) for name, array in tensors.items()}
    return stream_safetensors(path, kinds, tensors.values())


def stream_safetensors(path: Path, kinds: Mapping[str, TensorKind], arrays: Iterable[NDArray[Any]]) -> int:
    """Write ``arrays``, made one at a time in the order of ``kinds``. No array is kept while the
    next is made. Returns the CRC-32.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, kind in kinds.items():
        header[name] = {
            "dtype": SAFETENSORS_TYPES[kind.dtype],
            "shape": list(kind.shape),
            "data_offsets": [offset, offset + kind.nbytes],
        }
        offset += kind.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with ChecksummedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write_array(array)
            del array
        assert file.position == 8 + len(text) + offset, "the arrays are those of kinds"
    return file.checksum


def stream_shards(folder: Path, tensors: Mapping[str, TensorSource], *, limit: int) -> dict[str, int]:
    """Write tensors, loaded one at a time, into one or more files. Return the CRC-32 of each file by its name.

    A file has at most ``limit`` bytes of tensors; a larger tensor has a file to itself. Several
    files get an index. OSError and StorageError are left to the caller, who owns the folder.
    """
    shards: list[dict[str, TensorSource]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > limit:
            shards.append({})
        shards[-1][name] = tensor
    files = {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
    if len(shards) == 1:
        files = {"model.safetensors": shards[0]}
    sums = {
        file: stream_safetensors(folder / file, shard, prefetch_arrays(each.load for each in shard.values()))
        for file, shard in files.items()
    }
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, shard in files.items() for name in shard},
        }
        with atomic_write(folder / INDEX, "w") as file:
            json.dump(index, file, indent=2)
    return sums


def open_safetensors(path: Path) -> Any:
    """Return a ``safetensors.safe_open`` reader of numpy arrays. Raises CheckpointError for a file
    that is missing or broken.
    """
    from safetensors import SafetensorError, safe_open

    with open_input(path, CheckpointError):
        pass  # the library says of every file that it cannot open that the file is absent
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file: {error}; copy it again or use another one"
        ) from None


def shapes_of(reader: Any) -> dict[str, tuple[int, ...]]:
    names = reader.keys()  # safe_open is not a mapping
    return {name: tuple(reader.get_slice(name).get_shape()) for name in names}
