"""Reader of the state of Megatron's optimizers: moments and float32 copies, in the order of its
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.config.update_rules import STATE_PARTS, rule_keeping
from common.dialects.rules import whole
from common.errors import ConfigError
from common.systems.megatron.shards import FILE, RankTensors, Shards
from common.systems.rank_parts import name_in_order
from common.systems.run_state import NO_SCALE, checked_run, new_run
from common.tensor_files.arrays import FileTensor, TensorFile


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
        if isinstance(steps, FileTensor):
            steps = whole(steps.read().reshape(-1)[0].item())
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
    try:
        return checked_run(shards.first.path, _counted(shards, saved, step))
    except (TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{shards.first.path}: its counters or its grad_scaler are not numbers ({error}); copy"
            " it again"
        ) from None


def _counted(shards: Shards, saved: SavedState, step: int) -> dict[str, Any]:
    args, scale = shards.args, dict(NO_SCALE)
    if saved.scaler is not None:
        value = saved.scaler.get("scale", getattr(args, "loss_scale", None))
        value = value.read().reshape(-1)[0] if isinstance(value, FileTensor) else value
        scale |= {
            "mode": "dynamic" if "scale" in saved.scaler else "static",
            "value": float(np.float32(value or 1.0)),
        }
        hysteresis = getattr(args, "hysteresis", None) or 2
        scale |= {
            "finite_steps": whole(saved.scaler.get("growth_tracker", 0)),
            "overflows": max(
                0, hysteresis - whole(saved.scaler.get("hysteresis_tracker", hysteresis))
            ),
        }
    scheduler = shards.first.tree.get("opt_param_scheduler")  # it counts samples of updates
    counted = scheduler.get("num_steps") if isinstance(scheduler, Mapping) else None
    return new_run(
        rule_keeping(saved.moments),
        step=step,
        updates=step if saved.steps is None else whole(saved.steps),
        scale=scale,
        consumed_samples=whole(getattr(args, "consumed_train_samples", None) or 0),
        updated_samples=None if counted is None else whole(counted),
    )
