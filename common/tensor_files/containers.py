"""Open weight files of any container with one function: ``open_tensors``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common.errors import CheckpointError, UserError
from common.file_kinds import HEAD_BYTES, foreign_kind
from common.structured_files import read_json_mapping
from common.tensor_files.arrays import Bytes, TensorFile, map_file
from common.tensor_files.mindspore_ckpt import read_mindspore
from common.tensor_files.pickled_values import STATE, read_paddle
from common.tensor_files.safetensors_file import read_safetensors
from common.tensor_files.torch_files import OLD_MAGIC, ZIP_MAGIC, read_torch


class _Container(NamedTuple):
    title: str
    read: Callable[[Path, Bytes], TensorFile]
    remedy: str = "copy it again or use another one"


_SAFETENSORS = _Container("safetensors file", read_safetensors)
_TORCH = _Container("file of torch.save", read_torch)
_CONTAINERS = {
    ".safetensors": _SAFETENSORS,
    **dict.fromkeys((".bin", ".pt", ".pth"), _TORCH),
    ".ckpt": _Container(
        "MindSpore checkpoint", read_mindspore, "copy it again, decrypt it with MindSpore, or use another one"
    ),
    **dict.fromkeys((".pdparams", STATE), _Container("file of paddle.save", read_paddle)),
}
"""Containers by the endings of their files."""


def open_tensors(path: Path) -> TensorFile:
    """Open a file by its first bytes, then by its ending; open ``NAME.index.json`` with all its shards.

    No tensor is read before it is asked for. Raises CheckpointError for a file that is missing, broken, of an unknown
    format, or that names code.
    """
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    content = map_file(path)
    head = content[:HEAD_BYTES].tobytes()
    is_safetensors, is_torch = head[8:9] == b"{", head.startswith((ZIP_MAGIC, OLD_MAGIC))
    # the length that safetensors begin with may look like any mark
    if not is_torch and not is_safetensors and (foreign := foreign_kind(head)) is not None:
        raise CheckpointError(f"{path}: {foreign}")
    container = _TORCH if is_torch else _CONTAINERS.get(path.suffix, _SAFETENSORS if is_safetensors else None)
    if container is None:
        raise CheckpointError(
            f"{path}: not a known weight file; expected safetensors, a file of torch.save (.bin,"
            " .pt, .pth), a MindSpore .ckpt, a .pdparams of Paddle, or the .index.json of"
            " shards"
        )
    try:
        return container.read(path, content)
    except UserError:
        raise
    except Exception as error:  # a broken file may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: not a whole {container.title}: {reason}; {container.remedy}") from None


def _read_shards(path: Path) -> TensorFile:
    places = read_json_mapping(path, error=CheckpointError).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise CheckpointError(f"{path}: not an index of shards; expected weight_map, from tensors to files beside it")
    # indices that name each other would recurse without end
    if strange := [
        shard
        for shard in places.values()
        if not shard or shard != Path(shard).name or not shard.isprintable() or shard.endswith(".index.json")
    ]:
        raise CheckpointError(
            f"{path}: the shard {strange[0][:60]!r} is in another folder or not a file; copy the whole folder again"
        )
    files = {shard: open_tensors(path.with_name(shard)) for shard in sorted(set(places.values()))}
    found = {name: shard for shard, file in files.items() for name in file}
    strays = sorted(name for name in {*places, *found} if places.get(name) != found.get(name))
    if strays or len(found) < sum(map(len, files.values())):
        shown = ", ".join(strays[:6]) or "one of them is there twice"
        raise CheckpointError(
            f"{path}: the index and its {len(files)} shards do not hold the same tensors: {shown};"
            " copy the whole folder again"
        )
    tensors = {name: files[shard][name] for name, shard in places.items()}
    return TensorFile(path, tensors)
