"""Any weight file through one door: safetensors, torch, MindSpore, TensorFlow, Paddle, and the index of a model in shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common.errors import CheckpointError
from common.structured_files import read_json_mapping
from common.tensor_files.arrays import TensorFile, map_file
from common.tensor_files.mindspore_ckpt import open_mindspore
from common.tensor_files.paddle_pickle import open_paddle
from common.tensor_files.safetensors_file import open_safetensors_file
from common.tensor_files.tensorflow_bundle import open_tensorflow
from common.tensor_files.torch_reader import OLD_MAGIC, ZIP_MAGIC, open_torch

_BY_ENDING = {
    ".safetensors": open_safetensors_file, ".ckpt": open_mindspore,
    ".bin": open_torch, ".pt": open_torch, ".pth": open_torch, ".index": open_tensorflow, ".pdparams": open_paddle,
}  # fmt: skip


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """The tensors and plain values of a file, by what it begins with, then by its ending; of ``NAME.index.json`` those of all its shards.

    No tensor is read before it is asked for. Raises CheckpointError on a file that is missing, broken, of no known format, or names code.
    """
    if path.name.endswith(".index.json"):
        with _open_shards(path) as file:
            yield file
        return
    head = map_file(path)[:16].tobytes()
    if head.startswith((ZIP_MAGIC, OLD_MAGIC)):
        reader = open_torch
    elif path.suffix in _BY_ENDING:
        reader = _BY_ENDING[path.suffix]
    elif head[8:9] == b"{":
        reader = open_safetensors_file
    else:
        raise CheckpointError(
            f"{path}: no weight file that is known; expected safetensors, a file of torch.save (.bin, .pt, .pth), a MindSpore .ckpt,"
            " the .index of TensorFlow, a .pdparams of Paddle, or the .index.json of shards"
        )
    with reader(path) as file:
        yield file


def _is_beside(shard: str) -> bool:
    """Whether this is the plain name of a file, other than that of an index: indices that name each other would have no end."""
    return shard != "" and Path(shard).name == shard and shard.isprintable() and not shard.endswith(".index.json")


@contextmanager
def _open_shards(path: Path) -> Iterator[TensorFile]:
    places = read_json_mapping(path, error=CheckpointError).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise CheckpointError(f"{path}: no index of shards; expected weight_map, from tensors to files beside it")
    if strange := [shard for shard in places.values() if not _is_beside(shard)]:
        raise CheckpointError(f"{path}: the shard {strange[0][:60]!r} is in another folder, or is no file; copy the whole folder again")
    shards = sorted(set(places.values()))
    with ExitStack() as stack:
        files = {shard: stack.enter_context(open_tensors(path.with_name(shard))) for shard in shards}
        found = {name: shard for shard, file in files.items() for name in file}
        strays = sorted(name for name in {*places, *found} if places.get(name) != found.get(name))
        if strays or len(found) < sum(map(len, files.values())):
            shown = ", ".join(strays[:6]) or "one of them is there twice"
            raise CheckpointError(
                f"{path}: the index and its {len(shards)} shards do not hold the same tensors: {shown}; copy the whole folder again"
            )
        tensors = {name: files[shard][name] for name, shard in places.items()}
        yield TensorFile(path=path, tensors=tensors, plain={}, tree=tensors)
