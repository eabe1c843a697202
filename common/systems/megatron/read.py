"""Reader of checkpoints of Megatron-LM (``megatron``) and Megatron-Core (``megatron_core``), of any
tensor and pipeline size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.config.values import STATE_PARTS, rule_keeping
from common.dialects.rules import whole
from common.errors import CheckpointError, ConfigError
from common.systems.megatron.shards import FILE, NAME_MAPS, find_folder, join_stages, open_shards, rank_files
from common.systems.megatron_args import args_of, in_version, weights_of_ranks
from common.systems.name_map import NameMap, match_name_map
from common.systems.rank_parts import Ranks, name_in_order
from common.systems.run_state import NO_SCALE, first_number, new_run
from common.systems.weights import Weights, check_tied
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.containers import open_tensors


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """Optimizer state in a rank's file, in the order of the optimizer's parameters."""

    moments: Mapping[str, Sequence[FileTensor]] = field(default_factory=dict)
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
            elsewhere = "in a file of each data-parallel rank: only weights"
            return SavedState(why_not="" if file.path.name == FILE else elsewhere)
        inner = outer.get("optimizer") or outer.get("optimizer_state_dict") or outer
        ids = [number for group in inner["param_groups"] for number in group["params"]]
        if "state" not in inner:
            sharded = "sharded by the distributed optimizer (distrib_optim.pt): only weights"
            return SavedState(why_not=sharded if ids else "")
        groups = outer.get("fp32_from_fp16_params", outer.get("fp32_from_fp16", ()))
        copies = [copy for group in groups for copy in group]
        state = inner["state"]
        moments = {
            part: [state[number][part] for number in ids] for part in STATE_PARTS if state and part in state[ids[0]]
        }
        # the step's place in apex, and in torch
        steps = inner["param_groups"][0].get("step", state[ids[0]].get("step") if state else None)
        stored = [*copies, *(tensor for tensors in moments.values() for tensor in tensors)]
        if not all(isinstance(tensor, FileTensor) for tensor in stored):
            raise TypeError("no tensors")
        steps = None if steps is None else whole(first_number(steps))
        return SavedState(moments=moments, copies=copies, steps=steps, scaler=outer.get("grad_scaler"))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        return SavedState(why_not=f"state of the optimizer: of no form that is known ({error!r}): only weights")


def detects(path: Path, format: str = "megatron") -> bool:
    try:
        folder = find_folder(path)
        files = rank_files(folder) if folder else {}
        if not files:
            # Megatron's format torch_dist, which is refused when it is opened
            return folder is not None and format == "megatron_core"
        with open_tensors(files[min(files)]) as file:
            return any(name.startswith("model.language_model.") for name in file) == (format == "megatron")
    except (CheckpointError, ConfigError):  # reported when the files are opened
        return format == "megatron"


@contextmanager
def open_megatron(path: Path, format: str = "megatron") -> Iterator[Weights]:
    """Open a checkpoint.

    path: the root, one of its folders iter_... or release, or the file of a single rank. Raises
    CheckpointError and ConfigError.
    """
    with open_shards(path) as files:
        first = files[0][0]
        folder = first.path.parents[1]
        name_map = _name_map(folder, first, format)
        saved = [[read_optimizer(file) for file in stage] for stage in files]
        stored = [[_weights_in(file, name_map) for file in stage] for stage in files]

        def named(pick: Callable[[SavedState], Sequence[FileTensor]]) -> list[dict[str, FileTensor]]:
            """Name tensors that are in the optimizer's order. The names in the file are in the
            order of the modules.

            Megatron makes two groups, of parameters with decay (matrices) and without (vectors),
            each in the order of the modules: ``_get_params_for_weight_decay_optimization`` and
            later ``get_param_groups`` in megatron/optimizer/__init__.py, ``_get_param_groups`` in
            megatron/core/optimizer/__init__.py. The first comes first, but in releases of
            megatron-core whose groups are in the order of their first parameters, on all but the
            first stage: both are read.
            """
            try:
                return join_stages(
                    [
                        [
                            name_in_order({name: rank[name].shape for name in rank}, pick(one))
                            for rank, one in zip(*stage, strict=True)
                        ]
                        for stage in zip(stored, saved, strict=True)
                    ]
                )
            except ValueError as error:
                raise CheckpointError(f"{folder}: {error}") from None

        ranks, state = join_stages(stored), saved[0][0]
        has_copies = all(one.copies for stage in saved for one in stage)
        masters = named(lambda one: one.copies) if has_copies else []
        moments = {
            part: named(lambda one, part=part: one.moments.get(part, ()))  # type: ignore[misc]
            for part in state.moments
        }
        notes = {}
        if masters:
            notes["model"] = "weights of less precision, of which the optimizer has the float32"
        notes |= _tied_head(folder, name_map, masters or ranks)
        for rank in (*ranks, *masters, *(rank for part in moments.values() for rank in part)):
            rank.pop(name_map.head or "", None)
        step = first.tree.get("iteration", first.tree.get("total_iters", 0))
        yield weights_of_ranks(
            path, format, first, folder, name_map, ranks,
            masters=masters, moments=moments, notes=notes, counter="iteration", step=step,
            new_run=lambda: _run_of(first, state, step),
            without_run={"optimizer": state.why_not} if state.why_not else {},
        )  # fmt: skip


def _name_map(folder: Path, first: TensorFile, format: str) -> NameMap:
    names = [name.removeprefix("model.") for name in first if name.startswith("model.")]
    name_map = match_name_map(folder, format, NAME_MAPS[format], names)
    if name_map not in NAME_MAPS["megatron"]:
        return name_map
    return in_version(first.path, first.tree.get("checkpoint_version", 0), name_map)


def _weights_in(file: TensorFile, name_map: NameMap) -> dict[str, FileTensor]:
    prefix = "model."
    names = [name for name in file if name.startswith(prefix)]
    found = {name.removeprefix(prefix): file[name] for name in names}
    return {name: tensor for name, tensor in found.items() if not name_map.ignores(name)}


def _tied_head(folder: Path, name_map: NameMap, ranks: Ranks) -> dict[str, str]:
    table, head = name_map.table, name_map.head
    if head is None or not all({head, table} <= rank.keys() for rank in ranks):
        return {}
    for rank in ranks:
        check_tied(folder, head, rank[head], rank[table])
    return {head: f"tied to {table}"}


def _run_of(first: TensorFile, saved: SavedState, step: Any) -> dict[str, Any]:
    """Return the state of the run, as far as Megatron's own numbers hold it."""
    args, scale = args_of(first), dict(NO_SCALE)
    if saved.scaler is not None:
        value = first_number(saved.scaler.get("scale", args.get("loss_scale")))
        hysteresis = args.get("hysteresis") or 2
        left = whole(saved.scaler.get("hysteresis_tracker", hysteresis))
        scale |= {
            "mode": "dynamic" if "scale" in saved.scaler else "static",
            "value": float(np.float32(value or 1.0)),
            "finite_steps": whole(saved.scaler.get("growth_tracker", 0)),
            "overflows": max(0, hysteresis - left),
        }
    scheduler = first.tree.get("opt_param_scheduler")  # it counts samples of updates
    counted = scheduler.get("num_steps") if isinstance(scheduler, Mapping) else None
    return new_run(
        rule_keeping(saved.moments),
        step=step,
        updates=step if saved.steps is None else saved.steps,
        scale=scale,
        consumed_samples=whole(args.get("consumed_train_samples") or 0),
        updated_samples=None if counted is None else whole(counted),
    )
