"""Trial of micro batch and recomputation on the device, where a run has auto for them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import numpy as np

from common.config.resolved import as_run
from common.dataset import Batch
from common.parallel.resolved_run import ResolvedRun, TrainingRun
from common.planner.room import asked_for
from common.training.start import Start
from torch_gpt2.device import TorchDevice
from torch_gpt2.engine import Engine


def make_trial(config: ResolvedRun, device: TorchDevice) -> Callable[[TrainingRun], bool] | None:
    """Return the trial of a run, or None where the plan decides by itself.

    A rank tries without the others, since one that runs out of memory within a collective would
    leave them waiting. So it needs the whole model on a device with memory of its own.
    """
    parallel = config.parallel
    is_whole = parallel.model_parallel == parallel.pipeline_stage == 1 and not parallel.zero_stage
    if device.kind == "cpu" or config.engine != "native" or not is_whole:
        return None
    return partial(fits, device=device)


def fits(config: TrainingRun, device: TorchDevice) -> bool:
    """Tell whether two steps of two micro batches fit on the device.

    The second one has the optimizer's state. Memory is free again when it returns. Raises errors
    other than a lack of memory.
    """
    count = min(2, config.train.accumulation_steps)
    rows = count * config.train.micro_batch_size
    alone = as_run(
        TrainingRun,
        config,
        parallel={"data_parallel": 1, "strategy": "ddp"},
        train={
            "global_batch_size": rows,
            "accumulation_steps": count,
            "rampup_batch_size": None,
            "compile": False,
        },
    )
    tokens = np.zeros((rows, config.model.seq_length + 1), np.int32)
    batch = Batch(tokens=tokens, samples=rows, consumed_samples=rows, sample_hash="")
    try:
        _take_steps(alone, device, batch)
    except Exception as error:
        if asked_for(error) is None:
            raise
        return False
    finally:
        gc.collect()
        device.release_memory()
    return True


def _take_steps(config: TrainingRun, device: TorchDevice, batch: Batch) -> None:
    engine = Engine(config, device)
    engine.begin(Start())
    engine.run(iter([batch, batch]), 2)
    engine.finish()
