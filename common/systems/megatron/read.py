"""Reader of checkpoints of Megatron-LM (``megatron``) and Megatron-Core (``megatron_core``), of any
tensor and pipeline size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.config.update_rules import STATE_PARTS, rule_keeping
from common.dialects.rules import whole
from common.errors import CheckpointError, ConfigError
from common.systems.megatron.shards import (
    FILE,
    NAME_MAPS,
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
from common.systems.rank_parts import Joined, name_in_order, read_joined
from common.systems.run_state import (
    NO_SCALE,
    checked_run,
    first_number,
    new_run,
    reading_counters,
    require_moments,
    require_one_run,
)
from common.systems.weights import Weight, Weights, check_tied, import_names, weights_from
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """Optimizer state in a rank's file, in the order of the optimizer's parameters."""

    moments: Mapping[str, Sequence[FileTensor]]
    copies: Sequence[FileTensor] = ()
    """Float32 copies of weights of lower precision."""
    steps: int | None = None
    scaler: Mapping[str, Any] | None = None
    why_not: str = ""


def read_optimizer(file: TensorFile) -> SavedState:
    """Megatron's FP32Optimizer saves what torch's optimizers do; Float16OptimizerWithFloat16Params
    has that inside (``state_dict`` of both in megatron/optimizer/optimizer.py, since then
    megatron/core/optimizer/optimizer.py).
    """
    try:
        outer = file.tree.get("optimizer")
        if outer is None:
            return SavedState(
                moments={},
                why_not=""
                if file.path.name == FILE
                else "in a file of each data-parallel rank: only weights",
            )
        inner = outer.get("optimizer") or outer.get("optimizer_state_dict") or outer
        ids = [number for group in inner["param_groups"] for number in group["params"]]
        if "state" not in inner:
            return SavedState(
                moments={},
                why_not="sharded by the distributed optimizer (distrib_optim.pt): only weights"
                if ids
                else "",
            )
        groups = outer.get("fp32_from_fp16_params", outer.get("fp32_from_fp16", ()))
        copies = [copy for group in groups for copy in group]
        state = inner["state"]
        moments = {
            part: [state[number][part] for number in ids]
            for part in STATE_PARTS
            if state and part in state[ids[0]]
        }
        # the step's place in apex, and in torch
        steps = inner["param_groups"][0].get("step", state[ids[0]].get("step") if state else None)
        stored = [*copies, *(tensor for tensors in moments.values() for tensor in tensors)]
        if not all(isinstance(tensor, FileTensor) for tensor in stored):
            raise TypeError("no tensors")
        steps = None if steps is None else whole(first_number(steps))
        return SavedState(
            moments=moments, copies=copies, steps=steps, scaler=outer.get("grad_scaler")
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        return SavedState(
            moments={},
            why_not=f"state of the optimizer: of no form that is known ({error!r}): only weights",
        )


def by_name(
    shards: Shards, names: RankTensors, values: Sequence[Sequence[Sequence[FileTensor]]]
) -> RankTensors:
    """Name tensors that are in the optimizer's order. The names in the file are in the order of the
    modules.

    Megatron makes two groups, of parameters with decay (matrices) and without (vectors), each in
    the order of the modules: ``_get_params_for_weight_decay_optimization`` and later
    ``get_param_groups`` in megatron/optimizer/__init__.py, ``_get_param_groups`` in
    megatron/core/optimizer/__init__.py. The first comes first, but in releases of megatron-core
    whose groups are in the order of their first parameters, on all but the first stage: both are
    read.
    """
    return [
        [
            name_in_order(shards.folder, {name: rank[name].shape for name in rank}, there)
            for rank, there in zip(*stage, strict=True)
        ]
        for stage in zip(names, values, strict=True)
    ]


def run_of(shards: Shards, saved: SavedState, step: int) -> dict[str, Any]:
    """Return the state of the run, as far as Megatron's own numbers hold it. Raises ConfigError for
    values that are not numbers.
    """
    args, scale = shards.args, dict(NO_SCALE)
    with reading_counters(shards.first.path):
        if saved.scaler is not None:
            value = first_number(saved.scaler.get("scale", getattr(args, "loss_scale", None)))
            hysteresis = getattr(args, "hysteresis", None) or 2
            left = whole(saved.scaler.get("hysteresis_tracker", hysteresis))
            scale |= {
                "mode": "dynamic" if "scale" in saved.scaler else "static",
                "value": float(np.float32(value or 1.0)),
                "finite_steps": whole(saved.scaler.get("growth_tracker", 0)),
                "overflows": max(0, hysteresis - left),
            }
        scheduler = shards.first.tree.get("opt_param_scheduler")  # it counts samples of updates
        counted = scheduler.get("num_steps") if isinstance(scheduler, Mapping) else None
        run = new_run(
            rule_keeping(saved.moments),
            step=step,
            updates=step if saved.steps is None else saved.steps,
            scale=scale,
            consumed_samples=whole(getattr(args, "consumed_train_samples", None) or 0),
            updated_samples=None if counted is None else whole(counted),
        )
    return checked_run(shards.first.path, run)


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
        rows = tensors[table].shape[0] if table in tensors and tensors[table].shape else 0
        folders = (shards.folder, shards.folder.parent)
        model, run, notes = model_of_args(
            shards.first.path, vars(shards.args), rows, shards.tensor, folders
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
