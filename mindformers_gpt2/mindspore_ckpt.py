"""MindSpore's own .ckpt files, written beside the project's checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from common.config.schema import CheckpointConfig
from common.errors import StorageError
from common.parallel.resolved_run import ResolvedRun
from common.training.state import TrainState


def epoch_and_step(
    config: ResolvedRun, samples_per_epoch: int, state: TrainState
) -> tuple[int, int]:
    """Return the epoch and the step in it, both from 1, as MindSpore counts them."""
    batch = config.train.global_batch_size
    steps = max(1, samples_per_epoch // batch)
    return (state.step - 1) // steps + 1, (state.step - 1) % steps + 1


def write_ckpt(
    tensors: Mapping[str, Any],
    rank: int,
    config: CheckpointConfig,
    place: tuple[int, int],
    step: int,
    folder: Path,
) -> None:
    """Write ``folder/rank_R/PREFIX_rank_R-EPOCH_STEP.ckpt``, whole or not at all.

    The newest ``checkpoint.keep`` files of this name are kept (0: all). place: epoch and step in
    it.
    """
    rank_folder, name = folder / f"rank_{rank}", f"{config.ckpt_prefix}_rank_{rank}"
    number = f"{place[0]}_{place[1]}"
    target = rank_folder / f"{name}-{number}.ckpt"
    temporary = rank_folder / f".{name}-{number}.tmp.ckpt"
    leftover = rf"\.{re.escape(name)}-(\d+)_(\d+)\.tmp\.ckpt.*"  # MindSpore adds endings of its own
    counters = {"epoch_num": np.int32(place[0]), "step_num": np.int32(step)}
    try:
        rank_folder.mkdir(parents=True, exist_ok=True)
        _remove(_of_name(rank_folder, leftover))
        ms.save_checkpoint(
            [
                {"name": key, "data": Tensor(value)}
                for key, value in (*tensors.items(), *counters.items())
            ],
            str(temporary),
        )
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except (OSError, RuntimeError) as error:  # MindSpore raises either on a full disk
        _remove(_of_name(rank_folder, leftover))
        reason = (
            error.strerror if isinstance(error, OSError) else str(error).strip().splitlines()[0]
        )
        raise StorageError(
            f"{target}: cannot be written: {reason}; the checkpoint beside it is whole,"
            " checkpoint.resume=auto goes on"
        ) from None
    numbers = _of_name(rank_folder, rf"{re.escape(name)}-(\d+)_(\d+)\.ckpt")
    others = sorted((path for path in numbers if path != target), key=lambda path: numbers[path])
    # of a run that was taken up before it
    future = [path for path in others if numbers[path] > numbers[target]]
    _remove(
        [*future, *(path for path in others if path not in future)][
            : max(0, len(numbers) - config.keep)
        ]
        if config.keep
        else []
    )


def _of_name(folder: Path, pattern: str) -> dict[Path, tuple[int, int]]:
    """The files whose whole name matches, with the epoch and the step in it."""
    matches = ((path, re.fullmatch(pattern, path.name)) for path in folder.glob("*"))
    return {path: (int(match[1]), int(match[2])) for path, match in matches if match}


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
