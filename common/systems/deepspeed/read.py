"""Checkpoints of Megatron-DeepSpeed (``deepspeed``), of any tensor and pipeline size, with the
optimizer of ZeRO 0, 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config.update_rules import rule_keeping
from common.dialects.rules import whole
from common.errors import CheckpointError, ConfigError
from common.systems.deepspeed.files import (
    NAME_MAP,
    Checkpoint,
    args_of,
    find_folder,
    open_checkpoint,
)
from common.systems.deepspeed.optimizer import Saved, read_optimizers
from common.systems.megatron_args import in_version, model_of_args
from common.systems.rank_parts import Ranks, join_ranks, read_joined
from common.systems.run_state import (
    NO_SCALE,
    checked_run,
    new_run,
    reading_counters,
    require_moments,
    require_one_run,
)
from common.systems.strangers import UNDER_DEEPSPEED
from common.systems.weights import Weight, Weights, import_names, weights_from
from common.tensor_files.arrays import FileTensor
from common.tensor_files.pickled_values import Foreign
from common.weights.names import POSITIONS


def detects(path: Path) -> bool:
    try:
        return find_folder(path) is not None
    except (CheckpointError, ConfigError):  # reported when the files are opened
        return True


@contextmanager
def open_deepspeed(path: Path) -> Iterator[Weights]:
    """Open a checkpoint.

    path: the root with ``latest``, its folder global_stepN, or a file in that. Raises
    CheckpointError and ConfigError.
    """
    with open_checkpoint(path) as there:
        first = there.first
        if any(name.endswith(f".{POSITIONS}") for name in first):
            root = there.folder.parent
            raise CheckpointError(f"{path}: {UNDER_DEEPSPEED.format(root=root)}")
        name_map = in_version(first.path, first.tree.get("checkpoint_version", 0), NAME_MAP)
        ranks = [there.weights(tensor) for tensor in range(there.tensor)]
        table = name_map.global_rows[0].theirs
        rows = sum(rank[table].shape[0] for rank in ranks if table in rank and rank[table].shape)
        folders = (there.folder, there.folder.parent)
        model, run, notes = model_of_args(first.path, args_of(first), rows, there.tensor, folders)
        of_names = {row.theirs: row for row in name_map.rows(model.num_layers)}

        def named(parts: Ranks, suffix: str = "") -> dict[str, Weight]:
            joined = join_ranks(there.folder, parts, of_names)
            return import_names(
                there.folder, name_map, joined, model, suffix=suffix, read=read_joined
            )

        weights = weights_from(
            there.folder, name_map, join_ranks(there.folder, ranks, of_names), model,
            format="deepspeed", path=path, ignored=notes, read=read_joined,
        )  # fmt: skip
        saved = read_optimizers(there)
        notes = {}
        if saved and all(one.masters for one in saved):
            masters = _by_tensor_rank(there, saved, lambda one: one.masters)
            weights = replace(weights, tensors=named(masters))
            notes["module"] = "weights of less precision, of which the optimizer has the float32"
        moments: dict[str, Weight] = {}
        for part in saved[0].moments if saved else ():
            parts = _by_tensor_rank(there, saved, lambda one, part=part: one.moments[part])  # type: ignore[misc]
            moments |= named(parts, f".{part}")
        step = first.tree.get("global_steps", first.tree.get("iteration", 0))
        if run is not None:
            require_one_run(first.path, "global_steps", step, run["state"]["step"])
        if run is None and moments:
            run = _run_of(there, saved[0], step)
        if step and run is None:
            notes["global_steps"] = "where training stood, without moments"
        moments = {} if run is None else require_moments(there.folder, moments, run, model)
        yield replace(weights, moments=moments, run=run, ignored={**weights.ignored, **notes})


def _by_tensor_rank(
    there: Checkpoint, saved: Sequence[Saved], pick: Callable[[Saved], Mapping[str, FileTensor]]
) -> list[dict[str, FileTensor]]:
    """Join the stages of each tensor rank, with the embeddings of the first stage."""
    ranks: list[dict[str, FileTensor]] = [{} for _ in range(there.tensor)]
    for number, one in enumerate(saved):
        rank = ranks[number % there.tensor]
        rank |= {name: tensor for name, tensor in pick(one).items() if name not in rank}
    return ranks


def _run_of(there: Checkpoint, saved: Saved, step: Any) -> dict[str, Any]:
    """Return the state of the run, as far as DeepSpeed's numbers hold it. Raises ConfigError."""
    path, tree = there.first.path, there.first.tree
    with reading_counters(path):
        skipped = whole(tree.get("skipped_steps", 0))
        samples = args_of(there.first).get("consumed_train_samples")
        run = new_run(
            rule_keeping(saved.moments),
            step=step,
            updates=step - skipped if saved.steps is None else whole(saved.steps),
            scale=_scale(saved.state),
            consumed_samples=whole(tree.get("global_samples", 0) if samples is None else samples),
        )
    run["state"]["skipped_steps"] = skipped
    return checked_run(path, run)


def _scale(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the loss scale: FP16_Optimizer's own values, or those of ZeRO's
    loss_scaler (deepspeed/runtime/fp16/loss_scaler.py).
    """
    scaler = state.get("loss_scaler")
    values = scaler.state if isinstance(scaler, Foreign) else state
    if not isinstance(values, dict) or "cur_scale" not in values:
        return dict(NO_SCALE)
    dynamic = "last_overflow_iter" in values
    value = float(values["cur_scale"])
    if not dynamic:
        return dict(NO_SCALE) if value == 1 else {**NO_SCALE, "mode": "static", "value": value}
    since = whole(values["cur_iter"]) - whole(values["last_overflow_iter"]) - 1
    shift = whole(values.get("delayed_shift", 1))
    return {
        "mode": "dynamic",
        "value": value,
        "finite_steps": max(0, since) % max(1, whole(values["scale_window"])),
        "overflows": max(0, shift - whole(values.get("cur_hysteresis", shift))),
    }
