"""Any weight file through one door: safetensors, torch, MindSpore, TensorFlow, Paddle, and the index of a model in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common.errors import CheckpointError
from common.weights.arrays import TensorFile, map_file
from common.weights.mindspore_files import open_mindspore
from common.weights.paddle_files import open_paddle
from common.weights.safetensors_files import open_safetensors_file
from common.weights.tensorflow_files import open_tensorflow
from common.weights.torch_files import OLD_MAGIC, ZIP_MAGIC, open_torch

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


@contextmanager
def _open_shards(path: Path) -> Iterator[TensorFile]:
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        shards = sorted(set(places.values()))
        if any(Path(shard).name != shard or not shard.isprintable() or shard in ("", path.name) for shard in shards):
            raise ValueError("a shard lies in another folder, or is no file")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}; give the path of a weight file") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: no index of shards ({error!r}); expected weight_map, from tensors to files beside it") from None
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
