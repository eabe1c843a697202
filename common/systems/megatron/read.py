"""Reader of checkpoints of Megatron-LM (``megatron``) and Megatron-Core (``megatron_core``), of any
tensor and pipeline size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError
from common.systems.megatron.config import read_config
from common.systems.megatron.names import NAME_MAPS
from common.systems.megatron.optimizer import SavedState, by_name, read_optimizer, run_of
from common.systems.megatron.shards import (
    RankTensors,
    Shards,
    find_folder,
    join,
    model_tensors,
    open_shards,
    rank_files,
)
from common.systems.megatron_args import in_version
from common.systems.name_map import NameMap, match_name_map
from common.systems.rank_parts import Joined, read_joined
from common.systems.run_state import require_moments, require_one_run
from common.systems.weights import Weight, Weights, check_tied, import_names, weights_from
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
        saved = [[read_optimizer(file) for file in stage] for stage in shards.files]
        stored = [
            [{n: t for n, t in rank.items() if not name_map.ignores(n)} for rank in stage]
            for stage in model_tensors(shards)
        ]
        ranks: RankTensors = stored
        ignored: dict[str, str] = {}
        if all(rank.copies for stage in saved for rank in stage):
            ranks = by_name(shards, stored, [[rank.copies for rank in stage] for stage in saved])
            ignored["model"] = "weights of less precision, of which the optimizer has the float32"
        ignored |= _tied_head(shards.folder, name_map, ranks)
        tensors = _without_head(shards, ranks, name_map)
        table = name_map.global_rows[0].theirs
        model, run, notes = read_config(
            shards, tensors[table].shape[0] if table in tensors and tensors[table].shape else 0
        )
        ignored |= notes
        weights = weights_from(
            shards.folder,
            name_map,
            tensors,
            model,
            format=format,
            path=path,
            ignored=ignored,
            read=read_joined,
        )
        moments: dict[str, Weight] = {}
        for part in saved[0][0].moments:
            there = by_name(
                shards, stored, [[rank.moments.get(part, []) for rank in stage] for stage in saved]
            )
            joined = _without_head(shards, there, name_map)
            moments |= import_names(
                shards.folder, name_map, joined, model, suffix=f".{part}", read=read_joined
            )
        run, notes = _where_it_stood(shards, saved[0][0], run, has_moments=bool(moments))
        moments = {} if run is None else require_moments(shards.folder, moments, run, model)
        yield replace(weights, moments=moments, run=run, ignored={**weights.ignored, **notes})


def _name_map(shards: Shards, format: str) -> NameMap:
    names = [name.removeprefix("model.") for name in shards.first if name.startswith("model.")]
    name_map = match_name_map(shards.folder, format, NAME_MAPS[format], names)
    if name_map not in NAME_MAPS["megatron"]:
        return name_map
    version = shards.first.tree.get("checkpoint_version", 0)
    return in_version(shards.first.path, version, name_map)


def _without_head(shards: Shards, ranks: RankTensors, name_map: NameMap) -> dict[str, Joined]:
    tensors = join(shards.folder, ranks, name_map)
    tensors.pop(name_map.head or "", None)
    return tensors


def _where_it_stood(
    shards: Shards, saved: SavedState, run: dict[str, Any] | None, *, has_moments: bool
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Return the state of the run, and what is left out of it and why. run: the state in a
    model.yaml.
    """
    step = shards.first.tree.get("iteration", shards.first.tree.get("total_iters", 0))
    if run is not None:
        require_one_run(shards.first.path, "iteration", step, run["state"]["step"])
        return run, {}
    if has_moments:
        return run_of(shards, saved, step), {}
    notes = {"optimizer": saved.why_not} if saved.why_not else {}
    return None, notes | (
        {"iteration": "where training stood, without the state of the optimizer"} if step else {}
    )


def _tied_head(folder: Path, name_map: NameMap, ranks: RankTensors) -> dict[str, str]:
    table, head = name_map.global_rows[0].theirs, name_map.head
    for first, last in zip(ranks[0], ranks[-1], strict=True):
        if head is None or head not in last or table not in first:
            return {}
        check_tied(folder, head, last[head], first[table])
    return {str(head): f"tied to {table}"}
