"""Reader of weights in checkpoints of Megatron-LM (``megatron``) and Megatron-Core
(``megatron_core``), of any tensor and pipeline size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import CheckpointError, ConfigError
from common.systems.megatron.names import NAME_MAPS
from common.systems.megatron.shards import (
    RankTensors,
    Shards,
    find_folder,
    join,
    model_tensors,
    open_shards,
    rank_files,
)
from common.systems.megatron_args import in_version, model_of_args
from common.systems.name_map import NameMap, match_name_map
from common.systems.rank_parts import read_joined
from common.systems.weights import Weights, check_tied, weights_from
from common.tensor_files.containers import open_tensors


def detects(path: Path, format: str = "megatron") -> bool:
    try:
        folder = find_folder(path)
        files = rank_files(folder) if folder else {}
        if not files:
            # Megatron's format torch_dist, which is refused when it is opened
            return folder is not None and format == "megatron_core"
        with open_tensors(files[min(files)]) as file:
            return any(name.startswith("model.language_model.") for name in file) == (
                format == "megatron"
            )
    except (CheckpointError, ConfigError):  # reported when the files are opened
        return format == "megatron"


@contextmanager
def open_megatron(path: Path, format: str = "megatron") -> Iterator[Weights]:
    """Open a checkpoint.

    path: the root, one of its folders iter_... or release, or the file of a single rank. Raises
    CheckpointError and ConfigError.
    """
    with open_shards(path) as shards:
        name_map = _name_map(shards, format)
        ranks: RankTensors = [
            [{n: t for n, t in rank.items() if not name_map.ignores(n)} for rank in stage]
            for stage in model_tensors(shards)
        ]
        tensors = join(shards.folder, ranks, name_map)
        tensors.pop(name_map.head or "", None)
        table = name_map.global_rows[0].theirs
        rows = tensors[table].shape[0] if table in tensors and tensors[table].shape else 0
        folders = (shards.folder, shards.folder.parent)
        model, notes = model_of_args(
            shards.first.path, vars(shards.args), rows, shards.tensor, folders
        )
        notes |= _tied_head(shards.folder, name_map, ranks)
        if step := shards.first.tree.get("iteration", shards.first.tree.get("total_iters", 0)):
            notes["optimizer"] = f"only weights are read, here of iteration {step}"
        yield weights_from(
            shards.folder, name_map, tensors, model,
            format=format, path=path, ignored=notes, read=read_joined,
        )  # fmt: skip


def _name_map(shards: Shards, format: str) -> NameMap:
    names = [name.removeprefix("model.") for name in shards.first if name.startswith("model.")]
    name_map = match_name_map(shards.folder, format, NAME_MAPS[format], names)
    if name_map not in NAME_MAPS["megatron"]:
        return name_map
    version = shards.first.tree.get("checkpoint_version", 0)
    return in_version(shards.first.path, version, name_map)


def _tied_head(folder: Path, name_map: NameMap, ranks: RankTensors) -> dict[str, str]:
    table, head = name_map.global_rows[0].theirs, name_map.head
    for first, last in zip(ranks[0], ranks[-1], strict=True):
        if head is None or head not in last or table not in first:
            return {}
        check_tied(folder, head, last[head], first[table])
    return {str(head): f"tied to {table}"}
